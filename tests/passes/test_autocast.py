"""SDPA under autocast casts its mask, and so does what replaces it: equal to eager wherever regions begin and end."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from graphs import capture
from slow import slow_but
from torch._dynamo.exc import Unsupported

from tatten.passes import Declined, Rewritten, rewrite
from tatten.passes.autocast import SETTERS
from tatten.passes.reasons import Reason

S = 300
BF16 = torch.bfloat16


def sdpa(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def region(dtype=BF16, enabled=True, device="cpu"):
    return torch.autocast(device, dtype=dtype, enabled=enabled)


def inside(*args):
    with region():
        return sdpa(*args)


def decorated(*args):
    return torch.autocast("cpu", dtype=BF16)(sdpa)(*args)


def left(*args):
    with region():
        args[0] @ args[0].mT
    return sdpa(*args)


def disabled_inside(*args):
    with region(), region(enabled=False):
        return sdpa(*args)


def enabled_again(*args):
    with region(enabled=False), region(), region(dtype=None):
        return sdpa(*args)


def back_in_the_outer(*args):
    with region():
        with region(enabled=False):
            args[0] @ args[0].mT
        return sdpa(*args)


def in_and_out(*args):
    first = sdpa(*args)
    with region():
        second = sdpa(*args)
    return first, second, sdpa(*args)


def written(q, k, v, mask):
    mask = mask.clone()
    with region():
        first = sdpa(q, k, v, mask)
        mask.mul_(0.5)
        return first, sdpa(q, k, v, mask)


FUNCTIONS = [sdpa, inside, decorated, left, disabled_inside, enabled_again, back_in_the_outer, in_and_out, written]
AROUND = {
    "plain": contextlib.nullcontext,
    "around": region,
    "disabled": lambda: region(enabled=False),
    "nested": lambda: nested(region(), region(enabled=False)),
}


@contextlib.contextmanager
def nested(outer, inner):
    with outer, inner:
        yield


def inputs(dtype=BF16):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 8).to(dtype) for heads, n in ((4, 1), (2, S), (2, S)))
    mask = -(torch.arange(S).flip(0) * 0.5 + 1000.25)[None, None, None].repeat(2, 1, 1, 1)  # bfloat16 rounds it
    mask[0, ..., :9] = torch.finfo(torch.float32).min  # which becomes -inf
    return q, k, v, mask


@pytest.mark.drawn(2)
@pytest.mark.parametrize("around", slow_but(["around", "nested"], AROUND))
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_as_eager(fn, around: str) -> None:
    torch._dynamo.reset()
    args = inputs()
    with torch.no_grad(), AROUND[around]():
        want = fn(*args)
        assert all(isinstance(x, Rewritten) for x in rewrite(capture(fn, *args)).findings)
        have = torch.compile(fn, backend="tatten", options={"inner": "eager"}, fullgraph=True)(*args)
    torch.testing.assert_close(have, want)


def test_the_mask_is_cast_once_for_all_layers() -> None:
    def fn(q, k, v, mask):
        with region():
            for _ in range(3):
                q = sdpa(q, k, v, mask)
        return q

    gm = capture(fn, *inputs())
    rewrite(gm)
    assert len(gm.graph.find_nodes(op="call_method", target="to")) == 1
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.tatten.block_mask.default)) == 1


@pytest.mark.parametrize("bool_mask", [False, True])
def test_state_that_is_set_by_a_call(bool_mask: bool) -> None:
    """The state at a node is unknown then; only a bool mask, which is never cast, is not affected."""

    def fn(q, k, v, mask):
        torch.set_autocast_enabled("cpu", True)
        out = sdpa(q, k, v, mask)
        torch.set_autocast_enabled("cpu", False)
        return out

    *args, mask = inputs()
    try:
        graph = capture(fn, *args, mask > -1100 if bool_mask else mask)
    except Unsupported:
        pytest.skip("Dynamo breaks the graph at the call (torch 2.11)")
    (finding,) = rewrite(graph).findings
    if bool_mask:
        assert isinstance(finding, Rewritten)
    else:
        assert isinstance(finding, Declined)
        assert finding.decline.reason is Reason.MASK_DTYPE


def test_mixed_dtypes_are_declined() -> None:
    (finding,) = rewrite(capture(inside, *inputs(torch.float32))).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.DTYPE


def test_what_sets_autocast() -> None:
    assert torch.set_autocast_enabled in SETTERS
    assert torch.set_autocast_dtype in SETTERS
