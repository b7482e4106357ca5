"""Mixed batches over keys in pages: decode steps, speculative steps and chunks of prefills, beside FlashAttention-3.

    python benchmarks/mixed.py --device cuda
    python benchmarks/mixed.py --device cpu                     # tiny shapes

`tatten` is `tatten.paged_attention`, and `fa3` FlashAttention-3's variable-length call on the same pages, from vLLM's
wheel (benchmarks/support/peers.py). Both make their list of tiles in each call. On a CPU `gathered` is a loop over the
sequences that copies the pages of each and calls SDPA with a causal mask, as it is written without tatten.

On a GPU each candidate is a captured CUDA graph of several calls, which cycle through block tables and queries that the
L2 cannot hold. Before it is timed, some tokens are checked against float64. The candidates take turns, and medians are
shown in microseconds per call. The floor is the larger one of two: each key, value, query and output once at the best
rate of a plain read or copy, and the products at the rate of a large matrix product, both in the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from support import peers, results
from support.command_line import arguments, machine
from support.decode_cases import L2
from support.errors import relative_error
from support.timing import as_graph, in_turns, microseconds, product_rate, read_rate
from torch import Tensor

import tatten
from tatten.ops.reference import paged_attention_reference

MOST = 1.05  # times FlashAttention-3
CHECKED = 3  # tokens of a sequence
Attend = Callable[[Tensor, int], Tensor]  # of queries, and the number of a copy


@dataclass(frozen=True)
class Mixed:
    """Sequences with these numbers of queries, after `pasts` keys."""

    name: str
    q_lens: tuple[int, ...]
    pasts: tuple[int, ...]
    page: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(q + past for q, past in zip(self.q_lens, self.pasts, strict=True))

    @property
    def tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def columns(self) -> int:
        return -(-max(self.lengths) // self.page)

    @property
    def n_pages(self) -> int:
        """The pages of one copy."""
        return sum(-(-n // self.page) for n in self.lengths)

    @property
    def kv_bytes(self) -> int:
        return 4 * sum(self.lengths) * self.kv_heads * self.head_dim

    @property
    def moved_bytes(self) -> int:
        """The bytes of keys, values, queries and outputs."""
        return self.kv_bytes + 4 * self.tokens * self.q_heads * self.head_dim

    @property
    def flops(self) -> int:
        seen = sum(q * past + q * (q + 1) // 2 for q, past in zip(self.q_lens, self.pasts, strict=True))
        return 4 * seen * self.q_heads * self.head_dim

    def copies(self, device: str) -> int:
        return max(2, -(-L2[device] // self.kv_bytes))


def shapes(device: str) -> list[Mixed]:
    if device == "cpu":
        few = {"q_heads": 8, "kv_heads": 2, "head_dim": 64}
        return [
            Mixed("3 decodes and a chunk", (1, 1, 1, 128), (512, 512, 100, 512), 16, **few),
            Mixed("2 chunks", (64, 64), (256, 256), 16, **few),
            Mixed("4 x 5 queries", (5,) * 4, (256,) * 4, 16, **few),
        ]
    asked_for = (
        ("31 decodes and a chunk", (*(1,) * 31, 2048), (*(8191,) * 31, 8192)),
        ("8 chunks", (512,) * 8, (4096,) * 8),
        ("64 x 5 queries", (5,) * 64, (4096,) * 64),
    )
    small = (
        ("16 decodes, short chunk", (*(1,) * 16, 512), (*(2047,) * 16, 2048)),
        ("a chunk", (512,), (8192,)),
        ("5 queries", (5,), (8192,)),
        ("4 x 5 queries", (5,) * 4, (8192,) * 4),
    )
    return [
        Mixed(name, q_lens, pasts, page)
        for page, rows in ((16, asked_for + small), (64, asked_for), (256, asked_for))
        for name, q_lens, pasts in rows
    ]


class Problem:
    """Queries and block tables of several copies, over one pool."""

    def __init__(self, shape: Mixed, device: str) -> None:
        self.shape, self.copies = shape, shape.copies(device)
        s = shape
        pool = self.copies * s.n_pages, s.page, s.kv_heads, s.head_dim
        self.key, self.value = (torch.randn(pool, device=device, dtype=torch.bfloat16) for _ in "kv")
        self.q = torch.randn(self.copies, s.tokens, s.q_heads, s.head_dim, device=device, dtype=torch.bfloat16)
        self.starts = torch.tensor([0, *s.q_lens], device=device).cumsum(0).int()
        self.lens = torch.tensor(s.lengths, dtype=torch.int32, device=device)
        self.tables = self._tables().to(device)

    def _tables(self) -> Tensor:
        """Return int32 `[copies, batch, columns]`: pages in random order, each once; -1 beyond the lengths."""
        s = self.shape
        used = torch.arange(s.columns) * s.page < torch.tensor(s.lengths)[:, None]
        used = used.expand(self.copies, -1, -1)
        tables = torch.full(used.shape, -1, dtype=torch.int32)
        tables[used] = torch.randperm(len(self.key), generator=torch.Generator().manual_seed(0)).int()
        return tables


def candidates(p: Problem) -> dict[str, Attend]:
    """Return the functions that attend, by name."""
    functions: dict[str, Attend] = {
        "tatten": lambda q, i: tatten.paged_attention(q, p.key, p.value, p.tables[i], p.starts, p.lens)
    }
    fa3 = peers.fa3()
    if p.q.is_cuda and fa3 is not None:
        most_q, most_k = max(p.shape.q_lens), max(p.shape.lengths)
        tables = p.tables.clamp(min=0)

        def flash(q: Tensor, i: int) -> Tensor:
            options = {"seqused_k": p.lens, "block_table": tables[i], "causal": True}
            return fa3(q, p.key, p.value, p.starts, None, most_q, most_k, **options)[0]

        functions["fa3"] = flash
    if not p.q.is_cuda:
        tables = p.tables.clamp(min=0)
        functions["gathered"] = lambda q, i: _gathered(p, q, tables[i])
    return functions


def _gathered(p: Problem, q: Tensor, table: Tensor) -> Tensor:
    outs, starts = [], p.starts.tolist()
    for b, (n, start, stop) in enumerate(zip(p.shape.lengths, starts, starts[1:], strict=False)):
        key, value = (x.index_select(0, table[b]).flatten(0, 1)[:n].transpose(0, 1)[None] for x in (p.key, p.value))
        queries = q[start:stop].transpose(0, 1)[None]
        causal = torch.ones(stop - start, n, dtype=torch.bool).tril(n - (stop - start))
        outs.append(
            F.scaled_dot_product_attention(queries, key, value, attn_mask=causal, enable_gqa=True)[0].transpose(0, 1)
        )
    return torch.cat(outs)


def error(p: Problem, out: Tensor, copy: int) -> float:
    """Return the largest relative error of the last tokens of two sequences; NaN if any number of all is."""
    if out.isnan().any():
        return math.nan
    errors, starts = [], p.starts.tolist()
    for b in (0, len(p.shape.q_lens) - 1):
        stop = starts[b + 1]
        n = min(CHECKED, p.shape.q_lens[b])
        entries = p.tables[copy, b].clamp(min=0).long()  # a pool of the sequence's own: float64 of all would not fit
        table = torch.arange(len(entries), device=out.device, dtype=torch.int32)[None]
        bounds = {"cu_seqlens_q": torch.tensor([0, n], device=out.device).int(), "kv_lens": p.lens[b : b + 1]}
        query, pools = p.q[copy, stop - n : stop], (p.key[entries], p.value[entries])
        want, _ = paged_attention_reference(query, *pools, table, **bounds)
        errors.append(relative_error(out[stop - n : stop].double(), want))
    return max(errors)


def measure(p: Problem, rounds: int) -> dict[str, float]:
    """Return the microseconds of each candidate; a RuntimeError names one that is wrong."""
    device, steps = p.q.device.type, {}
    for name, attend in candidates(p).items():

        def step(attend: Attend = attend) -> list[Tensor]:
            return [attend(p.q[i], i) for i in range(p.copies)]

        if p.q.is_cuda:
            attend(p.q[0], 0)
            torch.cuda.synchronize()
            step = as_graph(step)
        off = error(p, step()[0], 0)
        if not off < 2e-2:
            raise RuntimeError(f"{name} is wrong: relative error {off:.1e}, allowed 2e-2")
        steps[name] = step
    return in_turns(steps, rounds, lambda _, step: microseconds(step, device, p.copies, 5 if p.q.is_cuda else 1))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = args.device
    rate, products = read_rate(device), product_rate(device, torch.bfloat16)
    print(f"{machine(device)}, reads {rate / 1e12:.3f} TB/s, products {products / 1e12:.1f} TFLOPS")
    rows = []
    with torch.no_grad():
        for shape in shapes(device):
            us = measure(Problem(shape, device), args.rounds)
            us["floor"] = max(shape.moved_bytes / rate, shape.flops / products) * 1e6
            rows.append({**asdict(shape), "us": us})
            cells = "  ".join(f"{name} {x:.1f}" for name, x in us.items())
            print(f"{shape.name:>23}  page {shape.page:<3}  {cells}", flush=True)
            if device == "cuda":
                torch.cuda.empty_cache()
    bars = {}
    if all("fa3" in row["us"] for row in rows):
        bars["largest ratio to FlashAttention-3"] = max(row["us"]["tatten"] / row["us"]["fa3"] for row in rows), MOST
    for what, (figure, bound) in bars.items():
        print(f"  {what}: {figure:.3f}, at most {bound:.2f} is asked for: {'yes' if figure <= bound else 'NO'}")
    if args.json:
        results.write(args.json, device, rows, bytes_per_second=rate, flops_per_second=products, bars=bars)


if __name__ == "__main__":
    main()
