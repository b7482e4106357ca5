"""A step that gathers pages for SDPA, as written without tatten, compiled with Inductor and with tatten.

    python benchmarks/gathers.py                    # 8 x 4096 slots, all of them in use or up to a half
    python benchmarks/gathers.py --device cuda      # other batches, pages and lengths, too

Sequences have 32 query heads, 8 kv heads of head_dim 128 and a mask of their lengths, which are on the device. On a GPU
`copied` gathers the pages for `tatten.decode_attention`, which then attends to the copy.

On a GPU each backend's step is a captured CUDA graph of several calls, which cycle through block tables whose pages the
L2 cannot hold. Before it is timed, it is checked against float64. The backends take turns, and medians are shown in
microseconds per call. The floor is each key and value in use and each entry of the table once, at the best rate of a
plain read or copy in the same run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from support import results
from support.command_line import arguments, machine
from support.decode_cases import L2
from support.errors import relative_error
from support.timing import as_graph, in_turns, microseconds, read_rate
from torch import Tensor

import tatten

Q_HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 32, 8, 128, 4096


@dataclass(frozen=True)
class Row:
    """Sequences with `capacity` slots in pages; the longest has `used` keys, the shortest all of them or half."""

    page: int
    used: int = CAPACITY
    batch: int = 8
    capacity: int = CAPACITY
    dtype: str = "bfloat16"

    @property
    def lengths(self) -> list[int]:
        shortest = self.used if self.used == self.capacity else self.used // 2
        return torch.linspace(shortest, self.used, self.batch).int().tolist()

    @property
    def read_bytes(self) -> int:
        numbers = 2 * sum(self.lengths) * KV_HEADS * HEAD_DIM
        return numbers * getattr(torch, self.dtype).itemsize + 4 * sum(-(-n // self.page) for n in self.lengths)


ROWS = {
    "cpu": [
        Row(page, used, dtype=dtype)
        for dtype, page, used in itertools.product(("float32", "bfloat16"), (16, 64), (CAPACITY, CAPACITY // 2))
    ],
    "cuda": [
        *(Row(page) for page in (1, 16, 64, 256)),
        Row(16, CAPACITY // 2),
        Row(16, batch=1),
        Row(16, batch=32),
        Row(16, 256, batch=1, capacity=256),
    ],
}


def in_order(pool: Tensor, table: Tensor) -> Tensor:
    """Copy pages `[pages, page, kv_heads, head_dim]` that a block table names."""
    return pool.index_select(0, table.flatten()).view(len(table), -1, *pool.shape[2:]).transpose(1, 2)


def gathered(query: Tensor, key: Tensor, value: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """Attend over pages by SDPA."""
    keys, values = in_order(key, table), in_order(value, table)
    mask = torch.arange(keys.shape[2], device=lens.device) < lens[:, None, None, None]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def copied(query: Tensor, key: Tensor, value: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """Attend over a copy of the pages by the op."""
    keys, values = in_order(key, table), in_order(value, table)
    mask = torch.arange(keys.shape[2], device=lens.device) < lens[:, None, None, None]
    return tatten.decode_attention(query, keys, values, attn_mask=mask)


CANDIDATES = {"inductor": (gathered, "inductor"), "copied": (copied, "tatten"), "tatten": (gathered, "tatten")}


def inputs(row: Row, device: str = "cpu") -> list[tuple[Tensor, ...]]:
    """Return the arguments of calls, each with pages of its own in one pool, in random order."""
    copies = -(-L2[device] // row.read_bytes) if device == "cuda" else 1
    columns, dtype = row.capacity // row.page, getattr(torch, row.dtype)
    n_pages = copies * row.batch * columns
    shape = n_pages, row.page, KV_HEADS, HEAD_DIM
    pools = [torch.randn(shape, device=device, dtype=dtype) for _ in "kv"]
    tables = torch.randperm(n_pages, device=device).view(copies, row.batch, columns).int()
    lens = torch.tensor(row.lengths, dtype=torch.int32, device=device)
    query = torch.randn(row.batch, Q_HEADS, 1, HEAD_DIM, device=device, dtype=dtype)
    return [(query, *pools, table, lens) for table in tables]


def measure(calls: list[tuple[Tensor, ...]], rounds: int) -> dict[str, float]:
    """Return the microseconds of a call of each candidate; a RuntimeError names one that is wrong."""
    device = calls[0][0].device.type
    steps: dict[str, Callable[[], list[Tensor]]] = {}
    want = gathered(*(x.double() if x.is_floating_point() else x for x in calls[0]))
    for name, (function, backend) in CANDIDATES.items():
        if name == "copied" and device == "cpu":
            continue
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, dynamic=False)

        def step(compiled: Callable[..., Tensor] = compiled) -> list[Tensor]:
            return [compiled(*args) for args in calls]

        off = relative_error(compiled(*calls[0]).double(), want)
        if not off < 1e-2:
            raise RuntimeError(f"{name} is wrong: relative error {off:.1e}, allowed 1e-2")
        if device == "cuda":
            torch.cuda.synchronize()
            step = as_graph(step)
        steps[name] = step
    repeats = 1 if device == "cpu" else 5
    return in_turns(steps, rounds, lambda _, step: microseconds(step, device, len(calls), repeats))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    device, rate = args.device, read_rate(args.device)
    print(f"{machine(device)}, reads {rate / 1e12:.3f} TB/s")
    rows = []
    with torch.no_grad():
        for row in ROWS[device]:
            us = measure(inputs(row, device), args.rounds)
            us["floor"] = row.read_bytes / rate * 1e6
            rows.append({**asdict(row), "us": us})
            times = "  ".join(f"{name} {x:.1f}" for name, x in us.items())
            shape = f"{row.batch:3} x {row.used:4} of {row.capacity:4}, pages of {row.page:3}, {row.dtype:8}"
            print(f"{shape}  {times}  {us['inductor'] / us['tatten']:.2f} x", flush=True)
            if device == "cuda":
                torch.cuda.empty_cache()
    if args.json:
        results.write(args.json, device, rows, bytes_per_second=rate)


if __name__ == "__main__":
    main()
