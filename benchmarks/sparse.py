"""Attention to the 2048 keys that each query picks, beside attention to all keys.

    python benchmarks/sparse.py --device cuda
    OMP_NUM_THREADS=1 python benchmarks/sparse.py     # on a CPU: 16 and 128 heads, one sequence

Latents have a rank of 512 and a rope of 64, as DeepSeek-V3.2's; `blocks` are 16 blocks of 128 keys for each of 4 kv
heads, as MiniMax-M3's. Candidates, each checked against float64:

    dense     attention to all keys
    masked    attention to all keys under a mask of the picks, which each call searches for blocks
    copied    copy the picks, then attend to the copies
    short     attention to 2048 contiguous keys, different ones in each call, for comparison
    tatten    `indices`: read the picks and nothing else

Kernels of others read latents, where `support/peers.py` finds them:

    fa3          FlashAttention-3 (`q_v`) with pages of one token, of which the picks are the page table
    flash_mla    FlashMLA's sparse kernel for prefill, in bfloat16, which does not split the picks of a query
    flash_mla_8  FlashMLA's sparse kernel for decoding, which reads float8: for comparison

On a GPU a captured CUDA graph cycles through calls whose picks together exceed the L2. All candidates take turns, and
medians are shown. The floor is each picked key once, at the best rate at which PyTorch reads or copies.
"""

from __future__ import annotations

import statistics

import torch
from support import picked_cases, picked_kernel, results
from support.command_line import arguments, machine
from support.timing import read_rate

MOST_US = {1: 14, 8: 26, 64: 88}  # of 128 heads and 131072 keys, by the number of sequences
PEERS = ("fa3", "flash_mla")  # as exact as we are


def bars_of(rows: list[dict], device: str) -> dict[str, tuple[float, str, float]]:
    """Return the figures that have a bound, each with its side and its bound."""
    bars: dict[str, tuple[float, str, float]] = {}
    ran = [r for r in rows if {"masked", "copied", "tatten"} <= r["us"].keys()]
    for r in ran:
        us, name = r["us"], f"{r['heads']} heads, {r['batch']} x {r['length']}, {r['picks']}, {r['dtype']}"
        bars[f"{name}, over a copy"] = us["tatten"] / us["copied"], "at most", 1.1 if device == "cpu" else 1.0
        if device == "cpu" and r["heads"] == 16:
            bars[f"{name}, masked over picked"] = (
                us["masked"] / us["tatten"],
                "at least",
                8 if r["length"] < 1e5 else 30,
            )
        random = r["heads"] == 128 and r["length"] > 1e5 and r["picks"] == "random"  # a mask of runs leaves few blocks
        if device == "cuda" and random and r["batch"] < 64:
            bars[f"{name}, masked over picked"] = us["masked"] / us["tatten"], "at least", 6 if r["batch"] == 1 else 15
        if device == "cuda" and r["picks"] == "blocks":
            bars[f"{name}, over as many keys in a row"] = us["tatten"] / us["short"], "at most", 1.2
        if device == "cuda" and r["heads"] == 128 and r["length"] > 1e5:
            bars[f"{name}, us"] = us["tatten"], "at most", MOST_US[r["batch"]]
        for peer in PEERS:
            if peer in us:
                bars[f"{name}, over {peer}"] = us["tatten"] / us[peer], "at most", 1.0
    for peer in PEERS:
        ratios = [r["us"]["tatten"] / r["us"][peer] for r in ran if peer in r["us"]]
        if ratios:
            bars[f"geometric mean over {peer}"] = statistics.geometric_mean(ratios), "at most", 0.85
    if ran:
        mean = statistics.geometric_mean(r["us"]["tatten"] / r["us"]["copied"] for r in ran)
        bars["geometric mean over a copy"] = mean, "at most", 1.1 if device == "cpu" else 1.0
    return bars


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--floor-tbs", type=float, help="TB/s of the floor; default: measured")
    args = parser.parse_args()
    rate = args.floor_tbs * 1e12 if args.floor_tbs else read_rate(args.device)
    print(f"{machine(args.device)}, floor at {rate / 1e9:.1f} GB/s")
    print("heads batch  length picks     dtype    |", *(f"{c:>11}" for c in picked_kernel.CANDIDATES), end="")
    print(" us | bytes picked      all | masked/tatten tatten/copied    tatten/fa3")
    rows = []
    for shape in picked_cases.shapes(args.device):
        r = picked_kernel.measure(shape, args.device, rate, args.rounds)
        rows.append(r)
        us = r["us"]
        print(f"{shape.heads:5} {shape.batch:5} {shape.length:7} {shape.picks:9} {r['dtype']:8} |", end=" ")
        print(*(f"{us[c]:11.1f}" if c in us else f"{'-':>11}" for c in picked_kernel.CANDIDATES), end="    ")
        print(f"| {r['bytes_us']:12.1f} {r['dense_bytes_us']:8.1f} |", end=" ")
        ratios = ("masked", "tatten"), ("tatten", "copied"), ("tatten", "fa3")
        print(*(f"{us[a] / us[b]:13.2f}" if a in us and b in us else f"{'-':>13}" for a, b in ratios), flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    for name in picked_kernel.CANDIDATES:
        for reason in dict.fromkeys(r["left_out"][name] for r in rows if name in r["left_out"]):
            print(f"  {name} left out: {reason}")
    bars = bars_of(rows, args.device)
    for what, (figure, side, bound) in bars.items():
        met = figure <= bound if side == "at most" else figure >= bound
        print(f"  {what}: {figure:.3f}, {side} {bound:g} is asked for: {'yes' if met else 'NO'}")
    if args.json:
        results.write(args.json, args.device, rows, bytes_per_second=rate, bars=bars)


if __name__ == "__main__":
    main()
