"""What fits, and how long it takes: the only place that decides."""
