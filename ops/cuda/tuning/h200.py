"""Measurements of an NVIDIA H200."""

from tatten.ops.cuda.gpu_rates import GpuRates

DEVICE, CAPABILITY = "NVIDIA H200", (9, 0)

RATES = GpuRates()  # names the fields that differ from an H200's

# For each number of (sequence, kv head) pairs, the number of keys from which on a provider is the fastest, as
# `python benchmarks/calibrate.py --write` measured it.
FASTEST = {
    1: {256: "triton", 65536: "cudnn"},
    2: {256: "triton", 32768: "cudnn"},
    4: {256: "triton", 131072: "cudnn"},
    8: {256: "triton", 65536: "cudnn"},
    16: {256: "triton", 32768: "cudnn", 131072: "triton"},
    32: {256: "triton"},
    64: {256: "cudnn", 1024: "triton", 4096: "cudnn", 8192: "triton"},
    128: {256: "cudnn", 16384: "triton"},
    256: {256: "triton", 1024: "cudnn", 2048: "triton"},
    512: {256: "triton"},
    1024: {256: "triton", 512: "cudnn", 2048: "triton"},
}
