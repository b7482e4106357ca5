"""Measurements of an NVIDIA H100 80GB HBM3."""

from tatten.ops.cuda.gpu_rates import GpuRates

DEVICE, CAPABILITY = "NVIDIA H100 80GB HBM3", (9, 0)

RATES = GpuRates(short_tiles_most_bytes=float("inf"))  # 1 x 131072 takes 179.3 us, and 183.0 with longer tiles

# For each number of (sequence, kv head) pairs, the number of keys from which on a provider is the fastest, as
# `python benchmarks/calibrate.py --write` measured it.
FASTEST = {
    1: {256: "triton", 65536: "cudnn"},
    2: {256: "triton", 32768: "cudnn"},
    4: {256: "triton", 32768: "cudnn"},
    8: {256: "triton", 65536: "cudnn"},
    16: {256: "triton", 32768: "cudnn", 131072: "triton"},
    32: {256: "triton", 16384: "cudnn", 65536: "triton"},
    64: {256: "cudnn", 1024: "triton", 4096: "cudnn", 8192: "triton"},
    128: {256: "cudnn", 4096: "triton", 32768: "cudnn"},
    256: {256: "triton"},
    512: {256: "triton", 512: "cudnn", 1024: "triton"},
    1024: {256: "cudnn", 1024: "triton"},
}
