"""The user's own Python state: gives each micro-batch its view of it, and checks changes of it."""
