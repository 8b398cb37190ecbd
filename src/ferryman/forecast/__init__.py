"""Predicts the memory and the time of a step before anything is allocated."""
