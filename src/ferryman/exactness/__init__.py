"""The user's own state in Python: what each micro-batch sees of it, and what is checked."""
