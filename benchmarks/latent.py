"""Latent attention (DeepSeek-V3's): kernels, a model's decode step, `generate`, and what bfloat16 rounds.

    python benchmarks/latent.py --device cuda --section kernel    # product, step, generate, rounding; default: all
    python benchmarks/latent.py --section step                    # on a CPU: make bench-latent
    torchrun --nproc-per-node 2 benchmarks/latent.py --device cuda --section sharded    # or --device cpu: gloo, tiny

    kernel    one query for each of 128 or 16 heads, rank 512 and rope of 64, bfloat16: `tatten.latent_attention` beside
              FlashAttention-3's kernel for it (`q_v`) and FlashMLA, where `peers.py` finds them; `unrounded` is ours as
              the pass calls it, with the output in float32 and, for 16 heads, the queries as well. On a CPU tiny
              shapes, to try the code
    product   sums over latents in float32 times `W_uv`: by `tatten::project_heads`, by `bmm` of rounded sums, and by
              `bmm` of both halves of them, `split`
    step      one compiled step with a static cache of 4 layers of DeepSeek-V3's shapes, by Inductor and by tatten; on a
              CPU of one layer with 16 heads and next to no MLP or vocabulary: its attention with all projections
    generate  tokens of the same model by wall clock, as benchmarks/generate.py measures them
    rounding  relative errors against float64, by norm and maximum, of SDPA on expanded keys and values and of the same
              program by tatten; a larger sharpness makes fewer keys matter
    sharded   one query over 262144 latents, of which each rank has its share: attention, `W_uv` and the merge, beside
              all latents on each GPU; the slowest rank counts. For torchrun, which runs no other section

On a GPU kernels and steps are captured CUDA graphs, and a kernel's go round copies of their inputs that the L2 cannot
hold. Kernels are checked against float64 before they are timed, steps against float32. All candidates take turns, and
medians are shown. The floors are each latent and weight once at the best rate at which PyTorch reads or copies, and for
a kernel its products at the rate of a large matrix product; both rates are measured in the same run, or given.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from support import latent_kernel, latent_model, latent_product, latent_rounding, latent_sharded, results
from support.command_line import arguments, machine
from support.timing import product_rate, read_rate
from support.together import Ranks, join

Bars = dict[str, tuple[float, str, float]]  # by name: a figure, "at least" or "at most", and its bound


def kernel(args: argparse.Namespace) -> tuple[list[dict], Bars]:
    flops = args.floor_tflops * 1e12 if args.floor_tflops else product_rate(args.device, torch.bfloat16)
    columns = *latent_kernel.OURS, *latent_kernel.PEERS
    print(f"products at {flops / 1e12:.1f} TFLOP/s\nheads batch  length |", *(f"{c:>9}" for c in columns), end="")
    print(" | floor: bytes products | tatten/fa3 /floor")
    rows = []
    for shape in latent_kernel.shapes(args.device):
        r = latent_kernel.measure(shape, args.device, (args.rate, flops), args.rounds)
        rows.append(r)
        us, floor = r["us"], max(r["bytes_us"], r["flops_us"])
        print(f"{shape.heads:5} {shape.batch:5} {shape.length:7} |", end=" ")
        print(*(f"{us[c]:9.1f}" if c in us else f"{'-':>9}" for c in columns), end=" ")
        print(f"| {r['bytes_us']:12.1f} {r['flops_us']:8.1f} |", end=" ")
        print(f"{r['ratio']:10.3f}" if r["ratio"] else f"{'-':>10}", end=" ")
        print(f"{us['tatten'] / floor:6.2f}" if "tatten" in us else f"{'-':>6}", flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    for name in columns:
        reasons = dict.fromkeys(r["left_out"][name] for r in rows if name in r["left_out"])
        for reason in reasons:
            print(f"  {name} left out: {reason}")
    ratios = [r["ratio"] for r in rows if r["ratio"]]
    if not ratios:
        return rows, {}
    return rows, {
        "largest ratio to FlashAttention-3": (max(ratios), "at most", 1.0),
        "geometric mean": (statistics.geometric_mean(ratios), "at most", 0.75),
    }


def product(args: argparse.Namespace) -> tuple[list[dict], Bars]:
    print("heads batch |    tatten   rounded     split   floor us | tatten/rounded | errors")
    rows = []
    for shape in latent_product.shapes(args.device):
        r = latent_product.measure(shape, args.device, args.rate, args.rounds)
        rows.append(r)
        print(f"{shape.heads:5} {shape.batch:5} |", end=" ")
        print(*(f"{r['us'].get(name, math.nan):9.1f}" for name in ("tatten", "rounded", "split")), end=" ")
        print(f"{r['floor_us']:10.1f} | {r['ratio']:14.2f} |", *(f"{x:.1e}" for x in r["errors"].values()), flush=True)
    return rows, {}


def step(args: argparse.Namespace) -> tuple[list[dict], Bars]:
    print("dtype    heads batch   cache   used | inductor    tatten    floor ms | speedup  vs floor | logit errors")
    rows, bars = [], {}
    for row in latent_model.rows(args.device):
        r = latent_model.step(row, args.device, args.rate, args.rounds)
        rows.append(r)
        shape = f"{row.dtype:8} {r['heads']:5} {row.batch:5} {row.max_cache_len:7} {row.used:6}"
        times = f"{r['inductor_ms']:8.2f} {r['tatten_ms']:9.2f} {r['floor_ms']:11.3f}"
        over = r["tatten_ms"] / r["floor_ms"]
        errors = f"{r['inductor_error']:.1e} {r['tatten_error']:.1e}"
        print(f"{shape} | {times} | {r['faster']:6.2f}x {over:8.2f}x | {errors}", flush=True)
        name = f"{row.batch} x {row.used} of {row.max_cache_len}, {row.dtype}"
        bars[f"{name}, over Inductor"] = r["faster"], "at least", row.at_least
        if args.device == "cuda":
            bars[f"{name}, over the floor"] = over, "at most", 1.5
            torch.cuda.empty_cache()
    return rows, bars


def generate(args: argparse.Namespace) -> tuple[list[dict], Bars]:
    rows = latent_model.tokens(args.device, args.rate, max(1, args.rounds // 3))
    print("batch mode             slots  used | inductor    tatten    floor ms | speedup | compile s inductor tatten")
    for r in rows:
        ms, s = r["token_ms"], r["compile_s"]
        print(f"{r['batch']:5} {r['mode']:15} {r['capacity']:6} {r['used']:5} |", end=" ")
        print(f"{ms['inductor']:8.2f} {ms['tatten']:9.2f} {r['floor_ms']:11.3f} | {r['faster']:6.2f}x |", end=" ")
        print(f"{s['inductor']:18.1f} {s['tatten']:6.1f}")
    if args.device == "cpu":
        return rows, {}
    return rows, {f"{r['mode']}, over Inductor": (r["faster"], "at least", 8) for r in rows}


def rounding(args: argparse.Namespace) -> tuple[list[dict], Bars]:
    print("length sharpness | SDPA: norm      max | tatten: norm      max | ratios")
    rows, bars = [], {}
    for length in (2048, 8192) if args.device == "cuda" else (1024, 2048):
        for sharpness in (1.0, 4.0):
            r = latent_rounding.measure(length, sharpness, args.device)
            rows.append(r)
            theirs, ours = r["sdpa"], r["tatten"]
            ratios = {name: ours[name] / theirs[name] for name in ("norm", "max")}
            print(f"{length:6} {sharpness:9} | {theirs['norm']:10.2e} {theirs['max']:8.2e} |", end=" ")
            print(f"{ours['norm']:12.2e} {ours['max']:8.2e} | {ratios['norm']:.3f} {ratios['max']:.3f}", flush=True)
            for name, ratio in ratios.items():
                bars[f"{length}, sharpness {sharpness}, {name} over SDPA's"] = ratio, "at most", 1.0
    return rows, bars


def sharded(args: argparse.Namespace) -> tuple[list[dict], Bars]:
    join(args.device, datetime.timedelta(minutes=10))
    ranks, rows, bars = Ranks(dist.get_world_size(), args.device), [], {}
    print(f"{ranks.size} ranks\nheads  length |    local   sharded us | over its share")
    with torch.no_grad():
        for shape in latent_sharded.shapes(args.device):
            r = latent_sharded.measure(shape, ranks, args.rounds)
            rows.append(r)
            us, over = r["us"], r["over_share_us"]
            print(
                f"{shape.heads:5} {shape.length:7} | {us['local']:8.1f} {us['sharded']:9.1f}    | {over:14.1f}",
                flush=True,
            )
            if args.device == "cuda":
                name = f"{shape.heads} heads, us over the share of the local time"
                bars[name] = over, "at most", latent_sharded.MOST_OVER_SHARE
    dist.destroy_process_group()
    return rows, bars


SECTIONS: dict[str, Callable[[argparse.Namespace], tuple[list[dict], Bars]]] = {
    "kernel": kernel,
    "product": product,
    "step": step,
    "generate": generate,
    "rounding": rounding,
    "sharded": sharded,
}


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    allowed = [name for name in SECTIONS if (name == "sharded") == ("RANK" in os.environ)]  # as torchrun sets it
    parser.add_argument("--section", nargs="*", default=allowed, choices=allowed)
    parser.add_argument("--floor-tbs", type=float, help="TB/s of the floor; default: measured")
    parser.add_argument("--floor-tflops", type=float, help="TFLOP/s of the floor of kernels; default: measured")
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args()


def main() -> None:
    args = parse()
    measured = read_rate(args.device)
    args.rate = args.floor_tbs * 1e12 if args.floor_tbs else measured
    print(f"{machine(args.device)}, reads {measured / 1e9:.1f} GB/s, floor at {args.rate / 1e9:.1f} GB/s")
    rows: list[dict] = []
    bars_by_section: dict[str, Bars] = {}
    for section in args.section:
        print(f"\n{section}")
        rows_of_section, bars_by_section[section] = SECTIONS[section](args)
        rows += rows_of_section
        for what, (figure, side, bound) in bars_by_section[section].items():
            met = figure <= bound if side == "at most" else figure >= bound
            print(f"  {what}: {figure:.3f}, {side} {bound:g} is asked for: {'yes' if met else 'NO'}")
    if args.json and not int(os.environ.get("RANK", 0)):
        results.write(args.json, args.device, rows, bytes_per_second=args.rate, bars=bars_by_section)
    if any(name in r.get("left_out", ()) for r in rows for name in latent_kernel.OURS):
        raise SystemExit("a candidate of tatten's failed or is wrong: see `left_out`")


if __name__ == "__main__":
    with contextlib.redirect_stdout(None) if int(os.environ.get("RANK", 0)) else contextlib.nullcontext():
        main()
