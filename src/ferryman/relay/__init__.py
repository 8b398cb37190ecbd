"""The device's side of a step: runs micro-batches in lockstep, and moves units to and from the device."""
