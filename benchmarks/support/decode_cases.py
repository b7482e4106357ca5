"""The shapes of KV that `decode.py` measures: uniform, ragged, and static caches of which a part is used."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from support import peers

L2 = {"cuda": 200 << 20, "cpu": 8 << 20}  # bytes of KV after which the cache holds none of the first ones


@dataclass(frozen=True)
class Shape:
    """Sequences of these lengths, in a cache of `capacity` slots for each."""

    section: str
    name: str
    q_heads: int
    kv_heads: int
    lengths: tuple[int, ...]
    capacity: int
    head_dim: int = 128

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def kv_bytes(self) -> int:
        return 4 * sum(self.lengths) * self.kv_heads * self.head_dim

    def copies(self, device: str) -> int:
        return -(-L2[device] // self.kv_bytes)

    @property
    def size(self) -> int:
        """Numbers in the keys of one copy."""
        return self.batch * self.kv_heads * self.capacity * self.head_dim


def uniform(section: str, batch: int, q_heads: int, kv_heads: int, length: int, head_dim: int = 128) -> Shape:
    return Shape(section, f"{length}", q_heads, kv_heads, (length,) * batch, length, head_dim)


def ragged(name: str, lengths: list[int], q_heads: int = 32, kv_heads: int = 8) -> Shape:
    return Shape("ragged", name, q_heads, kv_heads, tuple(lengths), -(-max(lengths) // peers.PAGE) * peers.PAGE)


def padded(low: int, high: int, batch: int, empty: int, q_heads: int = 32, kv_heads: int = 8) -> Shape:
    """A batch with empty sequences, as serving engines pad it to the size of a captured graph."""
    name = f"{batch} of {low} to {high}, and {empty} empty"
    return replace(ragged(name, log_uniform(batch, low, high) + [0] * empty, q_heads, kv_heads), section="padded")


def short_shapes() -> list[Shape]:
    """Sequences of few keys, in capacities of whole pages of 256."""
    shapes = []
    for batch, q_heads, kv_heads, most, head_dim in (
        (8, 8, 2, 64, 64),
        (64, 8, 2, 64, 64),
        (8, 8, 2, 512, 64),
        (64, 8, 2, 512, 64),
        (8, 8, 2, 2048, 64),
        (8, 8, 8, 512, 64),
        (2, 32, 8, 512, 128),
        (4, 32, 8, 2048, 128),
    ):
        lengths = tuple(most - b % 7 for b in range(batch))
        capacity = -(-most // 256) * 256
        shapes.append(Shape("short", f"up to {most}", q_heads, kv_heads, lengths, capacity, head_dim))
    return shapes


def static(batch: int, used: int, q_heads: int = 32, kv_heads: int = 8) -> Shape:
    return Shape("static", f"{used} of {16 * used}", q_heads, kv_heads, (used,) * batch, 16 * used)


def log_uniform(batch: int, low: int, high: int) -> list[int]:
    x = torch.rand(batch, generator=torch.Generator().manual_seed(batch))
    return (low * (high / low) ** x).int().tolist()


def with_invariant(shapes: list[Shape]) -> list[Shape]:
    """Return `shapes`, and the ragged ones once more for the section "invariant"."""
    return [*shapes, *(replace(s, section="invariant") for s in shapes if s.section == "ragged")]


def cuda_shapes() -> list[Shape]:
    k = 1024
    nine = [
        (1, 32, 8, 4 * k, 128),
        (1, 32, 8, 32 * k, 128),
        (1, 32, 8, 128 * k, 128),
        (16, 32, 8, 8 * k, 128),
        (64, 32, 8, 2 * k, 128),
        (128, 64, 8, 4 * k, 128),
        (1, 56, 56, 64 * k, 64),
        (4, 32, 32, 8 * k, 128),
        (8, 32, 1, 16 * k, 128),
    ]
    middle = torch.randint(1638, 16 * k + 1, (32,), generator=torch.Generator().manual_seed(0)).tolist()
    one_long = [128 * k] + [k] * 31
    shapes = [
        *(uniform("nine", *shape) for shape in nine),
        *(
            uniform("grid", batch, *heads, length)
            for heads in ((32, 8), (64, 8), (32, 32), (8, 1))
            for batch in (1, 8, 32, 128)
            for length in (k, 4 * k, 16 * k, 64 * k)
        ),
        ragged("log-uniform 1k to 64k", log_uniform(32, k, 64 * k)),
        ragged("uniform 1.6k to 16k", middle),
        ragged("one 128k and 31 of 1k", one_long),
        ragged("log-uniform 1k to 64k", log_uniform(8, k, 64 * k)),
        ragged("one 128k and 31 of 1k", one_long, 64),
        padded(128, 4 * k, 48, 16),
        padded(128, 2 * k, 192, 64),
        *(static(batch, used) for batch in (1, 8, 32) for used in (k, 4 * k)),
    ]
    return with_invariant(shapes)


def cpu_shapes() -> list[Shape]:
    shapes = [
        uniform("nine", 2, 8, 2, 512, 64),
        uniform("nine", 1, 4, 4, 1024),
        *(uniform("grid", batch, 8, 2, length) for batch in (1, 4) for length in (128, 512)),
        ragged("log-uniform 64 to 1k", log_uniform(8, 64, 1024), 8, 2),
        ragged("one 2k and 3 of 64", [2048, 64, 64, 64], 8, 2),
        padded(64, 1024, 5, 3, 8, 2),
        *(static(batch, 64, 8, 2) for batch in (1, 4)),
    ]
    return with_invariant(shapes)
