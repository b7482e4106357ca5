"""Calls of `flex_attention`: which become ops of tatten, with what mask, and which are left for what reason."""

from __future__ import annotations

import math

import pytest
import torch
import torch.utils.checkpoint
from graphs import capture, listing
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import tatten
from tatten.passes import Rewritten, rewrite
from tatten.passes.reasons import Reason

pytestmark = pytest.mark.drawn(1)

B, H, HK, Q, S, D = 2, 4, 2, 3, 300, 16
OFFSET = torch.tensor(270)
PADDING = torch.ones(B, S, dtype=torch.bool)
PADDING[0, :7] = False
PADDING[1] = False  # a sequence without keys
LENGTHS = torch.tensor([40, 300], dtype=torch.int32)
SLOTS = torch.randint(2, (B, 1, Q, S), generator=torch.Generator().manual_seed(0))


def tensors(q_len: int = Q, kv_len: int = S, kv_heads: int = HK) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(B, H, q_len, D), *(torch.randn(B, kv_heads, kv_len, D) for _ in "kv")


def blocks(mask_mod, batch: int | None = None, kv_len: int = S, q_len: int = Q, **kwargs) -> BlockMask:
    return create_block_mask(mask_mod, batch, None, q_len, kv_len, "cpu", **kwargs)


def causal(b, h, i, j):
    return j <= i + OFFSET


def causal_window(b, h, i, j):
    return (j <= i + OFFSET) & (j > i + OFFSET - 200) & PADDING[b, j]


def as_transformers(b, h, i, j):
    """The form of `and_masks`."""
    result = i.new_ones((), dtype=torch.bool)
    for mask in (causal, lambda b, h, i, j: PADDING[b, j]):
        result = result & mask(b, h, i, j).to(result.device)
    return result


MASKS = {
    "causal": blocks(causal),
    "window and padding": blocks(causal_window, B),
    "as transformers": blocks(as_transformers, B),
    "lengths": blocks(lambda b, h, i, j: j < LENGTHS[b], B),
    "some heads": create_block_mask(lambda b, h, i, j: j % H == h, None, H, Q, S, "cpu"),
    "one index at a time": blocks(lambda b, h, i, j: SLOTS[b][0][i][j] > 0, B),
    "full blocks": blocks(lambda b, h, i, j: torch.where(j >= 128, True, i == j), BLOCK_SIZE=(1, 128)),
    "odd blocks": blocks(lambda b, h, i, j: (j - i) // 7 != 3, BLOCK_SIZE=(2, 48)),
    "none": None,
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    """Eager `flex_attention` asks the mask function about all keys, and so agrees where blocks agree with that."""

    def fn(q, k, v):
        return flex_attention(q, k, v, block_mask=MASKS[name], enable_gqa=True, scale=0.3)

    want = fn(*tensors())
    gm = capture(fn, *tensors())
    inputs = [x.meta["example_value"] for x in gm.graph.find_nodes(op="placeholder")]
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten)
    assert finding.location.file == __file__
    assert finding.note == {"none": "flex_attention"}.get(name, "flex_attention (mask function, blocks)")
    assert "flex_attention" not in listing(gm)
    assert len(inputs) == len(gm.graph.find_nodes(op="placeholder"))
    torch.testing.assert_close(run(fn, *tensors()), want)


def run(fn, *args, **kwargs) -> torch.Tensor:
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(fn, backend="tatten", options={"inner": "eager"}, **kwargs)(*args)


SOFTCAPS = [
    lambda s, b, h, i, j: 5 * torch.tanh(s / 5),
    lambda s, b, h, i, j: torch.tanh(torch.div(s, 5.0)) * 5.0,
    lambda s, b, h, i, j: (s * 0.2).tanh() * 5,
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("score_mod", SOFTCAPS)
def test_soft_cap(score_mod) -> None:
    def fn(q, k, v):
        return flex_attention(q, k, v, score_mod, MASKS["causal"], enable_gqa=True)

    gm = capture(fn, *tensors())
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten)
    assert finding.note == "flex_attention (soft cap of 5, mask function, blocks)"
    assert "softcap=5.0" in listing(gm)
    torch.testing.assert_close(run(fn, *tensors()), fn(*tensors()))


def test_lse() -> None:
    def fn(q, k, v):
        return flex_attention(q, k, v, block_mask=MASKS["window and padding"], enable_gqa=True, return_lse=True)

    (finding,) = rewrite(gm := capture(fn, *tensors())).findings
    assert isinstance(finding, Rewritten)
    assert "flex_attention" not in listing(gm)
    for got, want in zip(run(fn, *tensors()), fn(*tensors()), strict=True):
        torch.testing.assert_close(got, want)
    assert fn(*tensors())[1][1].eq(-math.inf).all()


@pytest.mark.drawn(2, "dynamic shapes")
def test_block_mask_made_in_the_graph_and_dynamic_lengths() -> None:
    def fn(q, k, v):
        mask = create_block_mask(lambda b, h, i, j: j < LENGTHS[b], B, None, Q, k.shape[2], "cpu")
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    step = torch.compile(fn, backend="tatten", options={"inner": "eager"}, dynamic=True)
    with torch.no_grad(), tatten.recording() as report:
        for kv_len in (301, 310, 390):
            torch.testing.assert_close(step(*tensors(kv_len=kv_len)), fn(*tensors(kv_len=kv_len)))
    assert len(report.rewritten) == len(report.graphs), str(report)


def disagreeing() -> BlockMask:
    """Blocks that leave out keys that the mask function would leave, and full ones with keys that it wouldn't.

    What stands in the lists beyond the counts doesn't count.
    """
    counts, full_counts = torch.tensor([[[1]], [[2]]]), torch.tensor([[[1]], [[0]]])
    indices, full = torch.tensor([[[[2, 0, 1]]], [[[0, 2, 1]]]]), torch.tensor([[[[1, 0, 0]]], [[[0, 0, 0]]]])
    lists = [x.int() for x in (counts, indices, full_counts, full)]
    few = torch.arange(S) % 3 > 0
    return BlockMask.from_kv_blocks(*lists, mask_mod=lambda b, h, i, j: few[j], seq_lengths=(Q, S))


def test_blocks_count_where_they_disagree_with_the_function() -> None:
    """As in compiled `flex_attention`. `test_inductor` has the proof that it is so there."""
    mask = disagreeing()
    left = torch.zeros(B, 1, Q, S, dtype=torch.bool)
    left[0, :, :, 256:] = torch.arange(256, S) % 3 > 0
    left[0, :, :, 128:256] = True
    left[1, :, :, :128] = torch.arange(128) % 3 > 0
    left[1, :, :, 256:] = torch.arange(256, S) % 3 > 0

    got = run(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True), *tensors())
    want = torch.nn.functional.scaled_dot_product_attention(*tensors(), left, enable_gqa=True)
    torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_inductor() -> None:
    """Compiled by Inductor alone, `flex_attention` heeds blocks; in eager mode it does not."""
    mask = disagreeing()

    def fn(q, k, v):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    torch._dynamo.reset()
    with torch.no_grad():
        want = torch.compile(fn)(*tensors())
    torch.testing.assert_close(run(fn, *tensors()), want)
    assert not torch.allclose(fn(*tensors()), want, atol=0.1)


def test_layers_share_a_mask_unless_it_is_written() -> None:
    position = torch.tensor(40)

    def layer(q, k, v):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    def fn(q, k, v, position):
        first = layer(q, k, v) + layer(q, v, k)
        position.add_(200)
        return first + layer(q, k, v)

    mask = blocks(lambda b, h, i, j: j <= i + position, kv_len=S)
    mask = BlockMask.from_kv_blocks(
        *(
            x.new_full(x.shape, 3) if x.dim() == 3 else torch.arange(3).int().expand(1, 1, 1, 3)
            for x in mask.as_tuple()[2:4]
        ),
        mask_mod=mask.mask_mod,
        seq_lengths=(Q, S),
    )
    gm = capture(fn, *tensors(), position)
    assert sum(isinstance(x, Rewritten) for x in rewrite(gm).findings) == 3
    assert listing(gm).count("= le(") == 2  # positions of keys and of queries, which the write changes
    assert listing(gm).count("= scatter(") == 1  # the listed blocks, which it doesn't
    position.fill_(40)
    want = fn(*tensors(), position)
    position.fill_(40)
    torch.testing.assert_close(run(fn, *tensors(), position), want)


def alibi(s, b, h, i, j):
    return s + j * 0.5**h


def other_cap(s, b, h, i, j):
    return 5 * torch.tanh(s / 6)


def cap_of_reciprocal(s, b, h, i, j):
    return 5 * torch.tanh(5 / (s + 0.0))


def nested(q, k, v):
    return torch.utils.checkpoint.checkpoint(flex_attention, q, k, v, use_reentrant=False)


def by_sine(b, h, i, j):
    return torch.sin(j * 1.0) > 0


def uneven(b, h, i, j):
    return PADDING.any(0)[j]


def too_few_rows(q, k, v):
    mask = MANY_ROWS[:, :, :1]
    mask.mask_mod, mask.seq_lengths, mask.BLOCK_SIZE = causal, (Q, S), (Q - 1, 128)
    return flex_attention(q, k, v, block_mask=mask)


def with_lists_of(change):
    def fn(q, k, v):
        mask = blocks(causal)
        lists = [change(getattr(mask, name)) for name in ("kv_num_blocks", "kv_indices")]
        mask.kv_num_blocks, mask.kv_indices = lists
        return flex_attention(q, k, v, block_mask=mask)

    return fn


def cap_that_is_read(q, k, v):
    return flex_attention(q, k, v, lambda s, b, h, i, j: CAP * torch.tanh(s / CAP))


CAP = torch.tensor(5.0)
MANY_ROWS = create_block_mask(lambda b, h, i, j: j <= i, None, None, 384, S, "cpu")
LEFT = {
    "lists of fewer dims": (with_lists_of(lambda x: x[:, :, 0]), "int32[1, 1], where integers of 3 dims are known"),
    "lists of floats": (with_lists_of(lambda x: x.float()), "is float32[1, 1, 1], where integers"),
    "rows of blocks for fewer queries": (too_few_rows, "is [1, 1, 1], its query"),
    "cap that is read": (cap_that_is_read, "its score function reads tensors"),
    "alibi": (lambda *x: flex_attention(*x, alibi), "its score function is neither"),
    "other cap": (lambda *x: flex_attention(*x, other_cap), "its score function is neither"),
    "reciprocal": (lambda *x: flex_attention(*x, cap_of_reciprocal), "its score function is neither"),
    "nested": (nested, "a call to flex_attention"),
    "sine": (lambda *x: flex_attention(*x, block_mask=blocks(by_sine)), "its mask function calls `sin`"),
    "reduction": (lambda *x: flex_attention(*x, block_mask=blocks(uneven)), "its mask function calls `any`"),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    fn, detail = LEFT[name]
    gm = capture(fn, *tensors(kv_heads=H))
    before = listing(gm)
    (finding,) = rewrite(gm).findings
    assert finding.decline.reason is Reason.FLEX_ATTENTION
    assert detail in finding.decline.detail
    assert listing(gm) == before


def test_other_reasons_leave_the_graph_as_it_was() -> None:
    mask = blocks(causal, q_len=17)
    gm = capture(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True), *tensors(q_len=17))
    before = listing(gm)
    (finding,) = rewrite(gm).findings
    assert finding.decline.reason is Reason.Q_LEN
    assert listing(gm) == before


def test_lists_of_fewer_dims_run_as_they_did() -> None:
    fn, _ = LEFT["lists of fewer dims"]
    torch.testing.assert_close(run(fn, *tensors(kv_heads=H)), fn(*tensors(kv_heads=H)))
