"""Lowerings by which Inductor launches the kernels of the ops itself."""
