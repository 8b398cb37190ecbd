"""Random training programs: a model, features that act on it, and the comparison with plain PyTorch."""
