"""Tables of what was measured to be fastest, one module for each architecture."""
