"""What things take: memory and, later, time."""
