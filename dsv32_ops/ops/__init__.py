"""One op family per module; importing a module registers its ops."""
