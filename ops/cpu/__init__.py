"""The ops on a CPU, on top of PyTorch's own flash kernel."""
