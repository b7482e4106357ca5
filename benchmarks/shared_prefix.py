"""One step of attention to a prefix that the whole batch shares, and to suffixes of each sequence's own.

    python benchmarks/shared_prefix.py --device cpu        # the bars, then a grid of small and middle work
    python benchmarks/shared_prefix.py --device cuda       # large shapes; also FlashInfer, where installed

Side by side in one run, on random data:

    expanded  F.scaled_dot_product_attention on a KV in which each sequence has its own copy of the prefix
    inductor  the graph of a shared-prefix cache, `sdpa(q, cat([prefix.expand(batch), suffix]))`, through Inductor
    tatten    the same graph through backend="tatten"
    op        tatten.bifurcated_attention itself
    invariant the same with `batch_invariant=True`
    aten      prefix, suffix and merge from PyTorch's flash attention, which returns the lse (GPU)
    flash     the prefix from PyTorch's flash attention, the suffix from cuDNN, and a compiled merge (GPU)
    fa3       the same with the prefix from FlashAttention-3 (GPU, where `peers.py` finds it)
    paged     FlashAttention-3 over pages of which sequences share those of the prefix (GPU, likewise)
    cascade   flashinfer.MultiLevelCascadeAttentionWrapper (GPU)

On a GPU each is a captured CUDA graph. All are checked against float32 on the first and the last sequence. The floor is
each key and value once at the bandwidth of a plain read, or the products at the rate of a large matrix product,
whichever takes longer; both rates are measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch
from support import results
from support.command_line import arguments, machine
from support.prefix_cases import Row, cpu_rows, cuda_rows, small_rows
from support.prefix_problem import Problem, prepare
from support.timing import in_turns, microseconds, product_rate, read_rate

from tatten.passes import cost
from tatten.passes.cost import Rates

COLUMNS = {"cpu": ("expanded", "inductor", "tatten", "op", "invariant")}
COLUMNS["cuda"] = (*COLUMNS["cpu"], "aten", "flash", "fa3", "paged", "cascade")
COMPOSITIONS = "aten", "flash", "fa3"
PLAIN = "expanded", "paged"


def undisturbed(fn: Callable[[], object], device: str, repeats: int = 1) -> float:
    """Return the microseconds of one call in a row of `repeats`, after OpenMP's threads have gone to sleep."""
    if device == "cpu":
        time.sleep(0.02)  # the threads of Inductor's own OpenMP runtime spin for a while after each kernel
    return microseconds(fn, device, repeats=repeats)


def measure(row: Row, device: str, rate: tuple[float, float], rounds: int, names: list[str]) -> dict[str, object]:
    """Return a row of the results; `rate` is the device's bytes and floating point operations per microsecond."""
    problem = Problem(row, device)
    functions = {name: step for name in names if (step := prepare(problem, name)) is not None}
    errors = {name: problem.error(fn()) for name, fn in functions.items()}
    assert all(error < 2e-2 for error in errors.values()), errors
    once = {name: undisturbed(fn, device) for name, fn in functions.items()}
    repeats = {name: max(2, min(50, int(5e3 / us))) for name, us in once.items()}
    us = in_turns(functions, rounds, lambda name, fn: undisturbed(fn, device, repeats[name]))
    size = 2 * row.kv_heads * row.head_dim * getattr(torch, row.dtype).itemsize
    read = size * (row.prefix + row.batch * row.suffix)
    flops = 4 * row.batch * row.q_heads * row.head_dim * (row.prefix + row.suffix)
    floor = max(read / rate[0], flops / rate[1])
    finding = problem.finding
    estimate = getattr(finding, "cost", None)
    what = {"op": getattr(finding, "op", ""), "cost": estimate and asdict(estimate), "why": str(finding or "")}
    return {**asdict(row), "us": us, "floor_us": floor, "errors": errors, **what}


def ratio(r: dict, name: str, others: Sequence[str]) -> float | None:
    """Return a row's time over the least of others; None where they were not measured."""
    us = r["us"]
    other_us = [us[other] for other in others if other in us]
    return us[name] / min(other_us) if other_us and name in us else None


def fit(results: list[dict[str, object]]) -> Rates:
    """Return the `Rates` that explain best the time that the op saves over Inductor's graph, relative to its time."""
    with_cost = [(r, r["cost"]) for r in results if isinstance(r["cost"], dict)]
    weights = torch.tensor([1 / r["us"]["inductor"] for r, _ in with_cost])
    inputs = torch.tensor([[cost["moved"] - cost["read"], -cost["segments"]] for _, cost in with_cost])
    saved = torch.tensor([r["us"]["inductor"] - r["us"]["tatten"] for r, _ in with_cost])
    solution = torch.linalg.lstsq((inputs * weights[:, None]).double(), (saved * weights).double()[:, None]).solution
    us_per_byte, segment_us = solution.flatten().tolist()
    return Rates(1 / us_per_byte, segment_us)


def show_row(i: int, r: dict, columns: Sequence[str], device: str) -> None:
    us = r["us"]
    shape = f"{r['batch']:5} {r['q_heads']:2}/{r['kv_heads']:<2} {r['prefix']:6} {r['suffix']:6}"
    times = "".join(f"{us[c]:10.1f}" if c in us else f"{'-':>10}" for c in columns)
    slower = [ratio(r, "tatten", [c]) for c in ("expanded", "inductor")]
    ratios = "".join(f"{1 / x:{n}.2f}x" if x else f"{'-':>{n + 1}}" for x, n in zip(slower, (26, 9), strict=True))
    if device == "cuda":
        composed = ratio(r, "op", COMPOSITIONS)
        ratios += f" | {composed:14.3f}" if composed else f" | {'-':>14}"
    left = "  (left alone)" if "tatten" in us and "bifurcated" not in str(r["op"]) else ""
    print(f"{i:3} {r['dtype']:8} {shape} |{times} {r['floor_us']:10.1f}   | {ratios}{left}", flush=True)


def show_end(rows: list[dict]) -> None:
    for what, others in (("the best composition", COMPOSITIONS), ("plain decode", PLAIN)):
        ratios = [x for r in rows if (x := ratio(r, "op", others)) is not None]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            print(f"op over {what}: largest {max(ratios):.3f}, geometric mean {mean:.3f}")
    slower = [x for r in rows if (x := ratio(r, "invariant", ["op"])) is not None]
    if slower:
        print(f"invariant over op: largest {max(slower):.3f}, geometric mean {statistics.geometric_mean(slower):.3f}")


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", help="which rows, by number; default: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--calibrate", action="store_true", help="rewrite all of the grid, and fit the rates of `passes/cost.py` to it"
    )
    parser.add_argument("--only", type=lambda x: x.split(","), help="which candidates, with commas; default: all")
    args = parser.parse_args()
    if args.calibrate and args.only:
        parser.error("--calibrate measures all candidates and must be without --only")
    return args


def main() -> None:
    args = parse()
    device = args.device
    rows = cpu_rows() if device == "cpu" else cuda_rows()
    if args.calibrate:
        dtypes = ("float32", "bfloat16") if device == "cpu" else ("bfloat16",)
        rows = [replace(row, dtype=dtype) for row in small_rows() for dtype in dtypes]
        cost.RATES[device] = Rates(bytes_per_us=1.0, segment_us=0.0)
    bandwidth = read_rate(device) / 1e6
    products = {
        dtype: product_rate(device, getattr(torch, dtype)) / 1e6 for dtype in dict.fromkeys(row.dtype for row in rows)
    }
    shown = "; ".join(f"{dtype} {flops / 1e6:.2f} TFLOP/s" for dtype, flops in products.items())
    print(f"{machine(device)}, {bandwidth / 1e3:.1f} GB/s, {shown}")
    columns = [c for c in COLUMNS[device] if not args.only or c in args.only]
    print("row dtype    batch heads prefix suffix |" + "".join(f"{c:>10}" for c in columns) + "     floor us", end="")
    print(" | tatten is faster than: expanded  inductor" + " | op/composition" * (device == "cuda"))
    measured = []
    with torch.no_grad():
        for i, row in enumerate(rows):
            if args.rows and i not in args.rows:
                continue
            measured.append(measure(row, device, (bandwidth, products[row.dtype]), args.rounds, columns))
            show_row(i, measured[-1], columns, device)
            if device == "cuda":
                torch.cuda.empty_cache()
    if device == "cuda":
        show_end(measured)
    if args.calibrate:
        print(fit(measured))
    if args.json:
        results.write(args.json, device, measured, bytes_per_us=bandwidth, flops_per_us=products)


if __name__ == "__main__":
    main()
