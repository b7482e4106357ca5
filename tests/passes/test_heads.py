"""Every spelling of repeat_kv is undone, and nothing else is taken for one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import capture

from tatten.passes import Rewritten, rewrite
from tatten.passes.sdpa import find_sdpa
from tatten.passes.stored import peel_heads
from tatten.passes.symbolic import tensor_of

B, HQ, HKV, S, D, N = 2, 6, 2, 9, 8, 3


def hf(x):
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, N, s, d).reshape(b, h * N, s, d)


SPELLINGS = {
    "transformers": hf,
    "interleave_method": lambda x: x.repeat_interleave(N, dim=1),
    "interleave_function": lambda x: torch.repeat_interleave(x, N, dim=-3),
    "interleave_positional": lambda x: x.repeat_interleave(N, 1),
    "interleave_output_size": lambda x: torch.repeat_interleave(x, repeats=N, dim=1, output_size=HQ),
    "unsqueeze_expand_flatten": lambda x: x.unsqueeze(2).expand(-1, -1, N, -1, -1).flatten(1, 2),
    "ellipsis": lambda x: x[..., None, :, :].expand(B, HKV, N, x.size(2), D).reshape(B, HQ, x.size(2), D),
    "broadcast_to": lambda x: torch.broadcast_to(x.unsqueeze(-3), (B, HKV, N, x.size(2), D)).reshape(
        B, -1, x.size(2), D
    ),
    "expand_contiguous_view": lambda x: (
        x[:, :, None].expand(B, HKV, N, x.size(2), D).contiguous().view(B, HQ, x.size(2), D)
    ),
    "repeat_5d": lambda x: x[:, :, None].repeat(1, 1, N, 1, 1).view(B, HQ, x.size(2), D),
    "tile_5d": lambda x: torch.tile(x.unsqueeze(2), (1, 1, N, 1, 1)).flatten(1, 2),
    "interleave_5d": lambda x: x.unsqueeze(2).repeat_interleave(N, dim=2).flatten(1, 2),
    "stack": lambda x: torch.stack([x] * N, dim=2).flatten(1, 2),
    "view_expand": lambda x: x.view(B, HKV, 1, x.size(2), D).expand(-1, -1, N, -1, -1).reshape(B, HQ, x.size(2), D),
    "llama": lambda x: (  # Meta's: on [batch, length, heads, head_dim]
        x.transpose(1, 2)[:, :, :, None, :].expand(B, x.size(2), HKV, N, D).reshape(B, x.size(2), HQ, D).transpose(1, 2)
    ),
    "interleave_bshd": lambda x: x.transpose(1, 2).repeat_interleave(N, dim=2).transpose(1, 2),
    "permute": lambda x: x.permute(0, 2, 1, 3).repeat_interleave(N, dim=-2).permute(0, 2, 1, 3).contiguous(),
    "clone": lambda x: x.repeat_interleave(N, dim=1).clone(),
}

OTHERS = {
    "tiled": lambda x: x.repeat(1, N, 1, 1),  # head h is h % HKV
    "cat": lambda x: torch.cat([x] * N, dim=1),
    "stack_first": lambda x: torch.stack([x] * N, dim=1).flatten(1, 2),
    "stack_of_different": lambda x: torch.stack([x, x + 1, x], dim=2).flatten(1, 2),
    "indexed": lambda x: x[:, torch.arange(HQ) // N],
    "scaled": lambda x: (x * 2).repeat_interleave(N, dim=1) * 2,
    "slice_then_expand": lambda x: x[:, :, None, :, :][:, ::1].flip(2).expand(B, HKV, N, S, D).reshape(B, HQ, S, D) + 0,
    "wrong_merge": lambda x: x[:, :, None].expand(B, HKV, N, S, D).transpose(1, 2).reshape(B, HQ, S, D),
    "counts": lambda x: x.repeat_interleave(torch.tensor([4, 2]), dim=1, output_size=HQ),
    "counts_5d": lambda x: (
        x[:, :, None].repeat(1, 1, N, 1, 1).repeat_interleave(torch.tensor([2, 0]), 1, output_size=2).flatten(1, 2)
    ),
    "reversed": lambda x: x.flip(1).repeat_interleave(N, dim=1).flip(1),
}


def attention(repeat):
    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v))

    return fn


def inputs():
    torch.manual_seed(0)
    return torch.randn(B, HQ, 1, D), torch.randn(B, HKV, S, D), torch.randn(B, HKV, S, D)


def through_tatten(fn, *args):
    torch._dynamo.reset()
    return torch.compile(fn, backend="tatten", options={"inner": "eager"}, fullgraph=True)(*args)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SPELLINGS)
def test_peels(name: str, dynamic: bool) -> None:
    args = inputs()
    fn = attention(SPELLINGS[name])
    if dynamic:
        for x in args[1:]:
            torch._dynamo.mark_dynamic(x, 2)
    gm = capture(fn, *args)
    (call,) = find_sdpa(gm.graph)
    peeled = peel_heads(call.key)
    assert peeled.repeats == N
    assert tensor_of(peeled.base).permute(peeled.dims).shape[1] == HKV
    want = fn(*args)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten)
    gm.graph.lint()
    (op,) = gm.graph.find_nodes(op="call_function", target=torch.ops.tatten.decode_attention.default)
    assert op.args[1].op == "placeholder" or op.args[1].target == "permute"
    # What the graph computes is what the model computed, and nothing repeats heads any more.
    torch.testing.assert_close(through_tatten(fn, *args), want)
    names = {str(node.target) for node in gm.graph.nodes}
    assert not names & {"expand", "repeat", "repeat_interleave", "stack", "broadcast_to", "reshape"}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", OTHERS)
def test_does_not_peel(name: str) -> None:
    args = inputs()
    fn = attention(OTHERS[name])
    (call,) = find_sdpa(capture(fn, *args).graph)
    assert peel_heads(call.key).base is call.key
    torch.testing.assert_close(through_tatten(fn, *args), fn(*args))


STAYS = {
    "one key": lambda x: x.mean(dim=2, keepdim=True).expand(B, HKV, S, D),
    "one number": lambda x: x.mean(dim=3, keepdim=True).expand(B, HKV, S, D),
    "interleaved once": lambda x: x.unsqueeze(2).repeat_interleave(1, dim=2).squeeze(2),
}


@pytest.mark.parametrize("name", STAYS)
def test_peels_heads_and_nothing_else(name: str) -> None:
    args, fn = inputs(), attention(lambda x: STAYS[name](x).repeat_interleave(N, dim=1))
    (call,) = find_sdpa(capture(fn, *args).graph)
    peeled = peel_heads(call.key)
    assert peeled.repeats == N
    assert tensor_of(peeled.base).shape == (B, HKV, S, D)
    torch.testing.assert_close(through_tatten(fn, *args), fn(*args))


@pytest.mark.parametrize("heads", [1, 4])
def test_one_head_for_all(heads: int) -> None:
    """Stretching a single head is no repetition in memory, but peels the same."""
    q, k = torch.randn(B, heads * 2, 1, D), torch.randn(B, 1, S, D)
    for repeat in (lambda x: x.expand(-1, heads * 2, -1, -1), lambda x: x.repeat(1, heads * 2, 1, 1)):
        gm = capture(attention(repeat), q, k, k)
        (call,) = find_sdpa(gm.graph)
        assert peel_heads(call.key).repeats == heads * 2


def test_key_and_value_that_disagree_are_taken_as_they_are() -> None:
    def fn(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k.repeat_interleave(N, dim=1), v, attn_mask=mask)

    q, k, _ = inputs()
    args = q, k, torch.randn(B, HQ, S, D), torch.rand(B, 1, 1, S) > 0.4
    gm = capture(fn, *args)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten)
    (op,) = gm.graph.find_nodes(op="call_function", target=torch.ops.tatten.decode_attention.default)
    assert op.args[1].target == "repeat_interleave"
    torch.testing.assert_close(through_tatten(fn, *args), fn(*args))


def test_mqa_without_enable_gqa() -> None:
    """Falcon: one kv head that SDPA broadcasts."""
    q, k = torch.randn(B, 4, 1, D), torch.randn(B, 1, S, D)
    fn = attention(lambda x: x)
    gm = capture(fn, q, k, k)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten)
    torch.testing.assert_close(through_tatten(fn, q, k, k), fn(q, k, k))
