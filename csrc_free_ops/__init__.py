"""Device code: Triton kernels and the helpers they are composed of. Imports triton alone."""
