"""Random calls of the attention ops: within a derived bound of float64, by every path, with poison in unused memory."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
from attention_cases import with_variant
from devices import DEVICES
from fuzz import settings, small_shapes
from hypothesis import given
from hypothesis import strategies as st
from op_bounds import assert_within_bound
from op_calls import Call, draw_call, row_groups, together
from poison import fresh_memory_is_poison
from slow import slow_but
from torch import Tensor

from tatten.ops.masks import block_list, mask_of_rows
from tatten.ops.reach import segments_in_window
from tatten.ops.variant import AttentionVariant


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
    query, scale = inputs["query"], call.head_dim**-0.5 if call.scale is None else call.scale
    with fresh_memory_is_poison():
        if call.is_decode:
            arguments = with_variant(inputs)
            attend = plan_attention(**{**arguments, "scale": scale}, programs=programs)
            out, lse = attend(**{name: x for name, x in arguments.items() if name != "scale"})
        else:
            keys, values, masks, rows = (inputs[name] for name in ("keys", "values", "attn_masks", "rows"))
            groups = [row_groups(query, *x) for x in zip(keys, rows, strict=True)]
            if call.window is not None:
                segments = [*zip(keys, values, masks, [None] * len(keys), strict=True)]
                keys, values, masks, _ = zip(*segments_in_window(call.window, call.q_len, segments), strict=True)
            lists = [_lists(*x) for x in zip(keys, masks, rows, strict=True)]
            variant = AttentionVariant(softcap=inputs["softcap"], sinks=inputs.get("sinks"))
            attend = plan_segments(query, keys, values, masks, lists, scale, groups, variant)
            out, lse = attend(query, keys, values, masks, lists, groups, variant)
    assert_within_bound(out, lse, together(inputs), parts=programs + len(call.segments))


def _lists(key: Tensor, mask: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """The block list of a mask beside rows, which the op finds before it plans; kernels find the others themselves."""
    if mask is None or rows is None or key.shape[2] == 0:
        return None
    mask = mask[(None,) * (4 - mask.dim())].expand(-1, -1, -1, key.shape[2])
    per_sequence = mask.shape[0] == rows.shape[0] > 1
    return block_list(mask_of_rows(mask, key.shape[0], rows) if per_sequence else mask, key.shape[0])
