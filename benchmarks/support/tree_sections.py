"""Latency, memory and bytes of one attention over ranks: three of `tree_vs_ring.py`'s sections."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor

from support.sharded_attention import Shape, arms, error, make_inputs
from support.timing import as_graph, in_turns
from support.together import Ranks, Step, say
from support.wire import Wire, nvlink_bytes

L2 = {"cuda": 200 << 20, "cpu": 0}  # bytes of KV after which the cache holds none of the first ones


def measure_latency(s: Shape, ranks: Ranks, args: argparse.Namespace) -> dict[str, object]:
    copies = max(1, -(-L2[args.device] // (4 * s.btd)))
    inputs = make_inputs(s, ranks, args.dtype, copies)
    inputs *= -(-10 // copies) if args.device == "cuda" else 1  # a graph takes microseconds to launch
    steps: dict[str, Step] = {}
    left_out, errors = {}, {}
    for name, attention in arms(ranks, args.strategies).items():
        if name == "ring_home":
            continue

        def step(attention: Callable[..., Tensor] = attention) -> Tensor:
            for each in inputs:
                out = attention(*each)
            return out

        def checked(step: Step, name: str = name) -> Step:
            errors[name] = error(step(), *inputs[-1], None if name == "local" else ranks)
            if not errors[name] < 1e-2:
                raise ArithmeticError(f"wrong: relative error {errors[name]:.1e}, allowed 1e-2")
            return step

        tried = {name: ranks.attempt(lambda: checked(step))}
        if args.device == "cuda" and not isinstance(tried[name], str):
            graph = ranks.attempt(lambda: checked(as_graph(step)))
            tried = {f"{name}_eager": tried[name], name: graph} if name == "ring" else {name: graph}
        steps |= {x: y for x, y in tried.items() if not isinstance(y, str)}
        left_out |= {x: y for x, y in tried.items() if isinstance(y, str)}
    once = {name: ranks.seconds(step) for name, step in steps.items()}

    def timed(name: str, step: Step) -> float:
        return ranks.seconds(step, max(1, min(50, int(20e-3 / once[name])))) / len(inputs) * 1e6

    us = in_turns(steps, args.rounds, timed)
    return {**asdict(s), "us": us, "errors": errors, "left_out": left_out}


def latency(ranks: Ranks, args: argparse.Namespace) -> list[dict]:
    columns = ["local", *(f"tree:{x}" for x in args.strategies), "ring"]
    columns += ["ring_eager"] if args.device == "cuda" else []
    say(
        f"\nlatency, us, {ranks.size} ranks\n   length |",
        *(f"{c:>15}" for c in columns),
        "|       best tree  - local ring / GB/s of ring",
    )
    rows = []
    for length in args.lengths["latency"]:
        s = Shape(ranks.size, length, *args.heads)
        r = measure_latency(s, ranks, args)
        us = r["us"]
        best = min((c for c in us if c.startswith("tree")), key=us.get)
        ring = min(us[c] for c in us if c.startswith("ring"))
        r |= {"section": "latency", "best": best, "over_local": us[best] - us["local"], "ring_ratio": ring / us[best]}
        rate = (ranks.size - 1) * 2 * math.prod(s.kv) * args.dtype.itemsize / ring / 1e3
        cells = (f"{us[c]:15.1f}" if c in us else f"{'-':>15}" for c in columns)
        say(f"{length:9} |", *cells, f"| {best:>15} {r['over_local']:8.1f} {r['ring_ratio']:6.1f} {rate:12.1f}")
        rows.append(r)
    for name in columns:
        for reason in dict.fromkeys(r["left_out"][name] for r in rows if name in r["left_out"]):
            say(f"  {name} left out: {reason}")
    asked = [
        r for r in rows if (r["ranks"], r["length"], *args.heads) == (8, 256 << 10, 32, 8) and args.device == "cuda"
    ]
    for r in asked:
        say(f"  over local time at most 8 us are asked for: {'yes' if r['over_local'] <= 8 else 'NO'}")
        say(f"  at least 100 times faster than ring is asked for: {'yes' if r['ring_ratio'] >= 100 else 'NO'}")
    return rows


def peak_bytes(fn: Callable[[], object], device: str) -> int:
    """Return the most bytes that PyTorch's allocator holds at a time in `fn`, beyond those it held before.

    Buffers of NCCL, symmetric memory and, on a CPU, gloo are not counted.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fn()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def memory(ranks: Ranks, args: argparse.Namespace) -> list[dict]:
    say(f"\nmemory, MB on a rank, {ranks.size} ranks; q and this rank's K and V are among it")
    say(f"   length | {'':15}  measured  equation     ratio")
    rows = []
    for length in args.lengths["memory"]:
        s = Shape(ranks.size, length, *args.heads)
        tree, ring = 2 * s.btd + 2 * s.bd + 2 * s.bn, 4 * s.btd + 2 * s.bd
        for name, attention in arms(ranks, args.strategies).items():
            if name == "local":
                continue

            def run(s: Shape = s, attention: Callable[..., Tensor] = attention) -> Tensor:
                return attention(*make_inputs(s, ranks, args.dtype)[0])

            tried = ranks.tried(run)
            if isinstance(tried, str):
                say(f"{length:9} | {name:15} left out: {tried}")
                continue
            measured = ranks.largest(peak_bytes(run, args.device))
            expected = args.dtype.itemsize * (ring if name.startswith("ring") else tree)
            say(f"{length:9} | {name:15} {measured / 1e6:9.3f} {expected / 1e6:9.3f} {measured / expected:9.3f}")
            rows.append({**asdict(s), "section": "memory", "arm": name, "bytes": measured, "equation": expected})
    say("  tree: (2btd + 2bd + 2bn_h) numbers, equation 9; ring: 4btd + 2bd, equation 8, is that of two shards")
    return rows


def wire(ranks: Ranks, args: argparse.Namespace) -> list[dict]:
    say(f"\nwhat a rank sends for one attention, {ranks.size} ranks; the equations count numbers of one size")
    say(f"   length | {'':15}   numbers  equation     bytes  by NVLink's counters | calls")
    rows = []
    for length in args.lengths["bytes"]:
        s = Shape(ranks.size, length, *args.heads)
        p = s.ranks
        tree, ring = 2 * (p - 1) / p * (s.bd + 2 * s.bn), 2 * s.btd * p
        inputs = make_inputs(s, ranks, args.dtype)[0]
        for name, attention in arms(ranks, args.strategies).items():
            if name == "local":
                continue

            def step(attention: Callable[..., Tensor] = attention, inputs: tuple[Tensor, ...] = inputs) -> Tensor:
                return attention(*inputs)

            tried = ranks.tried(step)
            if isinstance(tried, str):
                say(f"{length:9} | {name:15} left out: {tried}")
                continue
            with Wire(p) as counted:
                step()
            links = None
            if args.device == "cuda":
                links = nvlink_bytes(step, ranks, 10 if name.startswith("ring") else 1000)
            expected = ring if name.startswith("ring") else tree
            numbers = f"{'packed':>9}" if counted.numbers is None else f"{counted.numbers:9.0f}"
            calls = ", ".join(f"{counted.calls.count(c)} {c}" for c in dict.fromkeys(counted.calls))
            shown = "-" if links is None else f"{links:.0f}"
            say(f"{length:9} | {name:15} {numbers} {expected:9.0f} {counted.bytes:9.0f} {shown:>21} | {calls}")
            rows.append(
                {
                    **asdict(s),
                    "section": "bytes",
                    "arm": name,
                    "numbers": counted.numbers,
                    "bytes": counted.bytes,
                    "nvlink_bytes": links,
                    "equation_numbers": expected,
                    "calls": counted.calls,
                }
            )
    say("  tree: 2 (p - 1) / p (bd + 2bn_h), equation 14; ring: 2btd p, equation 10; packed: out and float32 lse")
    for name in dict.fromkeys(r["arm"] for r in rows):
        sent = {r["bytes"] for r in rows if r["arm"] == name}
        first, last = args.lengths["bytes"][0], args.lengths["bytes"][-1]
        change = "does not change" if len(sent) == 1 else f"grows {max(sent) / min(sent):.0f} times"
        say(f"  {name}: from {first} to {last} tokens what a rank sends {change}")
    return rows
