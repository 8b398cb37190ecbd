"""Checks that Ferryman computes correctly on this device. They need nothing but the package."""
