"""Kernels of others for picked latents, as `sparse.py` times them, each with our rows in its own layout.

None of them reads a mask. Rows of all sequences lie end to end, and picks are numbers of these rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from support import peers
from support.picked_cases import PICKED_KEYS, RANK, ROPE, SCALE, Inputs, Shape

PEERS = ("fa3", "flash_mla", "flash_mla_8")
TILE = 128  # columns of a latent that share a scale in FlashMLA's cache
TILES = RANK // TILE
Call = Callable[[], Tensor]


def as_drawn(x: Inputs) -> Inputs:
    return x


class Candidate(NamedTuple):
    """A kernel that is timed.

    Attributes:
        bind: returns a call of inputs. It converts, untimed, what a model would store in the kernel's layout.
        stored: returns the inputs as the kernel's cache rounds them.
    """

    bind: Callable[[Inputs], Call]
    stored: Callable[[Inputs], Inputs] = as_drawn


def candidates(s: Shape) -> dict[str, Candidate]:
    """Return the peers that read latents; none for separate keys and values."""
    if s.kv_heads:
        return {}
    return {"fa3": fa3(), "flash_mla": flash_mla(), "flash_mla_8": flash_mla_float8()}


def fa3() -> Candidate:
    """Return FlashAttention-3 with pages of one token: the picks are its page table."""

    def bind(x: Inputs) -> Call:
        kernel = there(peers.fa3_picked())
        counts = torch.full((len(x.query),), PICKED_KEYS, dtype=torch.int32, device=x.query.device)
        return functools.partial(kernel, x.query, x.query_rope, x.key, x.key_rope, rows_of(x).flatten(1), counts, SCALE)

    return Candidate(bind)


def flash_mla() -> Candidate:
    """Return FlashMLA's sparse kernel for prefill, which reads a cache in bfloat16 and never splits the picks."""
    cache = Stored(lambda x: joined(x.key, x.key_rope).flatten(0, 2).unsqueeze(1))

    def bind(x: Inputs) -> Call:
        kernel = there(peers.flash_mla_picked())
        query = joined(x.query, x.query_rope).squeeze(2)
        call = functools.partial(kernel, query, cache(x), rows_of(x), SCALE)
        return lambda: call().unsqueeze(2)

    return Candidate(bind)


def flash_mla_float8() -> Candidate:
    """Return FlashMLA's sparse kernel for decoding, with latents in float8 and rope in bfloat16."""
    cache = Stored(lambda x: float8_pages(x.key, x.key_rope))
    plan: list[Tensor] = []

    def bind(x: Inputs) -> Call:
        kernel = there(peers.flash_mla_picked_float8(plan))
        query = joined(x.query, x.query_rope).transpose(1, 2).contiguous()
        call = functools.partial(kernel, query, cache(x), rows_of(x), SCALE)
        return lambda: call().transpose(1, 2)

    def stored(x: Inputs) -> Inputs:
        values, scales = float8(x.key)
        latent = (values.float().unflatten(-1, (TILES, TILE)) * scales.unsqueeze(-1)).flatten(-2)
        return x._replace(key=latent, value=latent)

    return Candidate(bind, stored)


class Stored:
    """A peer's copy of a cache, shared by the calls that share the cache."""

    def __init__(self, make: Callable[[Inputs], Tensor]) -> None:
        self.make = make
        self.by_address: dict[int, Tensor] = {}

    def __call__(self, x: Inputs) -> Tensor:
        address = x.key.data_ptr()
        if address not in self.by_address:
            self.by_address[address] = self.make(x)
        return self.by_address[address]


def there(kernel: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
    if kernel is None:
        raise RuntimeError("not installed, or not for this device")
    return kernel


def rows_of(x: Inputs) -> Tensor:
    """Return the rows that each sequence picks, int32 `[batch, 1, picks]`, counted through all sequences."""
    batch, _, length, _ = x.key.shape
    first = length * torch.arange(batch, dtype=torch.int32, device=x.key.device)
    return x.indices[:, 0] + first.view(-1, 1, 1)


def joined(latent: Tensor, rope: Tensor | None) -> Tensor:
    assert rope is not None
    return torch.cat((latent, rope), -1)


def float8(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Return a latent in float8, and a float32 scale for each tile, a power of two."""
    tiles = latent.float().unflatten(-1, (TILES, TILE))
    largest = tiles.abs().amax(-1).clamp_min(1e-4) / torch.finfo(torch.float8_e4m3fn).max
    scales = largest.log2().ceil().exp2()
    return (tiles / scales.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn), scales


def float8_pages(latent: Tensor, rope: Tensor | None) -> Tensor:
    """Return FlashMLA's pages `[pages, 64, 1, 656]`: bytes of the float8, scales and rope of each row."""
    assert rope is not None
    sequences = []
    for sequence in range(len(latent)):  # the float32 of all sequences would not fit beside their caches
        values, scales = float8(latent[sequence, 0])
        parts = values, scales, rope[sequence, 0]
        sequences.append(torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1))
    return torch.cat(sequences).view(-1, peers.PAGE_OF_FLASH_MLA, 1, RANK + 4 * TILES + 2 * ROPE)
