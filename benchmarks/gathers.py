"""A step that gathers pages for SDPA, as written without tatten, compiled with Inductor and with tatten on a CPU.

    python benchmarks/gathers.py

8 sequences of 4096 slots, all of them in use or up to a half; 32 query heads, 8 kv heads, head_dim 128. The backends
take turns, and medians are shown in microseconds per step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from support import results
from support.command_line import arguments, machine
from support.errors import relative_error
from support.timing import in_turns, microseconds
from torch import Tensor

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 8, 32, 8, 128, 4096
BACKENDS = ("inductor", "tatten")


def gathered(query: Tensor, key: Tensor, value: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """Attend over pages `[pages, page, kv_heads, head_dim]` that a block table names."""
    keys, values = (
        x.index_select(0, table.flatten()).view(len(table), -1, *x.shape[2:]).transpose(1, 2) for x in (key, value)
    )
    mask = torch.arange(keys.shape[2]) < lens[:, None, None, None]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def inputs(page: int, used: int, dtype: torch.dtype, capacity: int = CAPACITY) -> tuple[Tensor, ...]:
    """Return pages in random order, none shared; the longest sequence has `used` keys, the shortest half."""
    columns = capacity // page
    pools = (torch.randn(BATCH * columns, page, KV_HEADS, HEAD_DIM).to(dtype) for _ in "kv")
    table = torch.randperm(BATCH * columns).view(BATCH, columns).int()
    lens = torch.linspace(used // 2, used, BATCH).int() if used < capacity else torch.full((BATCH,), used)
    return torch.randn(BATCH, Q_HEADS, 1, HEAD_DIM).to(dtype), *pools, table, lens


def measure(args: tuple[Tensor, ...], rounds: int) -> dict[str, float]:
    """Return the microseconds of a step under each backend; a RuntimeError names one that is wrong."""
    steps: dict[str, Callable[[], Tensor]] = {}
    want = gathered(*args).float()
    for backend in BACKENDS:
        torch._dynamo.reset()
        compiled = torch.compile(gathered, backend=backend)
        off = relative_error(compiled(*args).float(), want)
        if not off < 1e-2:
            raise RuntimeError(f"{backend} is wrong: relative error {off:.1e}, allowed 1e-2")
        steps[backend] = lambda compiled=compiled: compiled(*args)
    return in_turns(steps, rounds, lambda _, step: microseconds(step, "cpu"))


def main() -> None:
    parser = arguments(__doc__, devices=["cpu"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(machine("cpu"))
    rows = []
    with torch.no_grad():
        for dtype, page, used in itertools.product(
            (torch.float32, torch.bfloat16), (16, 64), (CAPACITY, CAPACITY // 2)
        ):
            us = measure(inputs(page, used, dtype), args.rounds)
            rows.append({"page": page, "dtype": str(dtype)[6:], "used": used, "us": us})
            times = "  ".join(f"{name} {x:.0f}" for name, x in us.items())
            print(f"page {page:3} {rows[-1]['dtype']:8} {used:5}  {times}  {us['inductor'] / us['tatten']:.2f} x")
    if args.json:
        results.write(args.json, "cpu", rows)


if __name__ == "__main__":
    main()
