"""Helpers of the tests: models, the plain loop to compare with, ranks, commands, and random programs."""
