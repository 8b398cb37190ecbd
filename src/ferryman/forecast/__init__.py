"""What a step of a model would take, before anything is allocated: memory, and seconds."""
