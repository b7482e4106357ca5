"""Device code in Triton and Gluon, and nothing else."""
