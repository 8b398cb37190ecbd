"""Data for causal language models: text files, token files, and windows of tokens that can be resumed."""
