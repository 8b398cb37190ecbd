"""The user's model, seen as units."""
