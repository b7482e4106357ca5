"""How Inductor launches the kernels of the ops itself."""
