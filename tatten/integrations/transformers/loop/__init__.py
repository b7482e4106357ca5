"""A decode loop for `generate`: one captured step, which the host launches ahead and never waits for."""
