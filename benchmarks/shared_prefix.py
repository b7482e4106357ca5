"""One step of attention to a prefix that the whole batch shares, and to suffixes of each sequence's own.

    python benchmarks/shared_prefix.py --device cpu        # the bars, then a grid of small and middle work
    python benchmarks/shared_prefix.py --device cuda       # large shapes; also FlashInfer, where installed

Side by side in one run, on random data:

    expanded  F.scaled_dot_product_attention on a KV in which each sequence has its own copy of the prefix
    inductor  the graph of a shared-prefix cache, `sdpa(q, cat([prefix.expand(batch), suffix]))`, through Inductor
    tatten    the same graph through backend="tatten"
    op        tatten.bifurcated_attention itself
    aten      prefix, suffix and merge from PyTorch's flash attention, which returns the lse (GPU)
    flash     the prefix from PyTorch's flash attention, the suffix from cuDNN, and a compiled merge (GPU)
    fa3       the same with the prefix from FlashAttention-3 (GPU, where `peers.py` finds it)
    paged     FlashAttention-3 over pages of which sequences share those of the prefix (GPU, likewise)
    cascade   flashinfer.MultiLevelCascadeAttentionWrapper (GPU)

On a GPU each is a captured CUDA graph. All are held to float32 on the first and the last sequence. The floor is each
key and value once at the bandwidth of a plain read, or the products at the rate of a large matrix product, whichever
takes longer; both rates are measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import peers
import torch
import torch.nn.functional as F
from timing import as_graph, seconds
from torch import Tensor

import tatten
from tatten.ops.layout import pack_gqa
from tatten.passes import cost
from tatten.passes.cost import Rates

COLUMNS = {"cpu": ("expanded", "inductor", "tatten", "op")}
COLUMNS["cuda"] = (*COLUMNS["cpu"], "aten", "flash", "fa3", "paged", "cascade")
COMPOSITIONS = "aten", "flash", "fa3"
PLAIN = "expanded", "paged"
MAX_EXPANDED = 60e9  # bytes of KV


@dataclass(frozen=True)
class Row:
    """A shape; head_dim is 128."""

    batch: int
    q_heads: int
    kv_heads: int
    prefix: int
    suffix: int
    dtype: str = "bfloat16"
    head_dim: int = 128


def cpu_rows() -> list[Row]:
    dtypes, heads = ("float32", "bfloat16"), ((8, 2), (8, 8), (32, 8), (32, 32))
    bars = [Row(b, *h, 4096, 64, dtype) for dtype in dtypes for b in (16, 64) for h in heads]
    grid = [
        Row(b, 16, kv, p, s, dtype)
        for dtype in dtypes
        for kv in (4, 16)
        for b in (1, 2, 8, 32)
        for p in (64, 512, 4096)
        for s in (16, 256)
    ]
    return bars + grid


def small_rows() -> list[Row]:
    """Where bifurcation may not pay."""
    return [Row(b, 16, kv, p, s) for kv in (4, 16) for b in (2, 4, 8) for p in (64, 256, 1024) for s in (16, 64)]


def cuda_rows() -> list[Row]:
    shapes = [
        (4, 32, 8, 4096, 256),
        (16, 32, 8, 8192, 256),
        (64, 32, 8, 32768, 256),
        (256, 32, 8, 8192, 256),
        (8, 32, 8, 65536, 256),
        (32, 32, 8, 131072, 512),
        (16, 64, 8, 32768, 1024),
        (128, 20, 20, 10240, 256),
        (64, 32, 32, 8192, 256),
    ]
    return [Row(*shape) for shape in shapes]


def attention(q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a shared-prefix cache hands to SDPA."""
    keys = torch.cat([prefix_k.expand(q.shape[0], -1, -1, -1), k], dim=2)
    values = torch.cat([prefix_v.expand(q.shape[0], -1, -1, -1), v], dim=2)
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def merge(prefix_out: Tensor, prefix_lse: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Two states with their heads in rows of any shape, prefix `[batch, ..., d]`, to `[batch, q_heads, 1, d]`."""
    share = torch.sigmoid(prefix_lse - lse.reshape(prefix_lse.shape)).unsqueeze(-1)
    merged = prefix_out.float() * share + out.reshape(prefix_out.shape).float() * (1 - share)
    return merged.to(out.dtype).reshape(out.shape[0], -1, 1, out.shape[-1])


def flash_prefix(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The state `[batch, kv_heads, group, d]` of all queries over the prefix."""
    batch, _, _, head_dim = q.shape
    kv_heads = k.shape[1]
    rows = q.view(batch, kv_heads, -1, head_dim).transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
    out, lse = peers.flash_state(rows, k, v)
    return out.view(kv_heads, batch, -1, head_dim).transpose(0, 1), lse.view(kv_heads, batch, -1).transpose(0, 1)


def aten_flash(q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The composition that anyone can write: fold, two flash kernels, a merge."""
    return merge(*flash_prefix(q, prefix_k, prefix_v), *peers.flash_state(pack_gqa(q, k.shape[1]), k, v))


def flash_cudnn(q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merge(*flash_prefix(q, prefix_k, prefix_v), *peers.cudnn_state(q, k, v))


def fa3_cudnn(
    row: Row, q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor
) -> Callable[[], Tensor] | None:
    """FlashAttention-3 on the prefix, where the sequences are the tokens of one query; None where it is not there."""
    kernel = peers.fa3()
    if kernel is None:
        return None
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=q.device) for n in (row.batch, row.prefix))
    keys, values = prefix_k[0].transpose(0, 1), prefix_v[0].transpose(0, 1)
    merged = compiled(merge, "inductor")

    def attention() -> Tensor:
        out, lse = kernel(q.squeeze(2), keys, values, cu_q, cu_k, row.batch, row.prefix)
        return merged(out, lse.t(), *peers.cudnn_state(q, k, v))

    return attention


def shared_pages(row: Row, prefix: Tensor, own: Tensor) -> Tensor:
    """`[pages, PAGE, kv_heads, d]`: those of the prefix, then those of each sequence's suffix."""
    return torch.cat([x.transpose(1, 2).reshape(-1, peers.PAGE, row.kv_heads, row.head_dim) for x in (prefix, own)])


def paged(row: Row, q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor] | None:
    """FlashAttention-3 over pages, of which each sequence names those of the prefix; None where it is not there."""
    kernel = peers.fa3()
    if kernel is None:
        return None
    keys, values = shared_pages(row, prefix_k, k), shared_pages(row, prefix_v, v)
    n_prefix, length = row.prefix // peers.PAGE, row.prefix + row.suffix
    pages = torch.arange(len(keys), dtype=torch.int32, device=q.device)
    table = torch.cat([pages[:n_prefix].expand(row.batch, -1), pages[n_prefix:].view(row.batch, -1)], 1)
    cu_q = torch.arange(row.batch + 1, dtype=torch.int32, device=q.device)
    used = torch.full((row.batch,), length, dtype=torch.int32, device=q.device)
    given = {"seqused_k": used, "block_table": table}
    return lambda: kernel(q.squeeze(2), keys, values, cu_q, None, 1, length, **given)[0].unsqueeze(2)


def cascade(
    row: Row, q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor
) -> Callable[[], Tensor] | None:
    """FlashInfer's two-level cascade on pages, planned beforehand; None where it is not installed."""
    try:
        import flashinfer
    except ImportError:
        return None
    page = peers.PAGE
    n_prefix, n_suffix = row.prefix // page, row.suffix // page
    pages = torch.stack((shared_pages(row, prefix_k, k), shared_pages(row, prefix_v, v)), dim=1)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=q.device)

    steps = torch.arange(row.batch + 1, dtype=torch.int32, device=q.device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, torch.empty(256 << 20, dtype=torch.uint8, device=q.device), "NHD"
    )
    wrapper.plan(
        [ints(0, row.batch), steps],
        [ints(0, n_prefix), steps * n_suffix],
        [
            torch.arange(n_prefix, dtype=torch.int32, device=q.device),
            n_prefix + torch.arange(row.batch * n_suffix, dtype=torch.int32, device=q.device),
        ],
        [ints(page), torch.full((row.batch,), page, dtype=torch.int32, device=q.device)],
        row.q_heads,
        row.kv_heads,
        row.head_dim,
        page,
        q_data_type=q.dtype,
    )
    flat = q.squeeze(2)
    return lambda: wrapper.run(flat, pages).unsqueeze(2)


GRAPHS = {
    "inductor": (attention, "inductor"),
    "tatten": (attention, "tatten"),
    "aten": (aten_flash, "inductor"),
    "flash": (flash_cudnn, "inductor"),
}
PLANNED = {"fa3": fa3_cudnn, "paged": paged, "cascade": cascade}


def compiled(fn: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    return torch.compile(fn, backend=backend, dynamic=False)


class Problem:
    """Random data of a row, and what computes its attention."""

    def __init__(self, row: Row, device: str) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()  # compiled for this row alone
        self.row, self.device, self.finding = row, device, None

        def randn(batch: int, heads: int, length: int) -> Tensor:
            return torch.randn(batch, heads, length, row.head_dim, device=device, dtype=getattr(torch, row.dtype))

        self.q = randn(row.batch, row.q_heads, 1)
        self.prefix = randn(1, row.kv_heads, row.prefix), randn(1, row.kv_heads, row.prefix)
        self.suffix = randn(row.batch, row.kv_heads, row.suffix), randn(row.batch, row.kv_heads, row.suffix)
        self.args = self.q, *self.prefix, *self.suffix

    def candidate(self, name: str) -> Callable[[], Tensor] | None:
        """A function without arguments; None for what is not there, or would need a KV too large to expand."""
        row, args = self.row, self.args
        expanded_bytes = 2 * self.suffix[0].nbytes // row.suffix * (row.prefix + row.suffix)
        if name in ("expanded", "inductor") and self.device == "cuda" and expanded_bytes > MAX_EXPANDED:
            return None
        if name == "expanded":
            kv = zip(self.prefix, self.suffix, strict=True)
            keys, values = (torch.cat([p.expand(row.batch, -1, -1, -1), s], 2) for p, s in kv)
            attend = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
            sdpa = compiled(attend, "inductor") if self.device == "cpu" else attend  # in a CUDA graph they are the same
            return lambda: sdpa(self.q, keys, values)
        if name == "op":
            keys, values = zip(self.prefix, self.suffix, strict=True)
            return lambda: tatten.bifurcated_attention(self.q, keys, values)
        if name in PLANNED:
            return PLANNED[name](row, *args)
        fn, backend = GRAPHS[name]
        graph = compiled(fn, backend)
        with tatten.recording() as report:
            graph(*args)
        if name == "tatten":
            (self.finding,) = report.rewritten or report.declined
        return lambda: graph(*args)

    def error(self, out: Tensor) -> float:
        """The larger relative error of the first and the last sequence against float32; NaN if any number of all is."""
        if out.isnan().any():
            return math.nan
        errors = []
        for b in {0, self.row.batch - 1}:
            kv = zip(self.prefix, self.suffix, strict=True)
            keys, values = (torch.cat([p[0], s[b]], 1).float() for p, s in kv)
            q = self.q[b].float().view(self.row.kv_heads, -1, self.row.head_dim)
            exact = (q @ keys.transpose(1, 2) * self.row.head_dim**-0.5).softmax(-1) @ values
            errors.append(((out[b].float().view_as(exact) - exact).norm() / exact.norm()).item())
        return max(errors)


def microseconds(fn: Callable[[], object], device: str, repeats: int = 1) -> float:
    """Of one call, in a row of `repeats`, undisturbed by what ran before."""
    if device == "cpu":
        time.sleep(0.02)  # the threads of Inductor's own OpenMP runtime spin for a while after each kernel
    fn()  # the caches are someone else's
    return seconds(fn, device, repeats) * 1e6


def rates(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per microsecond of a plain read, and floating point operations per microsecond of a large product."""
    x = torch.ones(1 << (28 if device == "cpu" else 30), device=device)
    y = torch.randn(2048 if device == "cpu" else 8192, 2048 if device == "cpu" else 8192, device=device).to(dtype)
    bandwidth = x.nbytes / min(microseconds(lambda: x.sum(), device) for _ in range(5))
    return bandwidth, 2 * y.shape[0] ** 3 / min(microseconds(lambda: y @ y, device) for _ in range(5))


def prepare(problem: Problem, name: str) -> Callable[[], Tensor] | None:
    """What to time, or None. What a peer raises is shown; what we raise stays an error."""
    try:
        step = problem.candidate(name)
        if step is not None and problem.device == "cuda":
            for _ in range(3):
                step()
            step = as_graph(step)
            step().fill_(math.nan)
        return step
    except Exception as e:
        if name in ("tatten", "op"):
            raise
        print(f"{name} is left out: {type(e).__name__}: {(str(e).strip() or '-').splitlines()[0]}")
        return None


def measure(row: Row, device: str, rate: tuple[float, float], rounds: int, names: list[str]) -> dict[str, object]:
    problem = Problem(row, device)
    functions = {name: step for name in names if (step := prepare(problem, name)) is not None}
    errors = {name: problem.error(fn()) for name, fn in functions.items()}
    assert all(error < 2e-2 for error in errors.values()), errors
    once = {name: microseconds(fn, device) for name, fn in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, fn in functions.items():
            times[name].append(microseconds(fn, device, max(2, min(50, int(5e3 / once[name])))))
    size = 2 * row.kv_heads * row.head_dim * getattr(torch, row.dtype).itemsize
    read = size * (row.prefix + row.batch * row.suffix)
    flops = 4 * row.batch * row.q_heads * row.head_dim * (row.prefix + row.suffix)
    median = {f"{name}_us": statistics.median(x) for name, x in times.items()}
    floor = max(read / rate[0], flops / rate[1])
    finding = problem.finding
    estimate = getattr(finding, "cost", None)
    what = {"op": getattr(finding, "op", ""), "cost": estimate and asdict(estimate), "why": str(finding or "")}
    return {**asdict(row), **median, "floor_us": floor, "errors": errors, **what}


def ratio(r: dict[str, object], name: str, others: Sequence[str]) -> float | None:
    """Of a row's time to the least of others; None where they were not measured."""
    found = [r[f"{other}_us"] for other in others if f"{other}_us" in r]
    return r[f"{name}_us"] / min(found) if found and f"{name}_us" in r else None


def fit(results: list[dict[str, object]]) -> Rates:
    """The `Rates` that explain best what the op saves over Inductor's graph, relative to what that takes."""
    with_cost = [(r, r["cost"]) for r in results if isinstance(r["cost"], dict)]
    weights = torch.tensor([1 / r["inductor_us"] for r, _ in with_cost])
    inputs = torch.tensor([[cost["moved"] - cost["read"], -cost["segments"]] for _, cost in with_cost])
    saved = torch.tensor([r["inductor_us"] - r["tatten_us"] for r, _ in with_cost])
    solution = torch.linalg.lstsq((inputs * weights[:, None]).double(), (saved * weights).double()[:, None]).solution
    us_per_byte, segment_us = solution.flatten().tolist()
    return Rates(1 / us_per_byte, segment_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, nargs="*", help="which rows, by number; default: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--calibrate", action="store_true", help="rewrite all of the grid, and fit `passes/cost.py` to it"
    )
    parser.add_argument("--only", type=lambda x: x.split(","), help="which candidates, with commas; default: all")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.calibrate and args.only:
        parser.error("--calibrate needs all candidates, so --only can't be given")

    rows = cpu_rows() if args.device == "cpu" else cuda_rows()
    if args.calibrate:
        dtypes = ("float32", "bfloat16") if args.device == "cpu" else ("bfloat16",)
        rows = [replace(row, dtype=dtype) for row in small_rows() for dtype in dtypes]
        cost.RATES[args.device] = Rates(bytes_per_us=1.0, segment_us=0.0)
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    found = {dtype: rates(args.device, getattr(torch, dtype)) for dtype in {row.dtype for row in rows}}
    shown = "; ".join(f"{dtype} {flops / 1e6:.2f} TFLOP/s" for dtype, (_, flops) in found.items())
    print(f"{name}, torch {torch.__version__}, {found[rows[0].dtype][0] / 1e3:.1f} GB/s, {shown}")
    columns = [c for c in COLUMNS[args.device] if not args.only or c in args.only]
    print("row dtype    batch heads prefix suffix |" + "".join(f"{c:>10}" for c in columns) + "     floor us", end="")
    print(" | tatten is faster than: expanded  inductor" + " | op/composition" * (args.device == "cuda"))
    results = []
    with torch.no_grad():
        for i, row in enumerate(rows):
            if args.rows and i not in args.rows:
                continue
            r = measure(row, args.device, found[row.dtype], args.rounds, columns)
            results.append(r)
            shape = f"{row.batch:5} {row.q_heads:2}/{row.kv_heads:<2} {row.prefix:6} {row.suffix:6}"
            times = "".join(f"{r[f'{c}_us']:10.1f}" if f"{c}_us" in r else f"{'-':>10}" for c in columns)
            slower = [ratio(r, "tatten", [c]) for c in ("expanded", "inductor")]
            ratios = "".join(
                f"{1 / x:{n}.2f}x" if x else f"{'-':>{n + 1}}" for x, n in zip(slower, (26, 9), strict=True)
            )
            if args.device == "cuda":
                composed = ratio(r, "op", COMPOSITIONS)
                ratios += f" | {composed:14.3f}" if composed else f" | {'-':>14}"
            left = "  (left alone)" if "tatten_us" in r and "bifurcated" not in str(r["op"]) else ""
            print(f"{i:3} {row.dtype:8} {shape} |{times} {r['floor_us']:10.1f}   | {ratios}{left}", flush=True)
            if args.device == "cuda":
                torch.cuda.empty_cache()
    for what, others in (("the best composition", COMPOSITIONS), ("plain decode", PLAIN)) * (args.device == "cuda"):
        ratios = [x for r in results if (x := ratio(r, "op", others)) is not None]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            print(f"op over {what}: largest {max(ratios):.3f}, geometric mean {mean:.3f}")
    if args.calibrate:
        print(fit(results))
    if args.json:
        args.json.write_text(json.dumps({"device": name, "rates": found, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
