"""One layer of DeepSeek-V3.2 with its indexer: a decode step by Inductor and by tatten, split into its parts.

    python benchmarks/sparse_layer.py --device cuda    # needs a transformers that stores latents: 5.24
    python benchmarks/sparse_layer.py                  # on a CPU: tiny widths, to try the code

The model is transformers' own with one layer, next to no MLP or vocabulary, and random weights in bfloat16. The slots
of its static cache are full of random latents and index keys. Each candidate is a compiled step of one query:

    inductor  the model as it stands: keys and values are projected for each head, and attention reads all of them
    masked    tatten, but the mask is hidden from the proof that only picks matter, so attention searches it
    tatten    attention reads the picked latents

On a GPU steps are captured CUDA graphs, which take turns; medians are shown. Inductor's keys and values of 8 x 131072
do not fit on a GPU of 80 GB: it is measured at the largest length that fits, beside tatten at this length. The parts
come from profiles of the steps without graphs: scores of the indexer, top-k, attention with its mask and projected
keys, projections of the token, and all other kernels.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable

import torch
import transformers
from support import indexed_layer, kernel_parts, models, results
from support.command_line import arguments, first_line, machine
from support.errors import relative_error
from support.indexed_layer import Row
from support.timing import as_graph, in_turns, seconds
from torch import Tensor
from transformers import PreTrainedModel

import tatten

CANDIDATES = ("inductor", "masked", "tatten")
ROOM = 1.5  # the expanded keys and values, and up to half as much again that SDPA and Inductor need
# One other pick among random keys changes the logits by 0.03. A compiler may leave out roundings of the indexer's query
# to bfloat16, which changes a few picks. With the same scores the picks are the same.
MOST_DIFFERENT, MOST_DIFFERENT_WITH_THE_SAME_PICKS = 0.15, 0.01
AT_LEAST = 3  # times as fast as Inductor


def rows(model: PreTrainedModel, device: str) -> list[tuple[Row, tuple[str, ...]]]:
    """Return the shapes to measure, each with its candidates."""
    if device == "cpu":
        return [(Row(2, 1024), CANDIDATES)]
    rows_and_candidates: list[tuple[Row, tuple[str, ...]]] = []
    room = torch.cuda.mem_get_info()[0] / ROOM
    for batch in (1, 8):
        full = fitting = Row(batch, 131072)
        while indexed_layer.expanded_bytes(model.config, fitting) > room:
            fitting = Row(batch, fitting.length // 2)
        if fitting == full:
            rows_and_candidates.append((full, CANDIDATES))
        else:
            print(f"inductor left out of {batch} x {full.length}: it projects", end=" ")
            print(f"{indexed_layer.expanded_bytes(model.config, full) / 1e9:.0f} GB of keys and values")
            rows_and_candidates += [(full, ("masked", "tatten")), (fitting, ("inductor", "tatten"))]
    return rows_and_candidates


def measure(
    model: PreTrainedModel, row: Row, candidates: tuple[str, ...], device: str, rounds: int
) -> dict[str, object]:
    """Return a row of the results."""
    cache = indexed_layer.full_cache(model, row)
    never = torch.zeros(row.batch, 1, 1, row.length, dtype=torch.bool, device=device)
    steps: dict[str, Callable[[], Tensor]] = {}
    parts: dict[str, dict[str, float]] = {}
    kernels: dict[str, list[dict]] = {}
    left_out: dict[str, str] = {}
    reports: dict[str, list[str]] = {}
    for name in candidates:
        hidden = indexed_layer.picks_hidden(never) if name == "masked" else contextlib.nullcontext()
        try:
            with hidden, tatten.recording() as report:
                step = indexed_layer.decode_step(model, cache, row, "inductor" if name == "inductor" else "tatten")
                if device == "cuda":
                    parts[name], kernels[name] = kernel_parts.profiled(step, indexed_layer.widths(model.config, row))
                steps[name] = as_graph(step) if device == "cuda" else step  # the patch that hides picks is guarded on
            reports[name] = str(report).splitlines()
            if ("by top-k" in str(report)) != (name == "tatten"):
                del steps[name]
                raise RuntimeError(f"the picks are {'not ' if name == 'tatten' else ''}read by their indices")
        except Exception as e:  # no memory, for one
            left_out[name] = first_line(e)
    logits = {name: step().float() for name, step in steps.items()}
    exact = next(iter(logits.values()), torch.tensor(math.nan))
    different = {name: relative_error(x, exact) for name, x in logits.items()}
    if {"masked", "tatten"} <= logits.keys() and not (
        relative_error(logits["tatten"], logits["masked"]) < MOST_DIFFERENT_WITH_THE_SAME_PICKS
    ):
        raise SystemExit("attention to the picks differs from attention under their mask")
    took = in_turns(steps, rounds, lambda _, step: seconds(step, device))
    us = {name: x * 1e6 for name, x in took.items()}
    return {
        "batch": row.batch,
        "length": row.length,
        "us": us,
        "parts": parts,
        "faster": us["inductor"] / us["tatten"] if {"inductor", "tatten"} <= us.keys() else None,
        "different": different,
        "left_out": left_out,
        "report": reports,
        "kernels": kernels,
    }


def show(r: dict, kernels: int) -> None:
    """Print a row: its candidates, and the longest kernels of each."""
    for name, us in r["us"].items():
        print(f"{r['batch']:5} {r['length']:7} {name:9} | {us:9.1f} |", end=" ")
        print(*(f"{r['parts'].get(name, {}).get(part, math.nan):11.1f}" for part in kernel_parts.PARTS), end=" ")
        print(f"| {r['different'][name]:.1e}", flush=True)
    for name, reason in r["left_out"].items():
        print(f"  {name} left out: {reason}")
    for name, kernels_of_step in r["kernels"].items():
        for k in sorted(kernels_of_step, key=lambda k: -k["us"])[:kernels]:
            print(f"    {name:9} {k['part']:11} {k['us']:8.1f} us  {k['kernel'][:60]} by {k['op'][:60]}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kernels", type=int, default=0, help="the number of longest kernels to show for each step")
    args = parser.parse_args()
    print(f"{machine(args.device)}, transformers {transformers.__version__}")
    with torch.no_grad():
        model = models.build(indexed_layer.config(args.device), args.device, torch.bfloat16)
        print(f"batch  length candidate |  us a step | {' '.join(f'{x:>11}' for x in kernel_parts.PARTS)} | differs")
        measured = []
        for row, candidates in rows(model, args.device):
            measured.append(measure(model, row, candidates, args.device, args.rounds))
            show(measured[-1], args.kernels)
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
    bars = {
        f"{r['batch']} x {r['length']}, over Inductor": (r["faster"], "at least", AT_LEAST)
        for r in measured
        if r["faster"] is not None
    }
    for what, (figure, side, bound) in bars.items():
        print(f"  {what}: {figure:.2f}, {side} {bound:g} is asked for: {'yes' if figure >= bound else 'NO'}")
    if args.json:
        results.write(args.json, args.device, measured, bars=bars)
    if any(not x < MOST_DIFFERENT for r in measured for x in r["different"].values()):
        raise SystemExit("the candidates' logits differ")


if __name__ == "__main__":
    main()
