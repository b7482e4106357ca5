"""Decode attention to pages that sequences share, beside the same keys in dense segments; and the time to find them.

    python benchmarks/shared_pages.py --device cuda
    python benchmarks/shared_pages.py --device cpu            # small shapes
    python benchmarks/shared_pages.py --section ragged
    python benchmarks/shared_pages.py --section finding
    python benchmarks/shared_pages.py --section chunk

    shared      a prefix that all sequences share, and trees of two levels. `shared` reads block tables of sequences in
                shuffled order with `shared_pages`, found beforehand; `paged` reads the same without; `segments` is
                `tatten.bifurcated_attention` on dense copies, sequences in order. `find` is `tatten.shared_pages`,
                once for all layers
    ragged      the same with sequences that have 16 keys of their own or more, log-uniform. `segments` has room for the
                longest part, and a mask excludes the rest
    finding     `tatten.shared_pages` alone, for tables with a shared first half and for tables that share nothing; and
                attention to tables that share nothing, with `shared_pages` and without
    chunk       mixed batches: the first sequence has a chunk of queries, each of the others one. `shared` is
                `tatten.paged_attention` with `shared_pages`, and `paged` without. On a GPU also for tables that share
                nothing

On a GPU each candidate is a captured CUDA graph of several calls, which cycle through pages that the L2 cannot hold.
Before it is timed, it is checked against float64 on two sequences. The candidates take turns, and medians are shown in
microseconds per call. Ratios count a 32nd of the time to find the pages, as for 32 layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from support import results
from support.command_line import arguments, machine
from support.decode_cases import L2
from support.errors import relative_error
from support.timing import as_graph, in_turns, microseconds, read_rate
from torch import Tensor

import tatten
from tatten.ops.reference import decode_attention_reference

LAYERS = 32
MOST = {"shared": 1.10, "find": 20.0, "nothing shared": 3.0}  # ratio to segments; microseconds; microseconds more
Level = tuple[int, int]  # its rows, and the keys of each
Attend = Callable[[int], Tensor]  # of the number of a copy


@dataclass(frozen=True)
class Tree:
    """A tree of levels from coarse to fine; the last one has a row for each sequence."""

    q_heads: int
    kv_heads: int
    levels: tuple[Level, ...]
    page: int = 16
    head_dim: int = 128
    least: int | None = None  # keys of a sequence's own part, if lengths differ

    @property
    def batch(self) -> int:
        return self.levels[-1][0]

    @property
    def name(self) -> str:
        sizes = [str(keys) for _, keys in self.levels]
        if self.least is not None:
            sizes[-1] = f"{self.least} to {sizes[-1]}"
        levels = (f"{rows} x {size}" for (rows, _), size in zip(self.levels, sizes, strict=True))
        return f"{self.q_heads}/{self.kv_heads} " + ", ".join(levels)

    @property
    def pages(self) -> int:
        return sum(rows * -(-keys // self.page) for rows, keys in self.levels)

    @property
    def kv_bytes(self) -> int:
        return 4 * self.pages * self.page * self.kv_heads * self.head_dim


def prefix(batch: int, q_heads: int, kv_heads: int, shared: int, suffix: int, page: int = 16) -> Tree:
    return Tree(q_heads, kv_heads, ((1, shared), (batch, suffix)), page)


def trees(device: str) -> list[Tree]:
    if device == "cpu":
        return [prefix(16, 32, 8, 2048, 128), Tree(8, 2, ((1, 256), (3, 128), (12, 64)))]
    return [
        prefix(4, 32, 8, 4096, 256),
        prefix(16, 32, 8, 8192, 256),
        prefix(64, 32, 8, 32768, 256),
        prefix(256, 32, 8, 8192, 256),
        prefix(8, 32, 8, 65536, 256),
        prefix(32, 32, 8, 131072, 512),
        prefix(16, 64, 8, 32768, 1024),
        prefix(128, 20, 20, 10240, 256),
        prefix(64, 32, 32, 8192, 256),
        Tree(32, 8, ((1, 4096), (8, 1024), (64, 256))),
        Tree(32, 8, ((1, 1024), (16, 2048), (256, 256))),
        Tree(32, 8, ((4, 8192), (32, 512), (128, 128))),
    ]


def ragged_trees(device: str) -> list[Tree]:
    sizes = [(32, 8, 2048, 16, 512)]
    if device == "cuda":
        sizes = [(32, 8, 8192, 256, 512), (32, 8, 2048, 128, 4096), (32, 8, 8192, 64, 2048), (20, 20, 10240, 128, 512)]
    return [
        Tree(q_heads, kv_heads, ((1, keys), (batch, most)), least=16) for q_heads, kv_heads, keys, batch, most in sizes
    ]


def mixed_batches(device: str) -> list[tuple[Tree, int]]:
    """Return trees, each with the queries of a chunk."""
    if device == "cpu":
        return [(tree, 128) for tree in trees(device)]
    tables = [(batch, keys) for batch in (16, 64) for keys in (2048, 8192)]
    batches = [(prefix(batch, 32, 8, keys, 256), chunk) for batch, keys in tables for chunk in (512, 2048)]
    return batches + [(Tree(32, 8, ((batch, keys),)), 512) for batch, keys in tables]


class Problem:
    """Queries, pools, and for each of several copies a table of sequences in order and one in shuffled order."""

    def __init__(self, tree: Tree, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.tree, self.device = tree, device
        self.copies = -(-L2[device] // tree.kv_bytes)
        shape = self.copies * tree.pages, tree.page, tree.kv_heads, tree.head_dim
        self.pools = [torch.randn(shape, device=device, dtype=dtype) for _ in "kv"]
        self.q = torch.randn(tree.batch, tree.q_heads, 1, tree.head_dim, device=device, dtype=dtype)
        self.order = torch.randperm(tree.batch).to(device)
        pages = torch.randperm(shape[0]).view(self.copies, -1)
        splits = [rows * -(-keys // tree.page) for rows, keys in tree.levels]
        self.rows = [  # of each level: the pages of each row, for each copy
            x.view(self.copies, rows, -1).to(device)
            for x, (rows, _) in zip(pages.split(splits, dim=1), tree.levels, strict=True)
        ]
        each = torch.arange(tree.batch, device=device)
        columns = [x[:, each * x.shape[1] // tree.batch] for x in self.rows]
        self.in_order = torch.cat(columns, dim=2).int()
        self.tables = self.in_order[:, self.order].contiguous()
        self.lens = torch.full((tree.batch,), sum(keys for _, keys in tree.levels), device=device, dtype=torch.int32)
        if tree.least is not None:
            most = tree.levels[-1][1]
            suffix_lens = (tree.least * (most / tree.least) ** torch.rand(tree.batch, dtype=torch.float64)).int()
            self.lens += suffix_lens.to(device) - most

    def find(self, copy: int) -> tatten.SharedPages:
        sizes = {"n_pages": len(self.pools[0]), "page_size": self.tree.page}
        return tatten.shared_pages(self.tables[copy], self.lens, **sizes)

    def candidates(self) -> dict[str, Attend]:
        shared_pages = [self.find(i) for i in range(self.copies)]
        options = {"kv_lens": self.lens}
        shuffled = self.q[self.order]
        segments = [
            [
                [x[rows[i].flatten()].view(rows.shape[1], -1, *x.shape[2:]).transpose(1, 2) for rows in self.rows]
                for x in self.pools
            ]
            for i in range(self.copies)
        ]

        masks = {}
        if self.tree.least is not None:
            in_order = torch.empty_like(self.lens).index_copy(0, self.order, self.lens)
            before = sum(keys for _, keys in self.tree.levels[:-1])
            keys = torch.arange(self.tree.levels[-1][1], device=self.device)
            mask = (keys < (in_order - before)[:, None])[:, None, None]
            none = [None] * (len(self.rows) - 1)
            masks = {"attn_masks": [*none, mask], "block_masks": [*none, tatten.block_mask(mask)]}

        def shared(i: int) -> Tensor:
            return tatten.decode_attention(
                shuffled, *self.pools, block_table=self.tables[i], **options, shared_pages=shared_pages[i]
            )

        return {
            "shared": shared,
            "paged": lambda i: tatten.decode_attention(shuffled, *self.pools, block_table=self.tables[i], **options),
            "segments": lambda i: tatten.bifurcated_attention(self.q, *segments[i], **masks),
            "find": lambda i: self.find(i).data,
        }

    def error(self, name: str, out: Tensor) -> float:
        """Return the largest relative error of two sequences of copy 0."""
        if name == "segments":
            out = out[self.order]
        errors = []
        for b in (0, len(out) - 1):
            pools = [x[self.tables[0, b].long()] for x in self.pools]  # float64 of all would not fit
            table = torch.arange(len(pools[0]), device=out.device, dtype=torch.int32)[None]
            query = self.q[self.order[b : b + 1]]
            want, _ = decode_attention_reference(query, *pools, kv_lens=self.lens[b][None], block_table=table)
            errors.append(relative_error(out[b : b + 1].double(), want))
        return max(errors)


class MixedProblem(Problem):
    """The same tables, where the first sequence has `chunk` queries and each of the others one."""

    def __init__(self, tree: Tree, device: str, chunk: int) -> None:
        super().__init__(tree, device)
        first = torch.arange(tree.batch, device=device, dtype=torch.int32) + chunk
        self.starts = torch.cat((first[:1] - chunk, first))
        shape = chunk + tree.batch - 1, tree.q_heads, tree.head_dim
        self.tokens = torch.randn(shape, device=device, dtype=self.q.dtype)

    def candidates(self) -> dict[str, Attend]:
        shared = [self.find(i) for i in range(self.copies)]

        def attend(i: int, pages: tatten.SharedPages | None) -> Tensor:
            batch = self.tokens, *self.pools, self.tables[i], self.starts, self.lens
            return tatten.paged_attention(*batch, shared_pages=pages)

        return {
            "shared": lambda i: attend(i, shared[i]),
            "paged": lambda i: attend(i, None),
            "find": lambda i: self.find(i).data,
        }

    def error(self, name: str, out: Tensor) -> float:
        """Return the largest relative error of the last two sequences of copy 0."""
        query, rows = self.tokens[-2:, :, None], {"kv_lens": self.lens[-2:], "block_table": self.tables[0, -2:]}
        want, _ = decode_attention_reference(query, *self.pools, **rows)
        return relative_error(out[-2:, :, None].double(), want)


def measure(problem: Problem, rounds: int, names: tuple[str, ...] = ()) -> dict[str, float]:
    """Return the microseconds of each candidate; a RuntimeError names one that is wrong."""
    steps, copies = {}, [*range(problem.copies)]
    for name, attend in problem.candidates().items():
        if names and name not in names:
            continue

        def step(attend: Attend = attend) -> list[Tensor]:
            return [attend(i) for i in copies]

        if problem.device == "cuda":
            attend(0)
            torch.cuda.synchronize()
            step = as_graph(step)
        if name != "find" and not (off := problem.error(name, step()[0])) < 1e-2:
            raise RuntimeError(f"{name} is wrong: relative error {off:.1e}, allowed 1e-2")
        steps[name] = step
    repeats = 5 if problem.device == "cuda" else 1
    return in_turns(steps, rounds, lambda _, step: microseconds(step, problem.device, len(copies), repeats))


def measure_trees(device: str, rounds: int) -> list[dict]:
    """Measure decode steps of each tree."""
    return [measure_row("shared", tree, Problem(tree, device), "segments", rounds) for tree in trees(device)]


def measure_ragged(device: str, rounds: int) -> list[dict]:
    """Measure decode steps of sequences whose own parts differ in length."""
    return [measure_row("ragged", tree, Problem(tree, device), "segments", rounds) for tree in ragged_trees(device)]


def measure_chunks(device: str, rounds: int) -> list[dict]:
    """Measure mixed batches."""
    return [
        measure_row("chunk", tree, MixedProblem(tree, device, chunk), "paged", rounds, chunk=chunk)
        for tree, chunk in mixed_batches(device)
    ]


def measure_row(section: str, tree: Tree, problem: Problem, peer: str, rounds: int, **given: int) -> dict:
    us = measure(problem, rounds)
    ratio = (us["shared"] + us["find"] / LAYERS) / us[peer]
    name = ", ".join([tree.name, *(f"{what} {n}" for what, n in given.items())])
    cells = "  ".join(f"{name} {x:.1f}" for name, x in us.items())
    print(f"{section:>6}  {name:>45}  {cells}  {ratio:.3f} of {peer}", flush=True)
    device = problem.device
    del problem
    if device == "cuda":
        torch.cuda.empty_cache()
    return {"section": section, "name": name, **asdict(tree), **given, "us": us, "ratio": ratio}


def measure_finding(device: str, rounds: int) -> list[dict]:
    """Measure sequences of `columns` pages each, of which all share the first half, or none."""
    sizes = [(32, 512), (256, 64), (256, 512), (1024, 512)] if device == "cuda" else [(8, 16)]
    rows = []
    for batch, columns in sizes:
        keys = 16 * columns
        for kind, levels in (
            ("half shared", ((1, keys // 2), (batch, keys // 2))),
            ("nothing shared", ((batch, keys),)),
        ):
            problem = Problem(Tree(8, 1, levels), device)
            us = measure(problem, rounds, ("shared", "paged", "find"))
            rows.append({"section": "finding", "name": kind, "batch": batch, "columns": columns, "us": us})
            cells = "  ".join(f"{name} {x:.1f}" for name, x in us.items())
            print(f"{batch:5} x {columns:4} {kind:>15}  {cells}", flush=True)
            del problem
    return rows


def bars(rows: list[dict]) -> dict[str, tuple[float, float]]:
    """Return the figures of shared pages that have a bound, each with its bound."""
    figures = {}
    if ratios := [row["ratio"] for row in rows if row["section"] == "shared"]:
        figures["largest ratio of shared pages to segments"] = max(ratios), MOST["shared"]
    at_256 = [r for r in rows if r["section"] == "finding" and (r["batch"], r["columns"]) == (256, 512)]
    if at_256:
        figures["microseconds to find, 256 x 512"] = max(r["us"]["find"] for r in at_256), MOST["find"]
        more = [r["us"]["shared"] - r["us"]["paged"] for r in at_256 if r["name"] == "nothing shared"]
        figures["microseconds more where nothing is shared"] = max(more), MOST["nothing shared"]
    return figures


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    sections = ["shared", "ragged", "finding", "chunk"]
    parser.add_argument("--section", nargs="*", choices=sections)
    args = parser.parse_args()
    if args.section is None:
        args.section = sections
    torch.manual_seed(0)
    rate = read_rate(args.device)
    print(f"{machine(args.device)}, reads {rate / 1e12:.3f} TB/s")
    rows = []
    with torch.no_grad():
        if "shared" in args.section:
            rows += measure_trees(args.device, args.rounds)
        if "ragged" in args.section:
            rows += measure_ragged(args.device, args.rounds)
        if "finding" in args.section:
            rows += measure_finding(args.device, args.rounds)
        if "chunk" in args.section:
            rows += measure_chunks(args.device, args.rounds)
    figures = bars(rows)
    for what, (figure, bound) in figures.items():
        verdict = f", at most {bound:.2f} is asked for: {'yes' if figure <= bound else 'NO'}" * (args.device == "cuda")
        print(f"  {what}: {figure:.3f}{verdict}")
    if args.json:
        results.write(args.json, args.device, rows, bytes_per_second=rate, bars=figures)


if __name__ == "__main__":
    main()
