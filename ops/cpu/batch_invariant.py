"""Attention states on a CPU, bitwise independent of other sequences and of the number of threads.

PyTorch's kernel in float32 and float64 has one thread add up the keys of a (sequence, head), 512 at a time from the
first one on. Its products are MKL's, and MKL adds up in another order in two cases: if a matrix does not begin on a
cache line, and if MKL has threads of its own. This file rules out both.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tatten.ops.cpu.flash import attend_in_one_call, empty_state
from tatten.ops.states import State

CACHE_LINE = 64  # bytes


def attend_each(
    q_rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, some_empty: bool
) -> State:
    """Like `tatten.ops.cpu.flash.attend`, for each sequence as if it were alone, in float32 or float64."""
    value_dim = value.shape[3]
    if key.shape[2] == 0:
        return empty_state(q_rows, value_dim)
    q_rows, mask, n_rows = *_fill_up(q_rows, mask), q_rows.shape[2]
    if not all(_on_cache_lines(x) for x in (q_rows, key, value)):
        q_rows, key, value = (_to_cache_lines(x) for x in (q_rows, key, value))
    alone = q_rows.shape[:2] == (1, 1)
    if alone:  # a single (sequence, head) is not given to a thread, and MKL would use several for each product
        q_rows, key, value = (x.expand(2, -1, -1, -1) for x in (q_rows, key, value))
    out, lse = attend_in_one_call(q_rows, key, value, mask, scale, some_empty)
    sequences = slice(1) if alone else slice(None)
    # Copies have one layout for any number of calls: vectorised functions round strided numbers differently.
    return out[sequences, :, :n_rows, :value_dim].contiguous(), lse[sequences, :, :n_rows].contiguous()


def _fill_up(q_rows: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Add queries of zeros, so that the kernel's buffers of each thread begin on cache lines."""
    missing = -q_rows.shape[2] % (CACHE_LINE // q_rows.element_size())
    if mask is not None and mask.shape[2] > 1:
        mask = F.pad(mask, (0, 0, 0, missing))
    return F.pad(q_rows, (0, 0, 0, missing)), mask


def _on_cache_lines(x: Tensor) -> bool:
    """Return True if each row of numbers begins on a cache line. The order in which MKL adds a row may depend on it."""
    line = CACHE_LINE // x.element_size()
    return x.stride(3) == 1 and x.data_ptr() % CACHE_LINE == 0 and all(n % line == 0 for n in x.stride()[:3])


def _to_cache_lines(x: Tensor) -> Tensor:
    """Copy `x` with zeros at the end of each row, which change neither scores nor sums."""
    return F.pad(x, (0, -x.shape[3] % (CACHE_LINE // x.element_size()))).contiguous()
