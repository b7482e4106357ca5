"""Random calls of the attention ops: within a derived bound of float64, by every path, with poison in unused memory."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
from devices import DEVICES
from fuzz import settings, small_shapes
from hypothesis import given
from hypothesis import strategies as st
from op_bounds import assert_within_bound
from op_calls import Call, draw_call, row_groups, together
from poison import fresh_memory_is_poison
from slow import slow_but
from torch import Tensor

from tatten.ops.kernel_signatures import bifurcated_call, decode_call
from tatten.ops.masks import block_list, mask_of_rows
from tatten.ops.reach import within_window


@st.composite
def calls(draw: st.DrawFn, tiny: bool = False) -> Call:
    return draw_call(lambda options: draw(st.sampled_from(options)), tiny)


def check(call: Call, device: str) -> None:
    inputs = call.inputs(device)
    lowered = nullcontext()
    if call.thresholds is not None:
        lowered = small_shapes(call.thresholds[0], call.split_bytes, call.thresholds[2])
    with pytest.MonkeyPatch.context() as patch, lowered:
        patch.setattr(torch, "get_num_threads", lambda: call.threads)
        out, lse = call.run(inputs)
    assert_within_bound(out, lse, together(inputs), call.most_parts)


@pytest.mark.parametrize("n", slow_but([30], [30, 300]))
@pytest.mark.parametrize("device", DEVICES)
def test_random_calls(device: str, n: int) -> None:
    @settings(n if device == "cpu" else n // 7)  # of which most make Triton compile
    @given(calls())
    def test(call: Call) -> None:
        check(call, device)

    test()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")
@settings(12)
@given(calls(tiny=True), st.integers(1, 9))
def test_triton_interpreted(call: Call, programs: int) -> None:
    from tatten.ops.cuda.decode import plan_attention
    from tatten.ops.cuda.segments import plan_segments

    inputs = call.inputs()
    query = inputs["query"]
    with fresh_memory_is_poison():
        if call.is_decode:
            described = decode_call(**inputs)
            out, lse = plan_attention(described, programs=programs)(described)
        else:
            keys, values, masks, rows = (inputs[name] for name in ("keys", "values", "attn_masks", "rows"))
            groups = [row_groups(query, *x) for x in zip(keys, rows, strict=True)]
            variant = {"window": call.window, "softcap": inputs["softcap"], "sinks": inputs.get("sinks")}
            described = within_window(bifurcated_call(query, keys, values, masks, None, call.scale, groups, **variant))
            segments = zip(described.segments, rows, strict=True)
            segments = [x._replace(block_mask=_lists(x.key, x.attn_mask, own)) for x, own in segments]
            described = described._replace(segments=tuple(segments))
            out, lse = plan_segments(described)(described)
    assert_within_bound(out, lse, together(inputs), parts=programs + len(call.segments))


def _lists(key: Tensor, mask: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """The block list of a mask beside rows, which the op finds before it plans; kernels find the others themselves."""
    if mask is None or rows is None or key.shape[2] == 0:
        return None
    mask = mask[(None,) * (4 - mask.dim())].expand(-1, -1, -1, key.shape[2])
    per_sequence = mask.shape[0] == rows.shape[0] > 1
    return block_list(mask_of_rows(mask, key.shape[0], rows) if per_sequence else mask, key.shape[0])
