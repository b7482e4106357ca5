"""Lengths for pages that are sharded over ranks along the sequence, as in decode context parallelism."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.validation import check_tensors


def local_lens(kv_lens: Tensor, interleave: int, rank: int, ranks: int) -> Tensor:
    """Count the keys of each sequence that a rank holds, if token `t` is on rank `t // interleave % ranks`.

    A rank attends to the keys in its own pool, by its own block table and these lengths, and `tatten.tree_merge` merges
    the states of all ranks. It is plain PyTorch on the device of `kv_lens`, so that it can be captured in a CUDA graph.

    Args:
        kv_lens: int32 or int64, any shape: the lengths over all ranks.
        interleave: the number of tokens that are dealt out at a time: the page size for entire pages, or 1 for single
            tokens, which a rank may store in pages of any size.
        rank: the rank, from 0 to `ranks - 1`.
        ranks: the number of ranks that share the sequences.

    Returns:
        The lengths on this rank, in the shape and dtype of `kv_lens`. Their sum over all ranks is `kv_lens`.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.

    Examples:
        >>> import torch, tatten
        >>> lens = torch.tensor([0, 3, 16, 41])  # pages of 16: 41 tokens have page 0 and 9 tokens of page 2 on rank 0
        >>> tatten.local_lens(lens, interleave=16, rank=0, ranks=2)
        tensor([ 0,  3, 16, 25])
        >>> tatten.local_lens(lens, interleave=16, rank=1, ranks=2)
        tensor([ 0,  0,  0, 16])
    """
    check_tensors(kv_lens=kv_lens)
    if kv_lens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`kv_lens` must be int32 or int64, got {kv_lens.dtype}")
    for name, n in (("interleave", interleave), ("rank", rank), ("ranks", ranks)):
        if not isinstance(n, int | torch.SymInt):
            raise TypeError(f"`{name}` must be an int, got {n!r}")
    for name, n in (("interleave", interleave), ("ranks", ranks)):
        if n < 1:
            raise ValueError(f"`{name}` must be at least 1, got {n}")
    if not 0 <= rank < ranks:
        raise ValueError(f"`rank` must lie between 0 and {ranks - 1}, as there are {ranks} ranks, got {rank}")
    period = interleave * ranks
    return kv_lens // period * interleave + (kv_lens % period - rank * interleave).clamp(0, interleave)
