"""Pages that are sharded over ranks by sequence, as decode context parallelism does it: lengths of a rank's part."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.validation import check_tensors


def local_lens(kv_lens: Tensor, page: int, rank: int, ranks: int) -> Tensor:
    """Count the keys of each sequence that a rank holds, if token `t` is on rank `t // page % ranks`.

    A rank attends to the keys in its own pool, by its own block table and these lengths, and `tatten.tree_merge` merges
    the states of all ranks. It is plain PyTorch on the device of `kv_lens`, so that a CUDA graph may have it.

    Args:
        kv_lens: int32 or int64, any shape: the lengths over all ranks.
        page: the number of tokens in a row on one rank: the page size if whole pages are dealt out, or 1 if single
            tokens are, whatever the size of the pages that they are stored in.
        rank: the rank, from 0 to `ranks - 1`.
        ranks: the number of ranks that share the sequences.

    Returns:
        The lengths on this rank, in the shape and dtype of `kv_lens`. Their sum over all ranks is `kv_lens`.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.

    Examples:
        >>> import torch, tatten
        >>> lens = torch.tensor([0, 3, 16, 41])  # pages of 16: 41 tokens have page 0 and 9 tokens of page 2 on rank 0
        >>> tatten.local_lens(lens, page=16, rank=0, ranks=2)
        tensor([ 0,  3, 16, 25])
        >>> tatten.local_lens(lens, page=16, rank=1, ranks=2)
        tensor([ 0,  0,  0, 16])
    """
    check_tensors(kv_lens=kv_lens)
    if kv_lens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`kv_lens` must be int32 or int64, got {kv_lens.dtype}")
    for name, n in (("page", page), ("ranks", ranks)):
        if n < 1:
            raise ValueError(f"`{name}` must be at least 1, got {n}")
    if not 0 <= rank < ranks:
        raise ValueError(f"`rank` must lie between 0 and {ranks - 1}, as there are {ranks} ranks, got {rank}")
    turn = page * ranks
    return kv_lens // turn * page + (kv_lens % turn - rank * page).clamp(0, page)
