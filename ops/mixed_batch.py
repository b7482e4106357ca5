"""Mixed batches: sequences with any number of new tokens each, whose queries are causal and whose keys are in pages.

A query that sees the first `n` keys of its sequence is a sequence of one query and `n` keys. The reference and the
decompositions compute that: `as_decode`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.pages import heads_first
from tatten.ops.pages_validation import check_block_table
from tatten.ops.states import NEG_INF, State, accumulator_dtype
from tatten.ops.validation import check_decode_attention, check_devices, check_kv_lens, check_no_grad

MIXED = "paged_attention"


class MixedCall(NamedTuple):
    """A call of `tatten::paged_attention`; the fields are the op's arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    kv_lens: Tensor
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    batch_invariant: bool = False
    shared_pages: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.block_table.shape[0]

    @property
    def kv_len(self) -> int:
        """The largest number of keys of a sequence."""
        return self.block_table.shape[1] * self.key.shape[1]

    @property
    def score_scale(self) -> float:
        return self.query.shape[2] ** -0.5 if self.scale is None else self.scale

    def sequences(
        self, query: Tensor, block_table: Tensor, kv_lens: Tensor, shared_pages: Tensor | None = None
    ) -> AttentionCall:
        """Return a call of `decode_attention` over the same pools, with other queries, tables and lengths."""
        key, value = heads_first(self.key), heads_first(self.value)
        key_scale, value_scale = (x if x is None else heads_first(x) for x in (self.key_scale, self.value_scale))
        stored = KeyValue(
            key,
            value,
            kv_lens=kv_lens,
            key_scale=key_scale,
            value_scale=value_scale,
            block_table=block_table,
            shared_pages=shared_pages,
        )
        softmax = self.scale, self.window, self.softcap, self.sinks
        return AttentionCall(MIXED, query, (stored,), *softmax, batch_invariant=self.batch_invariant)

    def one_query_each(self) -> AttentionCall:
        """Return the call with the first token as the query of every sequence: for checks."""
        first = self.query.narrow(0, 0, 1).unsqueeze(2)
        return self.sequences(first.expand(self.batch, -1, -1, -1), self.block_table, self.kv_lens, self.shared_pages)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the call by the names of the op's arguments."""
        return {name: x for name, x in self._asdict().items() if isinstance(x, Tensor)}


def mixed_kernel(attend: Callable[[MixedCall], State]) -> Callable[..., State]:
    """Return a function with the schema of `tatten::paged_attention` that calls `attend`."""

    def kernel(*args: Any, **kwargs: Any) -> State:
        return attend(MixedCall(*args, **kwargs))

    return kernel


def as_decode(call: MixedCall) -> tuple[AttentionCall, Tensor]:
    """Return a call in which each token is a sequence, and a bool mask of the tokens that are padding.

    The starts of sequences are read as a GPU reads them: the first one as 0, each of the others as at least the one
    before it, and at most the number of tokens. Padding has no keys.
    """
    n_tokens, device = call.query.shape[0], call.query.device
    starts = call.cu_seqlens_q.clamp(0, n_tokens).to(torch.int64)
    starts = torch.cat((torch.zeros_like(starts[:1]), starts[1:])).cummax(0).values
    tokens = torch.arange(n_tokens, device=device)
    ended = (starts[1:, None] <= tokens).sum(0)  # the number of sequences that end before a token
    padding, sequence = ended == call.batch, ended.clamp(max=call.batch - 1)
    lens = call.kv_lens.to(torch.int64).clamp(0, call.kv_len)[sequence]
    seen = lens - (starts[sequence + 1] - tokens) + 1
    seen = torch.where(padding, 0, seen.clamp(min=0))
    return call.sequences(call.query[:, :, None], call.block_table[sequence], seen), padding


def of_tokens(state: State, padding: Tensor) -> State:
    """Return the state of the tokens from that of `as_decode`'s call. Padding gets the empty state."""
    out, lse = (x.squeeze(2) for x in state)
    out = torch.where(padding[:, None, None], 0.0, out)
    return out.contiguous(), torch.where(padding[:, None], NEG_INF, lse).contiguous()


def check_mixed(call: MixedCall) -> None:
    """Raise TypeError, ValueError or NotImplementedError unless the op supports the call. Reads no data."""
    query, cu = call.query, call.cu_seqlens_q
    if query.dim() != 3:
        raise ValueError(f"`query` must be [tokens, q_heads, head_dim], got shape {tuple(query.shape)}")
    if 0 in query.shape:
        raise ValueError(f"`query` must have no dimension of size 0, got shape {tuple(query.shape)}")
    check_block_table(call.block_table)
    if cu.dtype != torch.int32:
        raise TypeError(f"`cu_seqlens_q` must be int32, got {cu.dtype}")
    if tuple(cu.shape) != (call.batch + 1,):
        like = f"one more than the {call.batch} sequences of `block_table`"
        raise ValueError(f"`cu_seqlens_q` must have shape ({call.batch + 1},), {like}, got {tuple(cu.shape)}")
    check_decode_attention(call.one_query_each())


def read_lengths(call: MixedCall) -> tuple[list[int], list[int]]:
    """Return the starts of the sequences' queries and their numbers of keys. Reads the tensors: CPU only.

    Raises:
        ValueError: the starts don't begin with 0, decrease or exceed the tokens, or a sequence has more keys than its
            pages hold.
    """
    starts: list[int] = call.cu_seqlens_q.tolist()
    if starts[0] != 0:
        raise ValueError(f"`cu_seqlens_q` must begin with 0, got {starts[0]}")
    for i, (start, stop) in enumerate(itertools.pairwise(starts)):
        if stop < start:
            raise ValueError(f"`cu_seqlens_q` must not decrease, got {start} before {stop} at {i}")
    if starts[-1] > call.query.shape[0]:
        raise ValueError(
            f"`cu_seqlens_q` must end with at most `query`'s {call.query.shape[0]} tokens, got {starts[-1]}"
        )
    lens = check_kv_lens(call.one_query_each())
    assert lens is not None
    return starts, lens


def fake_mixed(call: MixedCall) -> State:
    """Return a state like the op's, uninitialised: its fake implementation."""
    check_no_grad(MIXED, **call.tensors)
    check_devices(**call.tensors)
    n_tokens, q_heads, _ = call.query.shape
    out = call.query.new_empty((n_tokens, q_heads, call.value.shape[3]))
    return out, call.query.new_empty((n_tokens, q_heads), dtype=accumulator_dtype(call.query.dtype))
