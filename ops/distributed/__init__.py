"""Attention states on several ranks: where tensors are, what is sent, how it is merged."""
