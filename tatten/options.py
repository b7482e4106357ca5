"""Options of `torch.compile(..., backend="tatten", options={...})`: tatten's own, and others for the inner backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from tatten.passes.eligible import DEFAULT_MAX_Q_LEN

COMBINED = {"combo_kernels": True, "combo_kernels_pointwise_only": True}


@dataclass(frozen=True)
class Options:
    """Options of tatten itself.

    Attributes:
        inner: the backend that compiles the rewritten graph: "inductor", or any that Dynamo knows.
        max_q_len: an SDPA call with more queries per sequence counts as a prefill and is left unchanged.
        batch_invariant: attention of a sequence has the same bits whatever else is in the batch.
        decode: make decode steps on a GPU faster: by options of Inductor (`decode_options`), by one launch for all
            counters, and by `tatten::skinny_linear` and `tatten::fused_linear` for linear layers of few rows.
    """

    inner: str = "inductor"
    max_q_len: int = DEFAULT_MAX_Q_LEN
    batch_invariant: bool = False
    decode: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.inner, str):
            raise TypeError(f"option `inner` must be a str, the name of a backend, got {self.inner!r}")
        if not isinstance(self.max_q_len, int) or isinstance(self.max_q_len, bool):
            raise TypeError(f"option `max_q_len` must be an int, got {self.max_q_len!r}")
        if not isinstance(self.batch_invariant, bool):
            raise TypeError(f"option `batch_invariant` must be a bool, got {self.batch_invariant!r}")
        if not isinstance(self.decode, bool):
            raise TypeError(f"option `decode` must be a bool, got {self.decode!r}")
        if self.max_q_len < 1:
            raise ValueError(f"option `max_q_len` must be at least 1, got {self.max_q_len}")
        if self.decode and self.batch_invariant:
            raise ValueError(
                "option `decode` must be False with `batch_invariant`, got True: tuning would choose the order of sums"
            )
        if self.decode and self.inner != "inductor":
            raise ValueError(f"option `decode` needs `inner` to be 'inductor', got {self.inner!r}")


def decode_options(device: torch.device, *, tunes: bool, combines: bool) -> dict[str, Any]:
    """Return the options of Inductor for decode steps on a device; none for a CPU.

    From compute capability 9.0 on, `triton.enable_pdl` lets a kernel begin before the one before ends.

    Args:
        device: the device of the graph.
        tunes: whether `coordinate_descent_tuning` tunes kernels at their first launch. This also turns cuBLAS calls for
            one row into kernels of Inductor. It made other kernels no faster (`benchmarks/decode_loop.py`).
        combines: whether one launch computes several pointwise kernels, such as a query's rotary embedding and the
            writes of key and value to the cache; from compute capability 9.0 on, where it was measured.
    """
    if device.type != "cuda":
        return {}
    from tatten.ops.cuda.gpu import has_early_launches
    from tatten.ops.inductor.options import has_options

    options = {"coordinate_descent_tuning": True} if tunes else {}
    if has_early_launches(device):
        options |= {"triton.enable_pdl": True}
        options |= COMBINED if combines and has_options(COMBINED) else {}
    return options


def split_options(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Split `options` into tatten's own and those for the inner backend."""
    if not isinstance(options, Mapping | None):
        raise TypeError(f"`options` must be a dict, got {type(options).__name__}")
    names = {field.name for field in fields(Options)}
    inner_options = dict(options or {})
    return Options(**{name: inner_options.pop(name) for name in names & inner_options.keys()}), inner_options


def valid_names() -> str:
    """Return the names of tatten's own options, for error messages."""
    return ", ".join(field.name for field in fields(Options))
