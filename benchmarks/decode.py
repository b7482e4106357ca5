"""One step of decode attention, ours beside the kernels of `peers.py`, on random bfloat16 data.

    python benchmarks/decode.py --device cuda --section nine       # or grid, ragged, static; default: all
    python benchmarks/decode.py --device cpu                       # tiny shapes against SDPA

    nine    the shapes of KV that models have
    grid    batch 1 to 128 x length 1k to 64k x four pairs of heads
    ragged  lengths that differ: ours with `kv_lens`, the peers on packed tokens or pages, SDPA at the longest length
            with a mask
    invariant
            the same shapes: ours with `batch_invariant=True`, beside the default
    static  a cache of which 1/16 is used, with a bool mask, against a cache of exactly that length; `layer` gets the
            mask's list of blocks, as the layers of a compiled model do, the others make it in each call; `bias` and
            `bias_layer` have a bias of `finfo.min` on the unused slots instead

`auto` is `tatten.decode_attention`, `triton` the same with that provider; `fi` is FlashInfer's batch decode, `fi_tc`
the same on tensor cores, and `fi_one` its decode of one request (--flashinfer). On a GPU each candidate is a captured
CUDA graph of several calls, which cycle through more copies of K and V than fit into the L2. Before it is timed, it is
checked against float64 on a sample of sequences. The candidates take turns, and medians are shown in microseconds per
call. The floor is each key and value once, at the best rate at which PyTorch reads or copies in the same run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Sequence
from dataclasses import asdict

import torch
from support import results
from support.command_line import arguments, machine
from support.decode_candidates import Problem, candidates, prepare
from support.decode_cases import Shape, cpu_shapes, cuda_shapes
from support.errors import attempt
from support.timing import in_turns, microseconds, read_rate

OURS = ("auto", "triton")
UNIFORM = *OURS, "cudnn", "cudnn_packed", "flash", "fa3", "fi", "fi_tc", "fi_one"
COLUMNS = {
    "cuda": {
        "nine": UNIFORM,
        "grid": UNIFORM,
        "ragged": (*OURS, "sdpa", "fa3", "fa3_8", "fa3_32", "fi", "fi_tc"),
        "invariant": ("auto", "invariant"),
        "static": (*OURS, "layer", "bias", "bias_layer", "exact", "sdpa"),
    },
    "cpu": {
        "nine": ("auto", "sdpa"),
        "grid": ("auto", "sdpa"),
        "ragged": ("auto", "sdpa"),
        "invariant": ("auto", "invariant"),
        "static": ("auto", "layer", "bias", "bias_layer", "exact", "sdpa"),
    },
}


def measure(p: Problem, names: list[str], device: str, rounds: int) -> dict[str, object]:
    """Return microseconds and errors of each candidate, and the reasons why others are left out."""
    makers = candidates(p)
    tried = {name: attempt(functools.partial(prepare, p, *makers[name])) for name in names}
    ready = {name: x for name, x in tried.items() if not isinstance(x, str)}
    once = {name: microseconds(step, device) for name, (step, _, _) in ready.items()}

    def timed(name: str, prepared: tuple) -> float:
        step, calls, _ = prepared
        return microseconds(step, device, calls, max(1, min(50, int(2e3 / once[name]))))

    return {
        "us": in_turns(ready, rounds, timed),
        "errors": {name: error for name, (_, _, error) in ready.items()},
        "left_out": {name: x for name, x in tried.items() if isinstance(x, str)},
    }


def summarize(shape: Shape, measured: dict, against: list[str], rate: float) -> dict[str, object]:
    """Return a row of the results: the measurement, the best of `against`, our ratio to it, and the floor."""
    us = measured["us"]
    best = min((c for c in against if c in us), key=us.get, default=None)
    return {
        **asdict(shape),
        "kv_mb": shape.kv_bytes / 1e6,
        "floor_us": shape.kv_bytes / rate * 1e6,
        "best": best,
        "ratio": us["auto"] / us[best] if best and "auto" in us else None,
        **measured,
    }


def bars(section: str, rows: list[dict]) -> dict[str, tuple[float, float]]:
    """Return the figures of a section that have a bound, each with its bound."""
    if section == "invariant":
        slower = [r["us"]["invariant"] / r["us"]["auto"] for r in rows if {"auto", "invariant"} <= r["us"].keys()]
        return {"largest ratio of invariant to default": (max(slower), 1.06)} if slower else {}
    ratios = [r["ratio"] for r in rows if r["ratio"]]
    small = [r["ratio"] for r in rows if r["ratio"] and r["kv_mb"] < 64]
    if not ratios:
        return {}
    if section == "static":
        layers = [r["us"]["layer"] / r["us"]["exact"] for r in rows if {"layer", "exact"} <= r["us"].keys()]
        figures = {"largest ratio to the exact length, the mask's list found in the call": (max(ratios), 1.3)}
        return figures | ({"and found before, for all layers": (max(layers), 1.3)} if layers else {})
    limits = (1.0, 0.93) if section == "ragged" else (1.03, 0.9)
    figures = {
        "largest ratio to the best peer": (max(ratios), limits[0]),
        "geometric mean": (statistics.geometric_mean(ratios), limits[1]),
    }
    if section == "ragged":
        masked = [r["us"]["auto"] / r["us"]["sdpa"] for r in rows if {"auto", "sdpa"} <= r["us"].keys()]
        figures |= {"largest ratio to SDPA with a mask": (max(masked), 1 / 1.6)} if masked else {}
    else:
        figures |= {"largest ratio where KV is under 64 MB": (max(small), 0.75)} if small else {}
    return figures


def show_row(r: dict, columns: Sequence[str]) -> None:
    us, floor, ratio = r["us"], r["floor_us"], r["ratio"]
    heads = f"{r['q_heads']}/{r['kv_heads']}"
    cells = (f"{us[c]:8.1f}" if c in us else f"{'-':>8}" for c in columns)
    print(f"{len(r['lengths']):5} {heads:>6} {r['head_dim']:4}  {r['name']:>21} {r['kv_mb']:8.1f} |", *cells, end="")
    print(f" {floor:8.1f} | {ratio:5.2f} {r['best']:>8.8}" if ratio else f" {floor:8.1f} | {'-':>5} {'':8}", end="")
    print(f" {us['auto'] / floor:11.2f}" if "auto" in us else f" {'-':>11}", flush=True)


def show_end(rows: list[dict], columns: Sequence[str], figures: dict[str, tuple[float, float]], device: str) -> None:
    """Print a section's figures beside their bounds, and the candidates that were left out."""
    for what, (figure, bound) in figures.items():
        verdict = f", at most {bound:.3f} is asked for: {'yes' if figure <= bound else 'NO'}" * (device == "cuda")
        print(f"  {what}: {figure:.3f}{verdict}")
    for c in columns:
        reasons = [r["left_out"][c] for r in rows if c in r["left_out"]]
        if reasons:
            print(f"  {c} left out of {len(reasons)} rows: {', '.join(dict.fromkeys(reasons))}")


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument(
        "--section", nargs="*", default=["nine", "grid", "ragged", "invariant", "static"], choices=COLUMNS["cpu"]
    )
    parser.add_argument("--only", type=lambda x: x.split(","), help="which candidates, with commas; default: all")
    parser.add_argument("--flashinfer", action="store_true", help="FlashInfer also, which compiles for some minutes")
    parser.add_argument("--max-gb", type=float, default=40, help="leave out rows with a larger cache")
    parser.add_argument("--floor-tbs", type=float, help="TB/s of the floor; default: measured")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    args = parse()
    device = args.device
    torch.manual_seed(0)
    measured = read_rate(device)
    rate = args.floor_tbs * 1e12 if args.floor_tbs else measured
    speeds = f"reads {measured / 1e12:.3f} TB/s, floor at {rate / 1e12:.3f} TB/s"
    print(f"{machine(device)}, {speeds}")
    shapes = [s for s in (cuda_shapes() if device == "cuda" else cpu_shapes()) if s.section in args.section]
    shapes = [s for s in shapes if 4 * s.size <= args.max_gb * 1e9]
    pool = max(s.size * s.copies(device) for s in shapes)
    keys, values = (torch.randn(pool, device=device, dtype=torch.bfloat16) for _ in range(2))
    rows: list[dict] = []
    bars_by_section: dict[str, dict[str, tuple[float, float]]] = {}
    with torch.no_grad():
        for section in args.section:
            columns = [c for c in COLUMNS[device][section] if not args.only or c in args.only]
            columns = [c for c in columns if args.flashinfer or not c.startswith("fi")]
            against = {"static": ["exact"], "invariant": []}.get(section, [c for c in columns if c not in OURS])
            heads = (f"{c:>8.8}" for c in columns)
            print(f"\n{section}\nbatch  heads    D  {'lengths':>21}    KV MB |", *heads, end="")
            print("    floor | auto/best peer  auto/floor")
            rows_of_section = []
            for shape in (s for s in shapes if s.section == section):
                measurement = measure(Problem(shape, (keys, values)), columns, device, args.rounds)
                rows_of_section.append(summarize(shape, measurement, against, rate))
                show_row(rows_of_section[-1], columns)
                if device == "cuda":
                    torch.cuda.empty_cache()
            bars_by_section[section] = bars(section, rows_of_section)
            show_end(rows_of_section, columns, bars_by_section[section], device)
            rows += rows_of_section
    if args.json:
        results.write(args.json, device, rows, bytes_per_second=rate, bars=bars_by_section)
    if any(c in r["left_out"] for r in rows for c in (*OURS, "exact", "invariant")):
        raise SystemExit("a candidate of tatten's failed or is wrong: see `left_out`")


if __name__ == "__main__":
    main()
