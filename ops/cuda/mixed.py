"""`tatten::paged_attention` on CUDA: check the arguments and make a plan, once for tensors of one layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tatten.ops.cuda.gpu import has_float8
from tatten.ops.cuda.launcher import by_layout, on_device_of
from tatten.ops.mixed_batch import MIXED, MixedCall, check_mixed
from tatten.ops.states import State
from tatten.ops.validation import check_cuda_head_dims, check_devices, check_no_grad


def paged_attention(call: MixedCall) -> State:
    check_no_grad(MIXED, **call.tensors)
    return on_device_of(call.query, _plan(*call), call)


@by_layout
def _plan(*fields: Any) -> Callable[[MixedCall], State]:
    call = MixedCall(*fields)
    check_devices(**call.tensors)
    check_mixed(call)
    each = call.one_query_each()
    check_cuda_head_dims(each.query, each.segments[0].value)
    if call.query.dtype == torch.float64:
        if call.batch_invariant:
            raise NotImplementedError("`query` must not be float64 with `batch_invariant` on CUDA: no kernel takes it")
        from tatten.ops.reference import mixed_reference

        return mixed_reference
    if call.key.dtype == torch.float8_e4m3fn and not has_float8(call.query.device):
        raise NotImplementedError("`key` must not be float8_e4m3fn on this GPU: it takes compute capability 8.9")

    from tatten.ops.cuda.ragged import plan_ragged

    return plan_ragged(call)
