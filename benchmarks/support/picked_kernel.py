"""Attention to picked keys beside attention to all of them, for `sparse.py`: each is held to float64, then timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from support.command_line import first_line
from support.decode_cases import L2
from support.timing import as_graph, in_turns, microseconds

PICKED_KEYS = 2048
RUN = 16  # neighbours in a row, where picks are clustered
RANK, ROPE = 512, 64
SCALE = (128 + 64) ** -0.5  # of DeepSeek-V3's keys
CANDIDATES = ("dense", "masked", "copied", "short", "tatten")


@dataclass(frozen=True)
class Shape:
    """One call of a decode step.

    Attributes:
        kv_heads: 0 stands for latents of rank 512 with a rope of 64.
        picks: "random", "clustered" in runs, or "blocks", of 128 keys for each kv head.
    """

    heads: int
    batch: int
    length: int
    picks: str
    dtype: torch.dtype = torch.bfloat16
    kv_heads: int = 0
    head_dim: int = 128

    @property
    def row_bytes(self) -> int:
        """The bytes of what is stored for each key."""
        return self.dtype.itemsize * (2 * self.kv_heads * self.head_dim or RANK + ROPE)

    @property
    def picked_bytes(self) -> int:
        return self.batch * PICKED_KEYS * self.row_bytes

    @property
    def index_block(self) -> int:
        return 128 if self.picks == "blocks" else 1


class Inputs(NamedTuple):
    """`key_rope` and `query_rope` are None if these are no latents."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_rope: Tensor | None
    key_rope: Tensor | None
    indices: Tensor
    mask: Tensor


def shapes(device: str) -> list[Shape]:
    k = 1024
    if device == "cpu":
        latents = [
            Shape(heads, 1, n * k, picks, dtype)
            for dtype in (torch.float32, torch.bfloat16)
            for heads in (16, 128)
            for n in (32, 128)
            for picks in ("random", "clustered")
        ]
        return [*latents, Shape(64, 1, 32 * k, "blocks", torch.float32, 4)]
    batches = (1, 8, 64)
    latents = [
        Shape(heads, batch, n * k, picks)
        for heads in (128, 64, 16)
        for batch in batches
        for n in (8, 128)
        for picks in ("random", "clustered")
    ]
    return [*latents, *(Shape(64, batch, 128 * k, "blocks", kv_heads=4) for batch in batches)]


def draw(s: Shape, device: str) -> Tensor:
    """Return indices for one call."""
    heads = s.kv_heads if s.picks == "blocks" else 1
    size = {"random": 1, "clustered": RUN, "blocks": s.index_block}[s.picks]
    starts = torch.rand(s.batch, heads, 1, s.length // size, device=device).topk(PICKED_KEYS // size).indices
    if s.picks == "clustered":
        starts = (starts.unsqueeze(-1) * RUN + torch.arange(RUN, device=device)).flatten(3)
    return starts.to(torch.int32)


def keys_of(s: Shape, indices: Tensor) -> Tensor:
    """Return the picked keys, `[batch, heads, picks]`."""
    each = torch.arange(s.index_block, device=indices.device)
    return (indices[:, :, 0].long().unsqueeze(-1) * s.index_block + each).flatten(2)


def calls(s: Shape, device: str) -> list[Inputs]:
    """Return inputs of several calls, together more than the cache keeps. They share caches if these are large."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(s.batch, *shape, device=device, dtype=torch.float32).to(s.dtype)

    cache_bytes = s.batch * s.length * s.row_bytes
    n_caches, n_calls = (-(-L2[device] // size) for size in (cache_bytes, s.picked_bytes))
    if s.kv_heads:
        stored = [(*(randn(s.kv_heads, s.length, s.head_dim) for _ in range(2)), None) for _ in range(n_caches)]
    else:
        latents = [(randn(1, s.length, RANK), randn(1, s.length, ROPE)) for _ in range(n_caches)]
        stored = [(latent, latent, rope) for latent, rope in latents]
    made = []
    for i in range(min(32, max(8 if device == "cuda" else 1, n_calls, n_caches))):
        indices, (key, value, rope) = draw(s, device), stored[i % n_caches]
        keys = keys_of(s, indices)
        mask = torch.zeros((*keys.shape[:2], s.length), dtype=torch.bool, device=device).scatter(2, keys, True)
        mask = mask.repeat_interleave(s.heads // s.kv_heads if s.picks == "blocks" else 1, dim=1).unsqueeze(2)
        query = randn(s.heads, 1, key.shape[3])
        made.append(Inputs(query, key, value, None if rope is None else randn(s.heads, 1, ROPE), rope, indices, mask))
    return made


def attend(x: Inputs, key: Tensor, value: Tensor, rope: Tensor | None, **options: object) -> Tensor:
    if rope is None:
        return torch.ops.tatten.decode_attention.default(x.query, key, value, **options)[0]
    return torch.ops.tatten.latent_attention.default(x.query, x.query_rope, key, rope, scale=SCALE, **options)[0]


def copied(s: Shape, x: Inputs) -> Tensor:
    """Copy the picks of each sequence, and attend to the copies."""
    keys = keys_of(s, x.indices).unsqueeze(-1)

    def gather(stored: Tensor) -> Tensor:
        if s.batch == 1 and keys.shape[1] == 1:
            return stored.index_select(2, keys.flatten())
        return stored.gather(2, keys.expand(-1, stored.shape[1], -1, stored.shape[3]))

    key = gather(x.key)
    value = key if x.value is x.key else gather(x.value)
    return attend(x, key, value, None if x.key_rope is None else gather(x.key_rope))


def candidates(s: Shape) -> Mapping[str, Callable[[Inputs], Tensor]]:
    def short(x: Inputs) -> Tensor:
        rope = None if x.key_rope is None else x.key_rope[:, :, :PICKED_KEYS]
        return attend(x, x.key[:, :, :PICKED_KEYS], x.value[:, :, :PICKED_KEYS], rope)

    return {
        "dense": lambda x: attend(x, x.key, x.value, x.key_rope),
        "masked": lambda x: attend(x, x.key, x.value, x.key_rope, attn_mask=x.mask),
        "copied": lambda x: copied(s, x),
        "short": short,
        "tatten": lambda x: attend(x, x.key, x.value, x.key_rope, indices=x.indices, index_block=s.index_block),
    }


def error(s: Shape, x: Inputs, out: Tensor) -> float:
    """The relative error of the first sequence, against float64 and its picks."""
    keys = keys_of(s, x.indices)[0]
    heads = torch.arange(x.key.shape[1], device=keys.device).unsqueeze(1)
    key, value = (stored[0][heads, keys].double() for stored in (x.key, x.value))
    query = x.query[0, :, 0].double()
    if x.query_rope is not None and x.key_rope is not None:
        query = torch.cat((query, x.query_rope[0, :, 0].double()), -1)
        key = torch.cat((key, x.key_rope[0][heads, keys].double()), -1)
    scale = SCALE if x.key_rope is not None else s.head_dim**-0.5
    weights = (query.unflatten(0, (len(key), -1)) @ key.mT * scale).softmax(-1)
    want = (weights @ value).flatten(0, 1)
    found = ((out[0, :, 0].double() - want).norm() / want.norm()).item()
    return math.nan if out.isnan().any() else found


def prepare(s: Shape, name: str, attention: Callable[[Inputs], Tensor], inputs: list[Inputs]) -> Callable[[], object]:
    """Return a step of all calls; raise if it does not run, or is wrong."""

    def step() -> list[Tensor]:
        return [attention(x) for x in inputs]

    if inputs[0].query.is_cuda:
        for _ in range(2):
            attention(inputs[0])
        torch.cuda.synchronize()
        step = as_graph(step)
    outs = step()
    off = max(error(s, x, out) for x, out in zip(inputs, outs, strict=True))
    if name not in ("dense", "short") and not off < (1e-5 if s.dtype == torch.float32 else 1e-2):
        raise ArithmeticError(f"wrong: relative error {off:.1e}")
    return step


def attempt(
    s: Shape, name: str, attention: Callable[[Inputs], Tensor], inputs: list[Inputs]
) -> Callable[[], object] | str:
    """`prepare`, or why not."""
    try:
        return prepare(s, name, attention, inputs)
    except Exception as e:  # a kernel that is not for this device
        return first_line(e)


def measure(s: Shape, device: str, rate: float, rounds: int) -> dict[str, object]:
    """A row of the results; `rate` is bytes per second."""
    inputs = calls(s, device)
    tried = {name: attempt(s, name, attention, inputs) for name, attention in candidates(s).items()}
    ready = {name: x for name, x in tried.items() if not isinstance(x, str)}
    us = in_turns(ready, rounds, lambda _, step: microseconds(step, device, len(inputs)))
    return {
        **asdict(s),
        "dtype": str(s.dtype)[6:],
        "us": us,
        "bytes_us": s.picked_bytes / rate * 1e6,
        "dense_bytes_us": s.batch * s.length * s.row_bytes / rate * 1e6,
        "left_out": {name: x for name, x in tried.items() if isinstance(x, str)},
    }
