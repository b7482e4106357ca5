"""Random calls of the attention ops: within a derived bound of float64, by every path, with poison in unused memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from fuzz import settings, small_shapes
from hypothesis import given
from hypothesis import strategies as st
from op_bounds import assert_within_bound
from op_calls import Call, draw_call, together

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@st.composite
def calls(draw: st.DrawFn, **sizes: tuple[int, ...]) -> Call:
    return draw_call(lambda options: draw(st.sampled_from(options)), **sizes)


def check(call: Call, device: str) -> None:
    inputs = call.inputs(device)
    lowered = nullcontext()
    if call.thresholds is not None:
        lowered = small_shapes(call.thresholds[0], call.split_bytes, call.thresholds[2])
    with pytest.MonkeyPatch.context() as patch, lowered:
        patch.setattr(torch, "get_num_threads", lambda: call.threads)
        out, lse = call.run(inputs)
    assert_within_bound(out, lse, together(inputs), parts=len(call.segments) * 2 * call.threads + 1)


@pytest.mark.parametrize("device", DEVICES)
def test_random_calls(device: str) -> None:
    @settings(300)
    @given(calls().filter(lambda call: not call.unmended()))
    def test(call: Call) -> None:
        check(call, device)

    test()
