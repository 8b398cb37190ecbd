"""Streams, threads and memory; knows nothing of training."""
