"""The abilities of a GPU that plans ask for, by its compute capability.

The measured rates of a GPU, and its fastest providers, are in its module in `tatten.ops.cuda.tuning`.
"""

from __future__ import annotations

import functools

import torch

Capability = tuple[int, int]


def is_gpu(device: torch.device) -> bool:
    """Return True if `device` is a GPU of this machine."""
    return device.type == "cuda" and torch.cuda.is_available()


@functools.cache
def capability(device: torch.device) -> Capability:
    """Return the compute capability; (9, 0) without a GPU, so that kernels can be compiled for Hopper."""
    return torch.cuda.get_device_capability(device) if is_gpu(device) else (9, 0)


@functools.cache
def device_name(device: torch.device) -> str:
    """Return the name of a GPU, such as NVIDIA H200; empty without one, as for fake tensors without a GPU."""
    return torch.cuda.get_device_name(device) if is_gpu(device) else ""


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if is_gpu(device) else 1


def has_large_shared_memory(device: torch.device) -> bool:
    """Return True if a program may have 227 KiB of shared memory, as on datacentre GPUs since Hopper."""
    return capability(device)[0] in (9, 10)


def has_early_launches(device: torch.device) -> bool:
    """Return True if a launch may begin before the one before it ends: programmatic dependent launch, since Hopper."""
    return capability(device) >= (9, 0)


def has_tma(device: torch.device) -> bool:
    """Return True if tiles can be read by TMA, since Hopper."""
    return capability(device) >= (9, 0)


def has_wgmma(device: torch.device) -> bool:
    """Return True if the Gluon kernels run: no other architecture than Hopper has its warpgroup instructions."""
    return capability(device) == (9, 0)


def has_float8(device: torch.device) -> bool:
    """Return True if kernels can convert float8_e4m3fn, since Ada."""
    return capability(device) >= (8, 9)


def has_cudnn_decode(device: torch.device) -> bool:
    """Return True if cuDNN's attention is made for the GPU, unlike PyTorch's flash attention, since Hopper."""
    return capability(device) >= (9, 0)
