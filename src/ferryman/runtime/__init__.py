"""Streams, threads and memory. Independent of training."""
