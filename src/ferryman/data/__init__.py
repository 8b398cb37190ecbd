"""Data for causal language models: text or token files, and windows of them whose position can be resumed."""
