"""Ferryman inside other libraries' training loops; each is imported only where it is used."""
