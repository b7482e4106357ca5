"""A decode loop for `generate`: one captured step, which the host launches ahead of the tokens that it reads."""
