"""Decode attention of keys in pages, beside tatten's dense op on the same numbers in order.

    python benchmarks/paged.py --device cuda                    # the nine decode shapes, and five of ragged lengths
    python benchmarks/paged.py --device cuda --section padded   # two batches with empty sequences
    python benchmarks/paged.py --device cpu                     # tiny shapes
    python benchmarks/paged.py --device cpu --section gathered  # 8 x 4096 keys in both dtypes
    python benchmarks/paged.py --device cpu --section short     # short sequences in both dtypes

`dense` is `tatten.decode_attention`, with `kv_lens` where lengths differ; `lens` has them everywhere. `page 16` and the
others read pages of a pool in random order, K and V apart, by a block table. `fa3 16` and the others are
FlashAttention-3 on the same pages, from vLLM's wheel (benchmarks/support/peers.py), with the number of splits that it
chooses. On a CPU `gathered 16` and `gathered 64` are `index_select` of pages and SDPA with a mask of the lengths, as it
is written without tatten, and `inductor 16` is `gathered 16` compiled by Inductor. Section `short` has ragged lengths.

On a GPU each candidate is a captured CUDA graph of several calls, which cycle through block tables, and copies of K and
V, that the L2 cannot hold. Before it is timed, it is checked against float64 on some sequences. The candidates take
turns, and medians are shown in microseconds per call. The floor is each key and value and each entry of a table of
pages of 16 once, at the best rate of a plain read or copy in the same run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
import torch.nn.functional as F
from support import peers, results
from support.command_line import arguments, machine
from support.decode_cases import Shape, cpu_shapes, cuda_shapes, short_shapes, uniform
from support.errors import relative_error
from support.timing import as_graph, in_turns, microseconds, read_rate
from torch import Tensor

import tatten
from tatten.ops.reference import decode_attention_reference

PAGES = (16, 64, 256, 1)
ON_CPU = "gathered", "short"  # sections of a CPU alone, in bfloat16 and float32
GATHERED, SLOWER = (16, 64), 1.8  # the pages of `gathered`, and how much longer than the op it takes at least
MOST = {1: 1.10}  # times the dense op; other pages: 1.03
BESIDE_FA3 = {"nine": 1.0, "ragged": 0.95}  # times its time
Attend = Callable[[Tensor, int], Tensor]  # of queries, and the number of a copy


class Problem:
    """Queries, and copies of K and V: of each sequence `capacity` keys in order, or pages anywhere in all copies."""

    def __init__(self, shape: Shape, numbers: tuple[Tensor, Tensor]) -> None:
        self.shape, device = shape, numbers[0].device
        self.copies = shape.copies(device.type)
        self.numbers = [x[: self.copies * shape.size] for x in numbers]
        sizes = self.copies, shape.batch, shape.q_heads, 1, shape.head_dim
        self.q = torch.randn(sizes, device=device, dtype=numbers[0].dtype)
        self.lens = torch.tensor(shape.lengths, dtype=torch.int32, device=device)

    def in_order(self, copy: int) -> list[Tensor]:
        s = self.shape
        return [x.view(self.copies, s.batch, s.kv_heads, s.capacity, s.head_dim)[copy] for x in self.numbers]

    def pools(self, page: int) -> list[Tensor]:
        s = self.shape
        width = page * s.kv_heads * s.head_dim
        return [x[: len(x) // width * width].view(-1, page, s.kv_heads, s.head_dim) for x in self.numbers]

    def tables(self, page: int) -> Tensor:
        """Return int32 `[copies, batch, columns]`: pages in random order, each once; -1 beyond the lengths."""
        s = self.shape
        columns = -(-s.capacity // page)
        used = torch.arange(columns) * page < torch.tensor(s.lengths)[:, None]
        used = used.expand(self.copies, -1, -1)
        pages = torch.randperm(len(self.pools(page)[0]), generator=torch.Generator().manual_seed(0))
        tables = torch.full(used.shape, -1, dtype=torch.int32)
        tables[used] = pages[: int(used.sum())].int()
        return tables.to(self.q.device)


def candidates(p: Problem) -> dict[str, Attend]:
    """Return the functions that attend, by name."""
    s = p.shape
    ragged = {"kv_lens": p.lens} if set(s.lengths) != {s.capacity} else {}

    def paged(page: int) -> Attend:
        tables, pools = p.tables(page), p.pools(page)
        return lambda q, i: tatten.decode_attention(q, *pools, kv_lens=p.lens, block_table=tables[i])

    functions: dict[str, Attend] = {
        "dense": lambda q, i: tatten.decode_attention(q, *p.in_order(i), **ragged),
        "lens": lambda q, i: tatten.decode_attention(q, *p.in_order(i), kv_lens=p.lens),
        **{f"page {page}": paged(page) for page in PAGES},
    }
    if p.q.is_cuda and peers.fa3() is not None:
        functions |= {f"fa3 {page}": _fa3(p, page) for page in PAGES}
    if not p.q.is_cuda:
        functions |= {f"gathered {page}": _gathered(p, page) for page in GATHERED}
    if s.section == "short":
        functions["inductor 16"] = _gathered(p, 16, compiled=True)
    return functions


def _fa3(p: Problem, page: int) -> Attend:
    tables, (key, value), kernel = p.tables(page).clamp(min=0), p.pools(page), peers.fa3()
    starts = torch.arange(p.shape.batch + 1, device=p.q.device, dtype=torch.int32)

    def attend(q: Tensor, i: int) -> Tensor:
        options = {"seqused_k": p.lens, "block_table": tables[i]}
        return kernel(q.squeeze(2), key, value, starts, None, 1, max(p.shape.lengths), **options)[0].unsqueeze(2)

    return attend


def _gather_and_attend(query: Tensor, table: Tensor, pools: Sequence[Tensor], mask: Tensor) -> Tensor:
    gathered = (x.index_select(0, table.flatten()).view(len(table), -1, *x.shape[2:]).transpose(1, 2) for x in pools)
    return F.scaled_dot_product_attention(query, *gathered, attn_mask=mask, enable_gqa=True)


def _gathered(p: Problem, page: int, compiled: bool = False) -> Attend:
    tables, pools, attend = p.tables(page).clamp(min=0), p.pools(page), _gather_and_attend
    mask = torch.arange(tables.shape[2] * page) < p.lens[:, None, None, None]
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, dynamic=False)
    return lambda q, i: attend(q, tables[i], pools, mask)


def error(p: Problem, name: str, out: Tensor, copy: int) -> float:
    """Return the largest relative error of the first and the longest sequence; NaN if any number of all is."""
    if out.isnan().any():
        return math.nan
    errors = []
    for b in {0, p.shape.lengths.index(max(p.shape.lengths))}:
        at = slice(b, b + 1)
        if name in ("dense", "lens"):
            kv, table = [x[at] for x in p.in_order(copy)], {}
        else:
            page = int(name.split()[1])
            kv, table = p.pools(page), {"block_table": p.tables(page)[copy, at]}
        if table:  # a pool of the sequence's own: float64 of all would not fit
            entries = table["block_table"].clamp(min=0).long().flatten()
            kv = [x[entries] for x in kv]
            table = {"block_table": torch.arange(len(entries), device=out.device, dtype=torch.int32)[None]}
        want, _ = decode_attention_reference(p.q[copy, at], *kv, kv_lens=p.lens[at], **table)
        errors.append(relative_error(out[at].double(), want))
    return max(errors)


def measure(p: Problem, rounds: int) -> dict[str, float]:
    """Return the microseconds of each candidate; a RuntimeError names one that is wrong."""
    device, steps = p.q.device.type, {}
    most = (2 << 30 if p.q.is_cuda else 1 << 28) // p.shape.kv_bytes
    copies = [*range(p.copies)] * max(1, min(8 // p.copies, most))
    for name, attend in candidates(p).items():

        def step(attend: Attend = attend) -> list[Tensor]:
            return [attend(p.q[i], i) for i in copies]

        if p.q.is_cuda:
            attend(p.q[0], 0)
            torch.cuda.synchronize()
            step = as_graph(step)
        off = error(p, name, step()[0], 0)
        if not off < 1e-2:
            raise RuntimeError(f"{name} is wrong: relative error {off:.1e}, allowed 1e-2")
        steps[name] = step
    repeats = max(1, min(20, int(5e8 / (len(copies) * p.shape.kv_bytes)))) if p.q.is_cuda else 3
    return in_turns(steps, rounds, lambda _, step: microseconds(step, device, len(copies), repeats))


def bars(rows: list[dict]) -> dict[str, tuple[float, float]]:
    """Return the figures of pages that have a bound, each with its bound."""

    def largest(page: int, other: str, sections: tuple[str, ...] = ()) -> float:
        chosen = [row["us"] for row in rows if not sections or row["section"] in sections]
        return max((us[f"page {page}"] / us[other] for us in chosen if other in us), default=math.nan)

    figures = {
        f"largest ratio of pages of {page} to the dense op": (largest(page, "dense"), MOST.get(page, 1.03))
        for page in PAGES
    }
    for (section, bound), page in itertools.product(BESIDE_FA3.items(), PAGES):
        ratio = largest(page, f"fa3 {page}", (section,))
        if not math.isnan(ratio):
            figures[f"{section}: largest ratio of pages of {page} to FlashAttention-3 on them"] = ratio, bound
    return figures


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--section", nargs="*", default=["nine", "ragged"], choices=["nine", "ragged", "padded", *ON_CPU]
    )
    args = parser.parse_args()
    if args.device == "cuda" and (here := [x for x in args.section if x in ON_CPU]):
        parser.error(f"section {here[0]} is for --device cpu, got --device cuda")
    torch.manual_seed(0)
    device, rate = args.device, read_rate(args.device)
    print(f"{machine(device)}, reads {rate / 1e12:.3f} TB/s")
    all_shapes = (
        cuda_shapes() if device == "cuda" else [*cpu_shapes(), uniform("gathered", 8, 32, 8, 4096), *short_shapes()]
    )
    rows = []
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            sections = set(args.section) & ({*ON_CPU} if dtype == torch.float32 else {*args.section})
            shapes = [x for x in all_shapes if x.section in sections]
            most = max((x.size * x.copies(device) for x in shapes), default=0)
            numbers = tuple(torch.randn(most, device=device, dtype=dtype) for _ in "kv")
            for shape in shapes:
                us = measure(Problem(shape, numbers), args.rounds)
                entries = 4 * sum(-(-n // 16) for n in shape.lengths)
                us["floor"] = (shape.kv_bytes * dtype.itemsize // 2 + entries) / rate * 1e6
                rows.append({**asdict(shape), "dtype": str(dtype), "us": us})
                cells = "  ".join(f"{name} {x:.1f}" for name, x in us.items())
                print(f"{shape.batch:4} {shape.q_heads:3}/{shape.kv_heads:<3} {shape.name:>21}  {cells}", flush=True)
                if device == "cuda":
                    torch.cuda.empty_cache()
    figures = bars(rows) if device == "cuda" else {}
    for what, (figure, bound) in figures.items():
        print(f"  {what}: {figure:.3f}, at most {bound:.2f} is asked for: {'yes' if figure <= bound else 'NO'}")
    for row, page in itertools.product((x for x in rows if x["section"] == "gathered"), GATHERED):
        times = row["us"][f"gathered {page}"] / row["us"][f"page {page}"]
        line = f"index_select and SDPA, {row['dtype']}, pages of {page}: {times:.2f} times as long as the op"
        print(f"  {line}, at least {SLOWER:.2f} is asked for: {'yes' if times >= SLOWER else 'NO'}")
    if args.json:
        results.write(args.json, device, rows, bytes_per_second=rate, bars=figures)


if __name__ == "__main__":
    main()
