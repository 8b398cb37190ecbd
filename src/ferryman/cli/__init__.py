"""The command line: one file for each command, put together in `main.py`."""
