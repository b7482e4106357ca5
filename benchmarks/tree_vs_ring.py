"""The figures of Tree Attention (arXiv 2408.04093), measured: one query over a KV that is sharded over ranks.

    torchrun --nproc-per-node 8 benchmarks/tree_vs_ring.py --device cuda                 # all, on 2, 4 and 8 GPUs
    torchrun --nproc-per-node 8 benchmarks/tree_vs_ring.py --device cuda --heads 16 16   # heads of the paper's figures
    torchrun --nproc-per-node 4 benchmarks/tree_vs_ring.py --device cpu                  # tiny shapes, gloo

    latency   microseconds of one attention, by length and ranks (the paper's figure of absolute times, section 6.1)
    memory    the most memory at a time on a rank, beside equations 8 and 9
    bytes     what a rank sends, counted where collectives are called, beside equations 10 and 14
    table1    Llama-3.1-8B shapes with random weights: prefill and 10 tokens (Table 1)

`local` is attention to a rank's own shard and nothing else; `tree:*` merges its state by `tatten.tree_merge` with that
strategy; `ring` is `ring.py`, and `ring_home` the same where the shards travel the full circle in place, as the
equations count. All use the same local kernel. On a GPU each is a captured CUDA graph, the ring is timed in eager mode
as well, and inputs rotate through more memory than the L2 holds. Times are those of the slowest rank; medians. Before
it is timed each is held to float64.

Of the paper's symbols b is the batch, t the keys of a rank, p the ranks, n_h the query heads. It knows one d; here
d = n_h * head_dim for what has the shape of the query, and kv heads * head_dim for keys and values.

Table 1 times "10 tokens with prefill". As in the paper's code both arms have the same prefill, here a ring whose shards
are interleaved so that ranks are equally busy; it is timed once for all arms, and each starts from the cache that it
left. New tokens are stored on one rank in turn.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from ring import attend, ring_decode
from sharded_llama import Decoder, Sizes
from timing import as_graph
from together import Ranks, Step, say
from torch import Tensor
from wire import Wire, nvlink_bytes

import tatten
from tatten.ops.reference import decode_attention_reference

SECTIONS = ("latency", "memory", "bytes", "table1")
K = 1024
LENGTHS = {
    "cuda": {
        "latency": [32 * K, 64 * K, 128 * K, 256 * K, 512 * K, 1024 * K],
        "memory": [64 * K, 256 * K],
        "bytes": [32 * K, 128 * K, 512 * K, 1024 * K],
        "table1": [32 * K, 64 * K, 128 * K, 256 * K],
    },
    "cpu": {
        "latency": [K, 4 * K],
        "memory": [K, 4 * K],
        "bytes": [32 * K // 64, 128 * K // 64, 512 * K // 64, 1024 * K // 64],
        "table1": [256, 512],
    },
}
L2 = {"cuda": 200 << 20, "cpu": 0}  # bytes of KV of which the cache keeps nothing that is of use
TABLE1 = {32 * K: (0.60, 2.57), 64 * K: (1.08, 4.42), 128 * K: (2.68, 6.38), 256 * K: (2.89, 8.19)}  # tree, ring: s


@dataclass(frozen=True)
class Shape:
    """Decode attention of one query over `length` keys, of which each of `ranks` has its part."""

    ranks: int
    length: int
    q_heads: int
    kv_heads: int
    batch: int = 1
    head_dim: int = 128

    @property
    def kv(self) -> tuple[int, ...]:
        return self.batch, self.kv_heads, self.length // self.ranks, self.head_dim

    @property
    def q(self) -> tuple[int, ...]:
        return self.batch, self.q_heads, 1, self.head_dim

    @property
    def btd(self) -> int:
        return math.prod(self.kv)

    @property
    def bd(self) -> int:
        return math.prod(self.q)

    @property
    def bn(self) -> int:
        return self.batch * self.q_heads


def arms(ranks: Ranks, strategies: list[str]) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Attention of q and this rank's k and v, by name."""

    def tree(strategy: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda q, k, v: tatten.tree_merge(*attend(q, k, v), ranks.group, strategy=strategy)[0]

    return {
        "local": lambda q, k, v: attend(q, k, v)[0],
        **{f"tree:{x}": tree(x) for x in strategies},
        "ring": lambda q, k, v: ring_decode(q, k, v, ranks.group)[0],
        "ring_home": lambda q, k, v: ring_decode(q, k, v, ranks.group, home=True)[0],
    }


def make_inputs(s: Shape, ranks: Ranks, dtype: torch.dtype, copies: int = 1) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The same queries on all ranks, and keys and values of its own on each."""
    own = torch.Generator(ranks.device).manual_seed(1 + ranks.rank)
    shared = torch.Generator(ranks.device).manual_seed(0)

    def randn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device=ranks.device, dtype=dtype)

    return [(randn(s.q, shared), randn(s.kv, own), randn(s.kv, own)) for _ in range(copies)]


def error(got: Tensor, q: Tensor, k: Tensor, v: Tensor, ranks: Ranks | None) -> float:
    """The relative error against float64, over the shards of all ranks or over the own one."""
    chunks = zip(k.split(32 * K, dim=2), v.split(32 * K, dim=2), strict=True)
    outs, lses = map(torch.stack, zip(*(decode_attention_reference(q, *chunk) for chunk in chunks), strict=True))
    if ranks:
        gathered = []
        for x in (outs, lses):
            every = [torch.empty_like(x) for _ in range(ranks.size)]
            dist.all_gather(every, x, ranks.group)
            gathered.append(torch.cat(every))
        outs, lses = gathered
    exact = (lses.softmax(0).unsqueeze(-1) * outs).sum(0)
    return ((got - exact).norm() / exact.norm()).item()


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
                raise ArithmeticError(f"wrong: relative error {errors[name]:.1e}")
            return step

        found = {name: ranks.attempt(lambda: checked(step))}
        if args.device == "cuda" and not isinstance(found[name], str):
            graph = ranks.attempt(lambda: checked(as_graph(step)))
            found = {f"{name}_eager": found[name], name: graph} if name == "ring" else {name: graph}
        steps |= {x: y for x, y in found.items() if not isinstance(y, str)}
        left_out |= {x: y for x, y in found.items() if isinstance(y, str)}
    once = {name: ranks.seconds(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            times[name].append(ranks.seconds(step, max(1, min(50, int(20e-3 / once[name])))) / len(inputs))
    us = {name: statistics.median(x) * 1e6 for name, x in times.items()}
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
    asked = [r for r in rows if (r["ranks"], r["length"], *args.heads) == (8, 256 * K, 32, 8) and args.device == "cuda"]
    for r in asked:
        say(f"  over local time at most 8 us are asked for: {'yes' if r['over_local'] <= 8 else 'NO'}")
        say(f"  at least 100 times faster than ring is asked for: {'yes' if r['ring_ratio'] >= 100 else 'NO'}")
    return rows


def peak_bytes(fn: Callable[[], object], device: str) -> int:
    """The most that PyTorch's allocator holds at a time in `fn`, beyond what it held before.

    NCCL's own buffers and symmetric memory are not PyTorch's; on a CPU gloo's are not.
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


def decoders(ranks: Ranks, strategies: list[str]) -> dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]:
    def tree(strategy: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        return lambda q, k, v, lengths: tatten.tree_merge(
            *attend(q, k, v, lengths[ranks.rank]), ranks.group, strategy=strategy
        )[0]

    return {
        **{f"tree:{x}": tree(x) for x in strategies},
        "ring": lambda q, k, v, lengths: ring_decode(q, k, v, ranks.group, lengths)[0],
    }


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
            paper = dict(zip(("tree", "ring"), TABLE1.get(length, ()), strict=False)).get(name[:4], "-")
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


def sessions(args: argparse.Namespace) -> Iterator[Ranks]:
    """Groups of the first 2, 4, ... ranks, on the ranks that belong to them; the others wait."""
    for size in args.ranks:
        ranks = Ranks(size, args.device)
        if ranks.rank < size:
            yield ranks
        dist.barrier()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--section", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--ranks", nargs="*", type=int, help="sizes of groups; default: powers of two up to all ranks")
    parser.add_argument("--strategies", nargs="*", help="of tree_merge; default: all that the device has")
    parser.add_argument("--heads", nargs=2, type=int, metavar=("QUERY", "KV"), help="default: 32 8, on a CPU 8 2")
    parser.add_argument(
        "--lengths", nargs="*", type=int, help="of the context, for all sections; default: each its own"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--trials", type=int, default=3, help="of table 1; the paper made 10")
    parser.add_argument("--new-tokens", type=int, default=10)
    parser.add_argument("--layers", type=int, help="default: 32, on a CPU 2")
    parser.add_argument("--hidden", type=int, help="of the model; default: 4096, on a CPU 256; the rest scales with it")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.dtype = torch.bfloat16
    args.strategies = args.strategies or ["all_reduce", "all_gather", *(["push"] if cuda else [])]
    args.heads = args.heads or ([32, 8] if cuda else [8, 2])
    hidden = args.hidden or (4096 if cuda else 256)
    args.sizes = Sizes(
        layers=args.layers or (32 if cuda else 2),
        hidden=hidden,
        intermediate=hidden * 7 // 2,
        q_heads=hidden // 128 if cuda else hidden // 32,
        kv_heads=max(1, hidden // 512) if cuda else hidden // 128,
        head_dim=128 if cuda else 32,
        vocabulary=128256 if cuda else 512,
    )
    lengths = LENGTHS[args.device]
    args.lengths = {name: args.lengths or lengths[name] for name in SECTIONS}
    return args


def main() -> None:
    args = parse()
    timeout = datetime.timedelta(minutes=30)  # ranks that a group leaves out wait for it
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", timeout=timeout, device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo", timeout=timeout)
    world = dist.get_world_size()
    args.ranks = args.ranks or [1 << i for i in range(1, world.bit_length())] or [1]
    bad = [n for n in args.ranks if not 1 <= n <= world]
    if bad:
        raise SystemExit(f"--ranks must be from 1 to {world}, got {bad}")
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads a rank"
    say(f"{device}, torch {torch.__version__}, {world} processes, heads {args.heads[0]}/{args.heads[1]}")
    start = time.perf_counter()
    rows: list[dict] = []
    sections = {"latency": latency, "memory": memory, "bytes": wire, "table1": table1}
    with torch.no_grad():
        for ranks in sessions(args):
            for name in args.section:
                rows += sections[name](ranks, args)
                if args.device == "cuda":
                    torch.cuda.empty_cache()
    say(f"{time.perf_counter() - start:.0f} s")
    if args.json and dist.get_rank() == 0:
        args.json.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
