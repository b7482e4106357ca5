"""One step of attention to trees of prefixes: those that PAT and FastTree publish, and groups of any size.

    python benchmarks/prefix_trees.py --device cuda                            # all, some minutes
    python benchmarks/prefix_trees.py --device cuda --section pat --heads 32/8
    python benchmarks/prefix_trees.py --device cuda --section groups           # less than a minute
    python benchmarks/prefix_trees.py --device cpu                             # tiny shapes, to try the code

    pat, fasttree   the published trees, `nodes_tokens` by level; `support/prefix_tree_cases.py` names the sources
        tatten      tatten.bifurcated_attention with a segment for each level
        fa3         FlashAttention-3 for each level (where `peers.py` finds it), and one kernel that merges all states
        cudnn       the same from cuDNN
        flash       the same from PyTorch's flash attention, query heads and sequences folded into rows
        picked      the same from the kernel at each level that is fastest there, each timed alone
        cascade     flashinfer.MultiLevelCascadeAttentionWrapper, planned beforehand, where it is installed; it compiles
                    for a minute or two
    groups          samples of several prompts: aligned groups as blocks, as `rows` and as the `row_groups` of `rows`,
                    found beforehand as for the layers of a compiled model; some samples dropped, with and without
                    copies of the prefixes; almost all samples from one prompt; and one CUDA graph over changing rows

On a GPU each candidate is a captured CUDA graph that cycles through copies of keys and values that the L2 cannot hold.
All are checked against float32 before they are timed, take turns, and medians are shown in microseconds per call. The
floor is each key, value, query and output once at the bandwidth of a plain read, or the products at the rate of a large
matrix product, whichever takes longer.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from support import grouped_rows, results
from support.command_line import arguments, machine
from support.prefix_tree_cases import trees
from support.prefix_tree_problem import OURS, measure
from support.timing import product_rate, read_rate

COLUMNS = [OURS, "fa3", "cudnn", "flash", "picked", "cascade"]
SECTIONS = ["pat", "fasttree", "groups"]


def show_tree(r: dict) -> None:
    us = "".join(f"{r['us'][c]:9.1f}" if c in r["us"] else f"{'-':>9}" for c in COLUMNS)
    ratio = "-" if r["ratio"] is None else f"{r['ratio']:.3f} of {r['best']}"
    print(f"{r['name']:44} {r['q_heads']:2}/{r['kv_heads']:<2} |{us} {r['floor_us']:9.1f} | {ratio}", flush=True)


def show_end(section: str, rows: list[dict]) -> None:
    """Print the worst and the mean ratio, and why candidates are missing."""
    ratios = {f"{r['name']} {r['q_heads']}/{r['kv_heads']}": r["ratio"] for r in rows if r["ratio"] is not None}
    if ratios:
        worst = max(ratios, key=ratios.__getitem__)
        mean = statistics.geometric_mean(ratios.values())
        above = sum(x > 1 for x in ratios.values())
        print(f"{section}: {len(ratios)} trees, largest ratio {ratios[worst]:.3f} ({worst}), {above} above 1")
        print(f"{section}: geometric mean {mean:.3f}")
    for name in COLUMNS:
        for reason in dict.fromkeys(r["left_out"][name] for r in rows if name in r["left_out"]):
            count = sum(r["left_out"].get(name) == reason for r in rows)
            print(f"  {name} left out of {count}: {reason}")


def measure_trees(section: str, device: str, rates: tuple[float, float], args: argparse.Namespace) -> list[dict]:
    names = (f"{c:>9}" for c in COLUMNS)
    print(
        f"\n{section}\n{'nodes_tokens by level':44} heads |{''.join(names)}     floor | ratio to the best", flush=True
    )
    rows = []
    for tree in trees(section, device):
        if args.heads and f"{tree.q_heads}/{tree.kv_heads}" not in args.heads:
            continue
        row = measure(tree, device, [c for c in COLUMNS if not args.only or c in args.only], args.rounds)
        row["floor_us"] = max(tree.bytes / rates[0], tree.flops / rates[1])
        rows.append({"section": section, **row})
        show_tree(rows[-1])
        if device == "cuda":
            torch.cuda.empty_cache()
    show_end(section, rows)
    return rows


def measure_groups(device: str, rates: tuple[float, float], rounds: int) -> list[dict]:
    sizes = grouped_rows.Sizes() if device == "cuda" else grouped_rows.TINY
    print(f"\ngroups: {sizes}")
    rows = [{"section": "groups", **r} for r in grouped_rows.measure(sizes, device, rates, rounds)]
    for r in rows:
        shown = (
            f"{r['us']:9.1f} us {r['over_regular']:7.3f} x regular {r['added_us']:+8.1f} us, floor {r['floor_us']:.1f}"
        )
        print(f"{r['batch']:4} {r['groups']:8} {r['given']:7} {shown}", flush=True)
    worst = grouped_rows.replay(sizes, device)
    print(f"one graph over changing rows: largest error {worst:.1e}", flush=True)
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--section", nargs="*", default=SECTIONS, choices=SECTIONS)
    parser.add_argument("--heads", nargs="*", help="only trees with these heads, such as 32/8; default: all")
    parser.add_argument("--only", type=lambda x: x.split(","), help="which candidates, with commas; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    device = args.device
    rates = read_rate(device) / 1e6, product_rate(device, torch.bfloat16) / 1e6
    print(f"{machine(device)}, {rates[0] / 1e3:.1f} GB/s, {rates[1] / 1e6:.2f} TFLOP/s", flush=True)
    rows = []
    with torch.no_grad():
        for section in args.section:
            start = time.perf_counter()
            if section == "groups":
                rows += measure_groups(device, rates, args.rounds)
            else:
                rows += measure_trees(section, device, rates, args)
            print(f"{section}: {time.perf_counter() - start:.0f} s", flush=True)
            if args.json:
                results.write(args.json, device, rows, bytes_per_us=rates[0], flops_per_us=rates[1])


if __name__ == "__main__":
    main()
