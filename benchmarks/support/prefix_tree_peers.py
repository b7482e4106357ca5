"""Attention to a tree of prefixes as others do it: a kernel and a state for each level and a merge, or a cascade."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from support import peers
from support.merge_levels import State, merge_levels, merge_levels_reference
from support.prefix_tree_cases import Tree

# The state of all queries `[batch, q_heads, 1, d]` over keys and values of a level, `[nodes, kv_heads, length, d]`:
# `[nodes, sequences of a node, kv_heads, group, d]`, and the lse without d.
Level = Callable[[Tensor, Tensor, Tensor], State]


def fa3_level(tree: Tree, level: int, device: str) -> Level | None:
    """Return FlashAttention-3 with a node's sequences as tokens of one query; None if unavailable."""
    kernel = peers.fa3()
    if kernel is None:
        return None
    nodes, length, seqs = tree.nodes[level], tree.lengths[level], tree.batch // tree.nodes[level]
    starts = torch.arange(nodes + 1, dtype=torch.int32, device=device) * seqs
    used = torch.full((nodes,), length, dtype=torch.int32, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> State:
        keys, values = k.transpose(1, 2), v.transpose(1, 2)
        out, lse = kernel(q.squeeze(2), keys, values, starts, None, seqs, length, seqused_k=used)
        out, lse = (x.unflatten(1, (tree.kv_heads, -1)).unflatten(0, (nodes, seqs)) for x in (out, lse.t()))
        return out, lse

    return attend


def cudnn_level(tree: Tree, level: int, device: str) -> Level | None:
    if device != "cuda":
        return None
    nodes, seqs = tree.nodes[level], tree.batch // tree.nodes[level]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> State:
        folded = q.view(nodes, seqs, tree.q_heads, -1).transpose(1, 2)
        out, lse = peers.cudnn_state(folded, k, v)
        lse = lse.view(folded.shape[:3])
        out, lse = (x.transpose(1, 2).unflatten(2, (tree.kv_heads, -1)) for x in (out, lse))
        return out, lse

    return attend


def flash_level(tree: Tree, level: int, device: str) -> Level:
    """Return PyTorch's flash attention with all query heads of a kv head, and all sequences of a node, as rows."""
    nodes, seqs = tree.nodes[level], tree.batch // tree.nodes[level]
    kernel = peers.flash_state if device == "cuda" else torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attend(q: Tensor, k: Tensor, v: Tensor) -> State:
        rows = q.view(nodes, seqs, tree.kv_heads, -1, tree.head_dim).transpose(1, 2).flatten(2, 3)
        out, lse = (x.unflatten(2, (seqs, -1)).transpose(1, 2) for x in kernel(rows, k, v))
        return out, lse

    return attend


LEVELS = {"fa3": fa3_level, "cudnn": cudnn_level, "flash": flash_level}


def compose(levels: Sequence[Level]) -> Callable[[Tensor, list[Tensor], list[Tensor]], Tensor]:
    """Return attention from a kernel for each level, and one kernel that merges all of them."""

    def attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        states = [attend(q, k, v) for attend, k, v in zip(levels, keys, values, strict=True)]
        return merge_levels(states) if q.is_cuda else merge_levels_reference(states)

    return attention


def pages_of(tree: Tree, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return `[pages, 2, PAGE, kv_heads, d]`: pages of the first level's nodes, then the next's, each node padded."""
    levels = []
    for length, *kv in zip(tree.lengths, keys, values, strict=True):
        pad = -length % peers.PAGE
        padded = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in kv)
        levels.append(torch.stack([x.transpose(1, 2).reshape(-1, peers.PAGE, *x.shape[1::2]) for x in padded], dim=1))
    return torch.cat(levels)


def cascade(tree: Tree, device: str) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return FlashInfer's cascade over q and `pages_of` the tree, planned beforehand; None if it is not installed."""
    if not peers.has_flashinfer():
        return None
    from flashinfer import MultiLevelCascadeAttentionWrapper

    def ints(x: Sequence[int] | range) -> Tensor:
        return torch.tensor(x, dtype=torch.int32, device=device)

    starts, page_starts, pages, used, first = [], [], [], [], 0
    for nodes, length in zip(tree.nodes, tree.lengths, strict=True):
        each = -(-length // peers.PAGE)
        starts.append(ints(range(0, tree.batch + 1, tree.batch // nodes)))
        page_starts.append(ints(range(0, nodes * each + 1, each)))
        pages.append(first + ints(range(nodes * each)))
        used.append(ints([length - (each - 1) * peers.PAGE] * nodes))
        first += nodes * each
    wrapper = MultiLevelCascadeAttentionWrapper(tree.levels, peers.workspace(), "NHD")
    heads = tree.q_heads, tree.kv_heads, tree.head_dim
    wrapper.plan(starts, page_starts, pages, used, *heads, peers.PAGE, q_data_type=torch.bfloat16)
    return lambda q, kv: wrapper.run(q.squeeze(2), kv).unsqueeze(2)
