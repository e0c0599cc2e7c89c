"""Drop-ins for serving engines. Nothing here is imported by ``dsv32_ops`` itself."""
