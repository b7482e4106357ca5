"""Table 1 of Tree Attention, a section of `tree_vs_ring.py`: a prefill and ten tokens of a model like Llama."""

from __future__ import annotations

import argparse
import functools
import statistics
from dataclasses import asdict

import torch

from support.sharded_attention import decoders
from support.sharded_llama import Decoder, Sizes
from support.timing import as_graph
from support.together import Ranks, Step, say

PAPER = {32 << 10: (0.60, 2.57), 64 << 10: (1.08, 4.42), 128 << 10: (2.68, 6.38), 256 << 10: (2.89, 8.19)}  # tree, ring


def prepare(model: Decoder, ranks: Ranks, args: argparse.Namespace) -> dict[str, Step]:
    """A step of each arm, on a GPU also as a graph."""
    steps: dict[str, Step] = {}
    for name, merged in decoders(ranks, args.strategies).items():
        model.restart()
        eager = ranks.tried(functools.partial(model.step, merged))
        found = {f"{name}_eager": eager}
        if args.device == "cuda" and not isinstance(eager, str):
            found[name] = ranks.attempt(functools.partial(as_graph, eager))
        for x, step in found.items():
            if isinstance(step, str):
                say(f"  {x} left out: {step}")
            else:
                steps[x] = step
    return steps


def table1(ranks: Ranks, args: argparse.Namespace) -> list[dict]:
    model, later = Decoder(args.sizes, ranks, args.dtype), args.new_tokens - 1
    say(f"\ntable 1, {ranks.size} ranks, {args.sizes.layers} layers: prefill of the first token, then {later} steps")
    say("   length | prefill s |                  arm  decode s  ms a step   total s | ring / decode   total | paper's")
    rows = []
    for length in args.lengths["table1"]:
        model.allocate(length, args.new_tokens)
        g = torch.Generator(args.device).manual_seed(1)
        prompt = torch.randint(args.sizes.vocabulary, (1, length), generator=g, device=args.device)
        fill = functools.partial(model.prefill, prompt)
        fill()
        prefill = statistics.median(ranks.seconds(fill) for _ in range(args.trials))
        steps = prepare(model, ranks, args)
        trials: dict[str, list[float]] = {name: [] for name in steps}
        for name, step in [*steps.items()] * args.trials:
            model.restart()
            trials[name].append(ranks.seconds(step, later) * later)
        tokens: dict[str, list[int]] = {}
        for name, step in steps.items():
            model.restart()
            tokens[name] = [model.first[0, 0].item(), *(step()[0, 0].item() for _ in range(later))]
        decode = {name: statistics.median(x) for name, x in trials.items()}
        ring = min(x for name, x in decode.items() if name.startswith("ring"))
        for name, x in decode.items():
            ratios = ring / x, (prefill + ring) / (prefill + x)
            paper = dict(zip(("tree", "ring"), PAPER.get(length, ()), strict=False)).get(name[:4], "-")
            times = f"{x:9.3f} {x / later * 1e3:10.2f} {prefill + x:9.3f}"
            say(f"{length:9} | {prefill:9.3f} | {name:>20} {times} | {ratios[0]:13.2f} {ratios[1]:7.2f} | {paper:>7}")
            row = {"section": "table1", "ranks": ranks.size, "length": length, "arm": name, "prefill_s": prefill}
            row |= {"decode_s": x, "trials_s": trials[name], "tokens": tokens[name]}
            rows.append({**asdict(args.sizes), **row})
        first = next(iter(tokens))
        other = [name for name, x in tokens.items() if x != tokens[first]]
        say(f"  tokens: {f'{first} has others than ' + ', '.join(other) if other else 'the same for all arms'}")
        if args.device == "cuda" and ranks.size == 8 and args.sizes == Sizes():
            best = min(x for name, x in decode.items() if name.startswith("tree"))
            for what, ratio in (("10 tokens", ring / best), ("with prefill", (prefill + ring) / (prefill + best))):
                say(f"  {what}: at least 4 times faster than ring is asked for: {'yes' if ratio >= 4 else 'NO'}")
    return rows
