"""Plans of calls with `indices` on CUDA."""

from __future__ import annotations

from tatten.ops.call import Attend, AttentionCall


def plan_picked(call: AttentionCall) -> Attend:
    """Plan a function that computes a valid call with `indices`, in any dtype but float64."""
    raise NotImplementedError(f"`indices` must be None or the dtype float64 on CUDA, got {call.query.dtype}")
