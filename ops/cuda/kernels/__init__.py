"""Device code in Triton and Gluon only."""
