"""The host side: where the model and the optimizer's state live."""
