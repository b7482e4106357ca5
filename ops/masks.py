"""The keys that an attention mask allows, found once for all layers that share the mask.

`tatten::block_mask` finds them: `key_spans` on a CPU, `block_list` on CUDA. A `BlockMask` names the columns of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tatten.ops.layout import squeeze_broadcast
from tatten.ops.sizes import ceil_div
from tatten.ops.states import NEG_INF
from tatten.ops.validation import BLOCK_KEYS

# A key with a bias as low as this has a weight of exactly 0 beside any key with a higher one: near the end of float32
# the next bias is 1e31 above, and scores do not differ by as much. Models write padding as `finfo.min` of float32 and
# bfloat16; -65504, that of float16, is no such bound.
EXCLUDING_BIAS = torch.finfo(torch.float32).min / 2


@dataclass(frozen=True, eq=False)
class BlockMask:
    """The keys that an attention mask allows, found once by `tatten.block_mask` for all layers that share the mask.

    Pass it with the mask that it was made from, and make a new one after a write to that mask. Only its shape and
    device are checked.

    Attributes:
        data: int64, on the device of the mask, with one row for each row of the KV or one for all of them. Its columns
            are those of `KeySpans` on a CPU, and of `BlockList` on CUDA.
        kv_length: number of keys that the mask is over.

    Examples:
        >>> import torch, tatten
        >>> keys = torch.arange(1000)
        >>> mask = torch.stack((keys < 300, (keys >= 10) & (keys < 20)))[:, None, None]
        >>> blocks = tatten.block_mask(mask)
        >>> blocks.start, blocks.stop, blocks.full  # one entry for each of two sequences, on a CPU
        (tensor([ 0, 10]), tensor([300,  20]), tensor([1, 1]))
    """

    data: Tensor
    kv_length: int


class Span(NamedTuple):
    """The keys from `start` up to but not including `stop`; both are 0 if there are none.

    `full`: every query attends to all of them with no bias, so that the mask need not be looked at again.
    """

    start: int
    stop: int
    full: bool

    @property
    def empty(self) -> bool:
        return self.start == self.stop

    def n_pages(self, page: int) -> int:
        """Return the number of pages, of `page` keys each, that hold the span."""
        return ceil_div(self.stop, page) - self.start // page


class KeySpans(BlockMask):
    """A `BlockMask` on a CPU: `data` is `[rows, 3]`, a `Span` in each row. Its columns are `[rows]`."""

    @property
    def start(self) -> Tensor:
        """The first key that any query attends to."""
        return self.data[:, 0]

    @property
    def stop(self) -> Tensor:
        """One past the last such key."""
        return self.data[:, 1]

    @property
    def full(self) -> Tensor:
        """1 where every query attends to all keys of the span with no bias, else 0."""
        return self.data[:, 2]


class BlockList(BlockMask):
    """A `BlockMask` on CUDA: `data` is `[rows, n_blocks + 1, 2]`, and lists the blocks of 64 keys in each row.

    A block is full if all queries attend to all of its 64 keys with no bias. The list starts with the blocks of the
    longest run of full ones; the other blocks that are not empty follow, then the empty ones, each group in order.
    """

    @property
    def counts(self) -> Tensor:
        """`[rows]`: the number of blocks that are not empty."""
        return self.data[:, 0, 0]

    @property
    def runs(self) -> Tensor:
        """`[rows]`: the number of blocks in the longest run of full ones."""
        return self.data[:, 0, 1]

    @property
    def blocks(self) -> Tensor:
        """`[rows, n_blocks]`: the number of each listed block."""
        return self.data[:, 1:, 0]

    @property
    def keys(self) -> Tensor:
        """`[rows, n_blocks]`: the keys of each listed block that any query attends to, as the bits of an int64."""
        return self.data[:, 1:, 1]


def data_of(
    block_mask: object, attn_mask: Tensor | None, key: Tensor, segment: int | None = None, name: str = "key"
) -> Tensor:
    """Return the tensor of a user's `BlockMask`; raise unless it can belong to `attn_mask` and `key`, called `name`."""
    end = "" if segment is None else f"s[{segment}]"
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"`block_mask{end}` must be a BlockMask, as tatten.block_mask returns, got {type(block_mask).__name__}"
        )
    if attn_mask is None:
        raise ValueError(f"`block_mask{end}` must come with the `attn_mask{end}` that it was made from, got None")
    if key.dim() == 4:
        kv_batch, kv_length = key.shape[0], key.shape[2]
        rows, expected_rows = block_mask.data.shape[0], mask_rows(attn_mask, kv_batch)
        if block_mask.data.device != key.device:
            wanted = f"on the device of `{name}{end}`, {key.device}"
            raise ValueError(f"`block_mask{end}` must be {wanted}, got {block_mask.data.device}")
        if block_mask.kv_length != kv_length:
            wanted = f"over the {kv_length} keys of `{name}{end}`"
            raise ValueError(f"`block_mask{end}` must be {wanted}, got one over {block_mask.kv_length}")
        if rows != expected_rows:
            wanted = f"that of `attn_mask{end}` for `kv_batch={kv_batch}`, of {expected_rows} rows"
            raise ValueError(f"`block_mask{end}` must be {wanted}, got one of {rows}")
    return block_mask.data


def used_and_plain(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Find the keys that count for any query, and those that count for all of them with no bias.

    A query whose keys all have a bias of at most `EXCLUDING_BIAS` averages them: then those keys count.

    Args:
        mask: bool or additive, `[rows, queries, kv_length]`.

    Returns:
        Two bool tensors `[rows, kv_length]`.
    """
    if mask.dtype == torch.bool:
        return (mask[:, 0], mask[:, 0]) if mask.shape[1] == 1 else (mask.any(dim=1), mask.all(dim=1))
    above = ~(mask <= EXCLUDING_BIAS)  # so that NaN counts
    each_has_one = above.any(dim=2).all(dim=1)
    used = torch.where(each_has_one[:, None, None], above, mask != NEG_INF)
    return used.any(dim=1), (mask == 0).all(dim=1)


def mask_of_rows(attn_mask: Tensor, kv_batch: int, rows: Tensor) -> Tensor:
    """Make a mask for each stored row from one for each sequence: bool `[kv_batch, 1, 2, kv_length]`.

    The first of its two queries attends to the keys that count for any sequence that reads the row. The second attends
    to the keys that count for all of them with no bias. So its `BlockMask` covers all masks of the row together.
    """
    used, plain = used_and_plain(attn_mask.flatten(1, 2))
    rows = rows.to(torch.int64).clamp(0, kv_batch - 1)
    counts = torch.zeros((2, kv_batch, used.shape[1]), dtype=torch.int32, device=used.device)
    used_by_any, not_plain_for_any = counts.index_add(1, rows, torch.stack((used, ~plain)).to(torch.int32)) > 0
    return torch.stack((used_by_any, used_by_any & ~not_plain_for_any), dim=1).unsqueeze(1)


def mask_rows(attn_mask: Tensor, kv_batch: int | None) -> int:
    """Return the number of rows of a mask's `BlockMask`. It depends on shapes alone, so it is known while tracing."""
    if attn_mask.dim() < 4 or attn_mask.shape[0] == 1:
        return 1
    return attn_mask.shape[0] if kv_batch is None else kv_batch


def key_spans(attn_mask: Tensor, kv_batch: int | None = None) -> Tensor:
    """Find the `data` of `KeySpans`: for each row of the KV the span of keys that any of its queries attends to.

    It is plain PyTorch, which Inductor fuses into a kernel or two.

    Args:
        attn_mask: bool or additive, `[sequences or 1, heads or 1, q_length or 1, kv_length]`, or of lower rank.
        kv_batch: the batch of the KV, if sequences share its rows: each row then gets the span of all sequences that
            read it. Default: the number of sequences.
    """
    rows = mask_rows(attn_mask, kv_batch)
    mask = squeeze_broadcast(attn_mask)
    if mask.shape[0] not in (1, rows):
        mask = mask.unflatten(0, (rows, -1)).flatten(1, 2)
    kv_len = mask.shape[3]
    if kv_len == 0:
        return attn_mask.new_zeros((rows, 3), dtype=torch.int64)
    used, plain = used_and_plain(mask.flatten(1, 2))
    places = torch.arange(kv_len, device=mask.device)
    start = torch.where(used, places, kv_len).amin(dim=1)
    stop = torch.where(used, places + 1, 0).amax(dim=1)
    start = torch.minimum(start, stop)
    full = plain.sum(dim=1) == stop - start
    return torch.stack((start, stop, full.to(torch.int64)), dim=1).expand(rows, -1).contiguous()


def block_list(attn_mask: Tensor, kv_batch: int, every_block: bool = False) -> Tensor:
    """Find the `data` of `BlockList`: for each row of the KV the blocks with a key that any of its queries attends to.

    It is plain PyTorch. `tatten.ops.cuda.block_mask` does the same on a GPU, except that it lists keys at
    `EXCLUDING_BIAS` where the mask has more than 63 rows of its own for one row of the KV.

    Args:
        attn_mask: bool or additive, `[sequences or kv_batch or 1, heads or 1, q_length or 1, kv_length]`, or of lower
            rank.
        kv_batch: the batch of the KV, where sequences share its rows; divides the number of sequences.
        every_block: list empty blocks too, all in order and none in a run. The place of a block in the list then does
            not depend on the other queries.
    """
    rows = mask_rows(attn_mask, kv_batch)
    mask = squeeze_broadcast(attn_mask)
    mask = mask.unsqueeze(1) if mask.shape[0] == 1 else mask.unflatten(0, (kv_batch, -1))
    used, plain = (x.expand(rows, -1) for x in used_and_plain(mask.flatten(1, 3)))
    n_blocks = ceil_div(used.shape[1], BLOCK_KEYS)
    padding = 0, n_blocks * BLOCK_KEYS - used.shape[1]
    used, plain = (torch.nn.functional.pad(x, padding).unflatten(1, (n_blocks, -1)) for x in (used, plain))
    keys = (used.to(torch.int64) << torch.arange(BLOCK_KEYS, device=used.device)).sum(dim=2)
    nonempty, full = keys != 0, plain.all(dim=2)
    if every_block:
        nonempty, full = torch.ones_like(nonempty), torch.zeros_like(full)
    numbers = torch.arange(n_blocks, device=used.device)
    # The length of the run of full blocks that ends at each block.
    run_lengths = numbers - torch.where(full, -1, numbers).cummax(dim=1).values
    run, end = run_lengths.amax(dim=1, keepdim=True), run_lengths.argmax(dim=1, keepdim=True)
    in_run = (numbers > end - run) & (numbers <= end)
    order = torch.argsort(nonempty.to(torch.int8) + in_run.to(torch.int8), dim=1, descending=True, stable=True)
    data = attn_mask.new_empty((rows, n_blocks + 1, 2), dtype=torch.int64)
    data[:, 0] = torch.cat((nonempty.sum(dim=1, keepdim=True), run), dim=1)
    data[:, 1:, 0] = order
    data[:, 1:, 1] = keys.gather(1, order)
    return data
