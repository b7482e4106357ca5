"""One step of attention to a prefix that the whole batch shares, and to suffixes of each sequence's own.

    python benchmarks/shared_prefix.py --device cpu        # the bars, then a grid of small and middle work
    python benchmarks/shared_prefix.py --device cuda       # large shapes; also FlashInfer, where installed

Side by side in one run, on random data:

    expanded  F.scaled_dot_product_attention on a KV in which each sequence has its own copy of the prefix
    inductor  the graph of a shared-prefix cache, `sdpa(q, cat([prefix.expand(batch), suffix]))`, through Inductor
    tatten    the same graph through backend="tatten"
    op        tatten.bifurcated_attention itself
    aten      prefix, suffix and merge from PyTorch's flash attention, which returns the lse (GPU)
    cascade   flashinfer.MultiLevelCascadeAttentionWrapper (GPU)

On a GPU each is a captured CUDA graph. The floor is each key and value once at the bandwidth of a plain read, or the
products at the rate of a large matrix product, whichever takes longer; both rates are measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import as_graph, seconds
from torch import Tensor

import tatten
from tatten.passes import cost
from tatten.passes.cost import Rates


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


def aten_flash(q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The composition that anyone can write: fold, two flash kernels, a compiled merge."""
    batch, q_heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    rows = q.view(batch, kv_heads, q_heads // kv_heads, head_dim)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    folded = rows.transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
    prefix_out, prefix_lse = flash(folded, prefix_k, prefix_v)[:2]
    out, lse = flash(rows, k, v)[:2]
    prefix_out = prefix_out.view(kv_heads, batch, -1, head_dim).transpose(0, 1)
    prefix_lse = prefix_lse.view(kv_heads, batch, -1).transpose(0, 1)
    share = torch.sigmoid(prefix_lse - lse).unsqueeze(-1)
    merged = prefix_out.float() * share + out.float() * (1 - share)
    return merged.to(q.dtype).reshape(q.shape)


def cascade(
    row: Row, q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor
) -> Callable[[], Tensor] | None:
    """FlashInfer's two-level cascade on pages of 16 tokens, planned beforehand; None where it is not installed."""
    try:
        import flashinfer
    except ImportError:
        return None
    page = 16
    n_prefix, n_suffix = row.prefix // page, row.suffix // page
    tokens = [x.transpose(1, 2).reshape(-1, page, row.kv_heads, row.head_dim) for x in (prefix_k, k)]
    others = [x.transpose(1, 2).reshape(-1, page, row.kv_heads, row.head_dim) for x in (prefix_v, v)]
    pages = torch.stack((torch.cat(tokens), torch.cat(others)), dim=1).contiguous()

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


def compiled(fn: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, dynamic=False)


def candidates(row: Row, device: str) -> tuple[dict[str, Callable[[], Tensor]], dict[str, object]]:
    """Functions without arguments that all compute the same attention, and what tatten did to the graph."""
    torch.manual_seed(0)
    dtype = getattr(torch, row.dtype)

    def randn(batch: int, heads: int, length: int) -> Tensor:
        return torch.randn(batch, heads, length, row.head_dim, device=device, dtype=dtype)

    q = randn(row.batch, row.q_heads, 1)
    prefix = randn(1, row.kv_heads, row.prefix), randn(1, row.kv_heads, row.prefix)
    suffix = randn(row.batch, row.kv_heads, row.suffix), randn(row.batch, row.kv_heads, row.suffix)
    args = q, *prefix, *suffix
    expanded = [torch.cat([p.expand(row.batch, -1, -1, -1), s], 2) for p, s in zip(prefix, suffix, strict=True)]
    sdpa = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), "inductor")
    sdpa(q, *expanded)
    inductor = compiled(attention, "inductor")
    inductor(*args)
    with tatten.recording() as report:
        ours = compiled(attention, "tatten")
        ours(*args)
    (finding,) = report.rewritten or report.declined
    keys, values = (prefix[0], suffix[0]), (prefix[1], suffix[1])
    functions: dict[str, Callable[[], Tensor]] = {
        "expanded": lambda: sdpa(q, *expanded),
        "inductor": lambda: inductor(*args),
        "tatten": lambda: ours(*args),
        "op": lambda: tatten.bifurcated_attention(q, keys, values),
    }
    if device == "cuda":
        flash = compiled(aten_flash, "inductor")
        functions["aten"] = lambda: flash(*args)
        planned = cascade(row, *args)
        if planned is not None:
            functions["cascade"] = planned
    estimate = getattr(finding, "cost", None)
    what = {"op": getattr(finding, "op", ""), "cost": estimate and asdict(estimate), "why": str(finding)}
    return functions, what


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


def measure(row: Row, device: str, rate: tuple[float, float], rounds: int) -> dict[str, object]:
    functions, what = candidates(row, device)
    if device == "cuda":
        for fn in functions.values():
            for _ in range(3):
                fn()
        functions = {name: as_graph(fn) for name, fn in functions.items()}
    exact = functions["expanded"]().float()
    errors = {name: ((fn().float() - exact).norm() / exact.norm()).item() for name, fn in functions.items()}
    assert max(errors.values()) < 2e-2, errors
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
    return {**asdict(row), **median, "floor_us": floor, "errors": errors, **what}


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
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()

    rows = cpu_rows() if args.device == "cpu" else cuda_rows()
    if args.calibrate:
        dtypes = ("float32", "bfloat16") if args.device == "cpu" else ("bfloat16",)
        rows = [replace(row, dtype=dtype) for row in small_rows() for dtype in dtypes]
        cost.RATES[args.device] = Rates(bytes_per_us=1.0, segment_us=0.0)
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    found = {dtype: rates(args.device, getattr(torch, dtype)) for dtype in {row.dtype for row in rows}}
    shown = "; ".join(f"{dtype} {flops / 1e6:.2f} TFLOP/s" for dtype, (_, flops) in found.items())
    print(f"{name}, torch {torch.__version__}, {found[rows[0].dtype][0] / 1e3:.1f} GB/s, {shown}")
    columns = ["expanded", "inductor", "tatten", "op"] + (["aten", "cascade"] if args.device == "cuda" else [])
    print("row dtype    batch heads prefix suffix |" + "".join(f"{c:>10}" for c in columns) + "     floor us", end="")
    print(" | tatten is faster than: expanded  inductor")
    results = []
    with torch.no_grad():
        for i, row in enumerate(rows):
            if args.rows and i not in args.rows:
                continue
            r = measure(row, args.device, found[row.dtype], args.rounds)
            results.append(r)
            shape = f"{row.batch:5} {row.q_heads:2}/{row.kv_heads:<2} {row.prefix:6} {row.suffix:6}"
            times = "".join(f"{r[f'{c}_us']:10.1f}" if f"{c}_us" in r else f"{'-':>10}" for c in columns)
            ratios = f"{r['expanded_us'] / r['tatten_us']:26.2f}x {r['inductor_us'] / r['tatten_us']:8.2f}x"
            left = "" if "bifurcated" in str(r["op"]) else "  (left alone)"
            print(f"{i:3} {row.dtype:8} {shape} |{times} {r['floor_us']:10.1f}   | {ratios}{left}", flush=True)
    if args.calibrate:
        print(fit(results))
    if args.json:
        args.json.write_text(json.dumps({"device": name, "rates": found, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
