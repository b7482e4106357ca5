"""The ops on CUDA: the choice of a provider, and the planning of launches. Device code is in `kernels`."""
