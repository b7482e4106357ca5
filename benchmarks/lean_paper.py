"""Figures 7 and 9 of Lean Attention (arXiv 2405.10480): decode attention over context, heads and batch, as ratios.

    python benchmarks/lean_paper.py --device cuda                 # about two minutes
    python benchmarks/lean_paper.py --device cuda --figures 7a 9
    python benchmarks/lean_paper.py --device cpu                  # tiny shapes, to try the code

One query for each sequence, multi-head, side by side on the same random data:

    fa2    FlashAttention-2 without splits: PyTorch's `_flash_attention_forward` with `cum_seq_q`, which never splits
           where there is one query head per kv head. The sequences are handed in as heads of a single one
    fixed  FlashDecoding: PyTorch's `_scaled_dot_product_flash_attention`, which picks its splits as flash-attn does
    lean   tatten.decode_attention, provider "triton"

The paper measured an A100 with 108 SMs. It names 56 heads for figure 7a; what its text leaves open is set to fit its
figures: 56 heads in figure 9, one sequence in 7a, 7b and 9, 32 heads and 64k keys in 7c. Its averages are over "500
samples" of heads, contexts and batches; here they are over figure 7 and `grid`, and a mean of ratios depends on such
a choice.

On a GPU each is a captured CUDA graph that cycles through more copies of the inputs than fit into the L2 cache. The
floor is each key and value once at the best rate of a plain read or copy in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
from support import results
from support.command_line import arguments, machine
from support.errors import relative_error
from support.timing import as_graph, in_turns, read_rate, seconds
from torch import Tensor

import tatten

BASELINES = ("fa2", "fixed")
ROTATE = {"cuda": 512 << 20, "cpu": 0}  # bytes of other copies read before a copy of the inputs is read again


@dataclass(frozen=True)
class Shape:
    """Multi-head attention of one query for each sequence of `context` keys."""

    heads: int
    context: int
    batch: int = 1
    head_dim: int = 64

    @property
    def size(self) -> int:
        """Elements of the keys, and of the values."""
        return self.batch * self.heads * self.context * self.head_dim

    def __str__(self) -> str:
        return f"{self.heads:5} {self.context:7} {self.batch:5} {self.head_dim:8}"


CONTEXTS = [1024 << i for i in range(10)]
HEADS = range(8, 65, 8)
FIGURES = {
    "7a": [Shape(56, context) for context in CONTEXTS],
    "7b": [Shape(heads, 65536) for heads in HEADS],
    "7c": [Shape(32, 65536, batch) for batch in (1, 2, 4, 8, 16, 32)],
    "9": [Shape(56, context, head_dim=128) for context in CONTEXTS],
    "grid": [
        Shape(heads, context, batch)
        for batch in (1, 2, 4, 8)
        for heads in HEADS
        for context in (1024, 4096, 16384, 65536, 262144, 524288)
    ],
}
CPU_FIGURES = {
    "7a": [Shape(4, context) for context in (256, 1024)],
    "7b": [Shape(heads, 1000) for heads in (1, 3)],
    "7c": [Shape(4, 512, batch) for batch in (1, 2)],
    "9": [Shape(2, 512, head_dim=128)],
    "grid": [Shape(heads, context, 2) for heads in (1, 2) for context in (256, 512)],
}
CLAIMS = [  # of the paper's text: the speedup of lean
    (Shape(56, 524288), "fa2", 2.46),
    (Shape(56, 524288), "fixed", 2.46 / 2.06),
    (Shape(8, 65536), "fa2", 12.5),
    (Shape(64, 65536), "fa2", 2.15),
    (Shape(32, 65536), "fa2", 4.71),
    (Shape(32, 65536), "fixed", 1.06),
    (Shape(32, 65536, 32), "fa2", 1.5),
    (Shape(32, 65536, 32), "fixed", 1.5),
    (Shape(16, 524288), "fa2", 8.33),
    (Shape(24, 1024), "fa2", 1.1),
    (Shape(24, 524288), "fixed", 1.71),
    (Shape(24, 1024), "fixed", 0.99),
    (Shape(56, 524288, head_dim=128), "fa2", 3.67),
    (Shape(56, 1024, head_dim=128), "fa2", 1.2),
]
HEADER = "heads context batch head_dim |   fa2 us  fixed us   lean us  floor us | over fa2 over fixed over floor"
AVERAGES = {"fa2": 2.6, "fixed": 1.27}


@lru_cache
def cumulative_ends(length: int, device: torch.device) -> Tensor:
    """Return `cum_seq` of one sequence; cached, so that no captured graph creates it."""
    return torch.tensor((0, length), dtype=torch.int32, device=device)


def unsplit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by FlashAttention-2 with one program for each head of each sequence; `q` `[batch, heads, 1, head_dim]`."""
    if not q.is_cuda:
        return fixed_split(q, k, v)
    query, key, value = (x.flatten(0, 1).transpose(0, 1) for x in (q, k, v))
    keys = k.shape[2]
    flash = torch.ops.aten._flash_attention_forward.default
    bounds = cumulative_ends(1, q.device), cumulative_ends(keys, q.device)
    out = flash(query, key, value, *bounds, 1, keys, 0.0, False, False)[0]
    return out.view_as(q)


def fixed_split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    suffix = "" if q.is_cuda else "_for_cpu"
    return getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{suffix}").default(q, k, v)[0]


class Pool:
    """Random keys and values, of which each shape takes its copies."""

    def __init__(self, size: int, args: argparse.Namespace):
        self.args = args
        torch.manual_seed(0)
        self.keys, self.values = (torch.randn(size, device=args.device, dtype=torch.bfloat16) for _ in range(2))

    def copies(self, shape: Shape) -> list[tuple[Tensor, Tensor, Tensor]]:
        count = min(self.keys.numel() // shape.size, 1 + ROTATE[self.args.device] // (4 * shape.size))
        q = torch.randn(shape.batch, shape.heads, 1, shape.head_dim, device=self.args.device, dtype=torch.bfloat16)
        slices = [slice(i * shape.size, (i + 1) * shape.size) for i in range(count)]
        sizes = (shape.batch, shape.heads, shape.context, shape.head_dim)
        return [(q, self.keys[part].view(sizes), self.values[part].view(sizes)) for part in slices]


def over(inputs: list[tuple[Tensor, Tensor, Tensor]], fn: Callable[..., Tensor]) -> Callable[[], Tensor]:
    """Return a function that calls `fn` with each of the inputs and returns the last result."""

    def step() -> Tensor:
        for each in inputs:
            out = fn(*each)
        return out

    return step


def measure(shape: Shape, pool: Pool, rate: float, args: argparse.Namespace) -> dict[str, float]:
    def lean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tatten.decode_attention(q, k, v, provider=args.provider)

    inputs = pool.copies(shape)
    steps = {name: over(inputs, fn) for name, fn in (("fa2", unsplit), ("fixed", fixed_split), ("lean", lean))}
    for name, step in steps.items():
        step()
        if args.device == "cuda":
            steps[name] = as_graph(step)
    exact = steps["fixed"]().float()
    errors = {name: relative_error(step().float(), exact) for name, step in steps.items()}
    assert max(errors.values()) < 2e-2, (shape, errors)
    repeats = {name: max(1, int(1e-3 / seconds(step, args.device))) for name, step in steps.items()}

    def microseconds(name: str, step: Callable[[], Tensor]) -> float:
        return seconds(step, args.device, repeats[name]) / len(inputs) * 1e6

    median = in_turns(steps, args.rounds, microseconds)
    return {
        **asdict(shape),
        "copies": len(inputs),
        **{f"{name}_us": x for name, x in median.items()},
        "floor_us": 4 * shape.size / rate * 1e6,
        **{f"over_{name}": median[name] / median["lean"] for name in BASELINES},
    }


def show_kernels(pool: Pool, args: argparse.Namespace) -> None:
    """Show the kernels that the baselines launch: `flash_fwd_splitkv_*` is split, `flash_fwd_kernel` is not."""
    for shape in (Shape(8, 65536), Shape(8, 65536, head_dim=128), Shape(64, 65536)):
        for fn in (unsplit, fixed_split):
            inputs = pool.copies(shape)[0]
            fn(*inputs)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                fn(*inputs)
                torch.cuda.synchronize()
            names = [event.key[:90] for event in profile.key_averages() if "flash" in event.key]
            print(f"{shape} {fn.__name__}: {names}")


def summary(rows: dict[Shape, dict[str, float]], figures: dict[str, list[Shape]], chosen: list[str]) -> None:
    heads = "".join(f" | over {name:5}  mean   geo.   min    max" for name in BASELINES)
    print(f"\naverages              shapes{heads}")
    parts = {name: figures[name] for name in chosen}
    paper = [shape for name in chosen for shape in figures[name] if shape.head_dim == 64]
    for name, shapes in {**parts, "all with head_dim 64": paper}.items():
        measured = [rows[shape] for shape in dict.fromkeys(shapes) if shape in rows]
        if not measured:
            continue
        line = f"{name:20} {len(measured):7}"
        for baseline in BASELINES:
            x = [row[f"over_{baseline}"] for row in measured]
            mean, geometric = statistics.mean(x), statistics.geometric_mean(x)
            line += f" | {mean:16.2f} {geometric:6.2f} {min(x):5.2f} {max(x):6.2f}"
        print(line)
    print(f"the paper's average, on an A100: {AVERAGES['fa2']} over fa2 and {AVERAGES['fixed']} over fixed")
    claims = [(shape, name, value) for shape, name, value in CLAIMS if shape in rows]
    if claims:
        print("\nheads context batch head_dim  over   paper    here")
    for shape, name, value in claims:
        print(f"{shape}  {name:5} {value:6.2f} {rows[shape][f'over_{name}']:7.2f}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--figures", nargs="*", choices=list(FIGURES), default=list(FIGURES))
    parser.add_argument("--provider", help="of tatten.decode_attention; default: triton, on a CPU cpu")
    parser.add_argument("--kv-gib", type=float, default=16, help="leave out shapes whose keys and values take more")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kernels", action="store_true", help="print what the baselines launch, and stop")
    args = parser.parse_args()

    start = time.perf_counter()
    cuda = args.device == "cuda"
    args.provider = args.provider or ("triton" if cuda else "cpu")
    figures = FIGURES if cuda else CPU_FIGURES
    shapes = [shape for name in args.figures for shape in figures[name] if 4 * shape.size <= args.kv_gib * 2**30]
    rate = read_rate(args.device)
    print(f"{machine(args.device)}, {rate / 1e9:.0f} GB/s; lean is provider {args.provider}")
    pool = Pool(max(*(shape.size for shape in shapes), ROTATE[args.device] // 4), args)
    if args.kernels:
        show_kernels(pool, args)
        return
    rows: dict[Shape, dict[str, float]] = {}
    with torch.no_grad():
        for name in args.figures:
            print(f"\nfigure {name}" if name != "grid" else "\ngrid")
            print(HEADER)
            for shape in figures[name]:
                if shape not in shapes:
                    continue
                r = rows[shape] = rows.get(shape) or measure(shape, pool, rate, args)
                times = " ".join(f"{r[f'{column}_us']:9.1f}" for column in (*BASELINES, "lean", "floor"))
                ratios = f"{r['over_fa2']:8.2f}x {r['over_fixed']:9.2f}x {r['lean_us'] / r['floor_us']:9.2f}x"
                print(f"{shape} |{times} |{ratios}", flush=True)
    summary(rows, figures, args.figures)
    print(f"{time.perf_counter() - start:.0f} s")
    if args.json:
        json_rows = [
            {"figures": [name for name in args.figures if shape in figures[name]], **r} for shape, r in rows.items()
        ]
        results.write(args.json, args.device, json_rows, bytes_per_second=rate)


if __name__ == "__main__":
    main()
