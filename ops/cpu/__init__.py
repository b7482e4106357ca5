"""The ops on a CPU, by PyTorch's own flash kernel."""
