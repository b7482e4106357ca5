"""One description of an attention call: all code below the schemas of the ops reads it.

A schema is flat: a list of arguments, which `tatten.ops.kernel_signatures` turns into an `AttentionCall`. A new operand
needs an argument in both, a field here, a check in `tatten.ops.validation`, a line in `tatten.ops.reference`, and
kernels that support it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tatten.ops.states import State

DECODE, BIFURCATED, LATENT = "decode_attention", "bifurcated_attention", "latent_attention"
_PLURALS = "row_groups", "indices"
_NAMES_OF_LATENTS = {"key": "latent", "value": "latent", "rope": "key_rope"}


class KeyValue(NamedTuple):
    """A segment: keys and values that are stored together, with the operands that belong to them.

    Attributes:
        key: `[kv_batch, kv_heads, kv_length, head_dim]`.
        value: `[kv_batch, kv_heads, kv_length, value_dim]`; the same tensor as `key` if these are latents.
        attn_mask, kv_lens: as `tatten.decode_attention` takes them.
        block_mask: the `data` of a `tatten.BlockMask` of `attn_mask`.
        row_groups: the result of `tatten::row_groups` if each sequence may read any row, else None.
        key_scale, value_scale: as `tatten.decode_attention` takes them.
        rope: `[kv_batch, 1, kv_length, width]`, the columns with rotary positions of keys that are latents.
        indices: `[batch, 1 or kv_heads, q_length, picks]`, the keys that each query attends to; None for all keys.
        block_table: `[batch, max_pages]`, the pages of each sequence in order; None unless keys are in pages. With it,
            `key`, `value` and `rope` are pools `[pages, kv_heads, page, d]`, and scales of keys
            `[pages, kv_heads, page]`: views of the user's `[pages, page, kv_heads, ...]`.
        shared_pages: the result of `tatten::shared_pages` for `block_table`, or None. It changes no result.
    """

    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    kv_lens: Tensor | None = None
    block_mask: Tensor | None = None
    row_groups: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    rope: Tensor | None = None
    indices: Tensor | None = None
    block_table: Tensor | None = None
    shared_pages: Tensor | None = None

    @property
    def kv_batch(self) -> int:
        """The number of rows of keys: one for each sequence, if keys are in pages."""
        return (self.key if self.block_table is None else self.block_table).shape[0]

    @property
    def kv_len(self) -> int:
        """The largest number of keys of a sequence."""
        keys = self.key.shape[2]
        return keys if self.block_table is None else keys * self.block_table.shape[1]


class AttentionCall(NamedTuple):
    """A call of `op`. It is a tuple because `tatten.ops.cuda.launcher.by_layout` keys tuples by their contents.

    Attributes:
        op: the name of the op, which is the name of the public function too.
        query: `[batch, q_heads, q_length, head_dim]`.
        segments: the segments of keys and values: one or more for `bifurcated_attention`, one for the other ops.
        scale: factor of the scores; None stands for `head_dim ** -0.5`.
        window, softcap, sinks: as `tatten.decode_attention` takes them.
        query_rope: the columns of the queries that are multiplied by the `rope` of keys; None without `rope`.
        out_dtype: the dtype of `out`; None stands for that of `query`.
        provider, batch_invariant: as `tatten.decode_attention` takes them.
        index_block, rest_bias: as `tatten.decode_attention` takes them; of no effect without `indices`.
    """

    op: str
    query: Tensor
    segments: tuple[KeyValue, ...]
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    query_rope: Tensor | None = None
    out_dtype: torch.dtype | None = None
    provider: str = "auto"
    batch_invariant: bool = False
    index_block: int = 1
    rest_bias: float | None = None

    @property
    def score_scale(self) -> float:
        """The factor of the scores as a number, the default included."""
        return self.query.shape[3] ** -0.5 if self.scale is None else self.scale

    @property
    def plain(self) -> bool:
        """True without a window, soft cap, sinks and `batch_invariant`."""
        return self.window is None and self.softcap is None and self.sinks is None and not self.batch_invariant

    @property
    def latent(self) -> bool:
        """True if keys and values are one tensor, the latents."""
        return self.op == LATENT

    @property
    def has_picks(self) -> bool:
        """True if a segment has `indices`."""
        return any(x.indices is not None for x in self.segments)

    def name_of(self, field: str, segment: int = 0) -> str:
        """Return the name that an error gives to a field of a segment: `key`, `keys[1]` or `latent`.

        It is the name of an argument of the op.
        """
        if self.op == BIFURCATED:
            return f"{field}[{segment}]" if field in _PLURALS else f"{field}s[{segment}]"
        return _NAMES_OF_LATENTS.get(field, field) if self.latent else field

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the call by the names of the op's arguments; operands that are None are left out."""
        named = {"query": self.query, "query_rope": self.query_rope, "sinks": self.sinks}
        for i, segment in enumerate(self.segments):
            named |= {self.name_of(field, i): x for field, x in zip(KeyValue._fields, segment, strict=True)}
        return {name: x for name, x in named.items() if x is not None}


Attend = Callable[[AttentionCall], State]


def check_segments(keys: Sequence[Tensor], **arguments: Sequence[object]) -> None:
    """Raise ValueError unless each of the arguments, by name, has as many entries as `keys`."""
    for name, entries in arguments.items():
        if len(entries) != len(keys):
            raise ValueError(f"`{name}` must have one entry for each of the {len(keys)} `keys`, got {len(entries)}")
