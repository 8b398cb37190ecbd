"""The device's side of a step: micro-batches that meet at the units, and units that come and go."""
