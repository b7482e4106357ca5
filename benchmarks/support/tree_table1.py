"""Table 1 of Tree Attention, a section of `tree_vs_ring.py`: a prefill and ten tokens of a model like Llama."""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from support.sharded_attention import decoders
from support.sharded_llama import Decoder, Sizes
from support.striped_llama import StripedPrefill
from support.timing import as_graph
from support.together import Ranks, Step, say

PAPER = {32 << 10: (0.60, 2.57), 64 << 10: (1.08, 4.42), 128 << 10: (2.68, 6.38), 256 << 10: (2.89, 8.19)}  # tree, ring


@dataclass(frozen=True)
class Run:
    """A prefill, which arms of one kind share, and the steps of one of them."""

    prefill_s: float
    trials_s: list[float]
    tokens: list[int]

    @property
    def decode_s(self) -> float:
        return statistics.median(self.trials_s)

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def prepare(model: Decoder, ranks: Ranks, args: argparse.Namespace, kind: str) -> dict[str, Step]:
    """Return a step of each arm of a kind, on a GPU also as a graph."""
    steps: dict[str, Step] = {}
    for name, merged in decoders(ranks, args.strategies).items():
        if not name.startswith(kind):
            continue
        model.restart()
        eager = ranks.tried(functools.partial(model.step, merged))
        tried = {f"{name}_eager": eager}
        if args.device == "cuda" and not isinstance(eager, str):
            tried[name] = ranks.attempt(functools.partial(as_graph, eager))
        for x, step in tried.items():
            if isinstance(step, str):
                say(f"  {x} left out: {step}")
            else:
                steps[x] = step
    return steps


def measure(
    model: Decoder, fill: Callable[[], object], kind: str, ranks: Ranks, args: argparse.Namespace
) -> dict[str, Run]:
    """Measure a prefill, and the steps of each arm of a kind from the cache that it leaves."""
    later = args.new_tokens - 1
    fill()
    prefill = statistics.median(ranks.seconds(fill) for _ in range(args.trials))
    steps = prepare(model, ranks, args, kind)
    trials: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in [*steps.items()] * args.trials:
        model.restart()
        trials[name].append(ranks.seconds(step, later) * later)
    runs = {}
    for name, step in steps.items():
        model.restart()
        tokens = [model.first[0, 0].item(), *(step()[0, 0].item() for _ in range(later))]
        runs[name] = Run(prefill, trials[name], tokens)
    return runs


def table1(ranks: Ranks, args: argparse.Namespace) -> list[dict]:
    model, later = Decoder(args.sizes, ranks, args.dtype), args.new_tokens - 1
    prefills: dict[str, Callable[[Tensor], None]] = {"tree": StripedPrefill(model), "ring": model.prefill}
    say(f"\ntable 1, {ranks.size} ranks, {args.sizes.layers} layers: prefill of the first token, then {later} steps")
    say("   length |                  arm prefill s  decode s  ms a step   total s | ring / decode   total | paper's")
    rows = []
    for length in args.lengths["table1"]:
        model.allocate(length, args.new_tokens)
        g = torch.Generator(args.device).manual_seed(1)
        prompt = torch.randint(args.sizes.vocabulary, (1, length), generator=g, device=args.device)
        runs: dict[str, Run] = {}
        for kind, prefill in prefills.items():
            runs |= measure(model, functools.partial(prefill, prompt), kind, ranks, args)
        rings = [run for name, run in runs.items() if name.startswith("ring")]
        decode, total = min(x.decode_s for x in rings), min(x.total_s for x in rings)
        for name, run in runs.items():
            paper = dict(zip(("tree", "ring"), PAPER.get(length, ()), strict=False)).get(name[:4], "-")
            times = f"{run.prefill_s:9.3f} {run.decode_s:9.3f} {run.decode_s / later * 1e3:10.2f} {run.total_s:9.3f}"
            ratios = f"{decode / run.decode_s:13.2f} {total / run.total_s:7.2f}"
            say(f"{length:9} | {name:>20} {times} | {ratios} | {paper:>7}")
            row = {"section": "table1", "ranks": ranks.size, "length": length, "arm": name, **asdict(run)}
            rows.append({**asdict(args.sizes), **row, "decode_s": run.decode_s, "total_s": run.total_s})
        first = next(iter(runs))
        other = [name for name, x in runs.items() if x.tokens != runs[first].tokens]
        say(f"  tokens: {f'{first} has others than ' + ', '.join(other) if other else 'the same for all arms'}")
        if args.device == "cuda" and ranks.size == 8 and args.sizes == Sizes():
            trees = [run for name, run in runs.items() if name.startswith("tree")]
            of_decode, of_total = decode / min(x.decode_s for x in trees), total / min(x.total_s for x in trees)
            for what, ratio in (("10 tokens", of_decode), ("with prefill", of_total)):
                say(f"  {what}: at least 4 times faster than ring is asked for: {'yes' if ratio >= 4 else 'NO'}")
    return rows
