"""Is Ferryman right on this device? Checks that need nothing but the package."""
