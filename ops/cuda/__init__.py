"""The ops on CUDA: who computes what, and the planning of launches. Device code is in `kernels`."""
