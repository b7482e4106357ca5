"""The properties of a call that the choice of a provider depends on: sizes, dtypes, and features such as a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from tatten.ops.call import AttentionCall

Needs = tuple[str, ...]
NARROW = "float8 or int8"


@dataclass(frozen=True)
class Workload:
    """Properties of a call on which the choice of a provider depends.

    Attributes:
        device: the device of the tensors.
        dtype: the dtype of the query.
        kv_dtype: the dtype of key and value.
        query: the shape of the query, `[batch, q_heads, q_length, head_dim]`.
        key: the shape of the key, `[batch, kv_heads, kv_length, head_dim]`.
        value_dim: the head_dim of value.
        dense: query, key and value have a stride of 1 over head_dim.
        aligned: their other strides are multiples of 16 bytes.
        needs: the features that the call needs besides plain attention, named by `needs_of`.
        flash_impl: the implementation that `torch.nn.attention.activate_flash_attention_impl` put in the place of
            PyTorch's own flash attention, in this process; None without one.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    query: tuple[int, ...]
    key: tuple[int, ...]
    value_dim: int
    dense: bool
    aligned: bool
    needs: Needs
    flash_impl: str | None

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, needs: Needs = (), size: Callable[[int], int] = int
    ) -> Workload:
        """Return the workload of tensors, which may be fake; `size` turns a symbolic size into a number."""
        strides = [[size(n) for n in x.stride()] for x in (query, key, value)]
        widths = [x.element_size() for x in (query, key, value)]
        query_shape, key_shape = (tuple(size(n) for n in x.shape) for x in (query, key))
        return cls(
            query.device,
            query.dtype,
            key.dtype,
            query_shape,
            key_shape,
            size(value.shape[3]),
            dense=all(x_strides[3] == 1 for x_strides in strides),
            aligned=all(
                n * width % 16 == 0 for x_strides, width in zip(strides, widths, strict=True) for n in x_strides[:3]
            ),
            needs=needs,
            flash_impl=current_flash_attention_impl(),
        )

    @property
    def packed(self) -> int:
        """The queries that read one kv head of a sequence."""
        return self.query[1] // self.key[1] * self.query[2]

    @property
    def pairs(self) -> int:
        """The number of (sequence, kv head) pairs."""
        return self.key[0] * self.key[1]


def needs_of(call: AttentionCall) -> Needs:
    """Return the features that a call of one segment needs besides plain attention, in the words of error messages.

    It reads no tensor. Kernels that take the maximum of scores before they scale them need a scale above 0: the score
    of a masked key is -inf.
    """
    stored = call.segments[0]
    operands = {
        "mask": stored.attn_mask,
        "lengths": stored.kv_lens,
        "window": call.window,
        "soft cap": call.softcap,
        "sinks": call.sinks,
        "block table": stored.block_table,
    }
    needs = [name for name, x in operands.items() if x is not None]
    if stored.key_scale is not None or stored.value_scale is not None:
        needs.append(NARROW)
    if isinstance(call.scale, (int, float)) and not call.scale > 0:
        needs.append("scale that is 0 or less")
    return tuple(needs)
