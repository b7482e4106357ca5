"""A prefix that a batch shares, sharded over GPUs: one attention, and a decode step of many samples.

    torchrun --nproc-per-node 2 benchmarks/sharded_prefix.py --device cuda                  # two minutes or three
    torchrun --nproc-per-node 2 benchmarks/sharded_prefix.py --device cuda --section op     # less than a minute
    torchrun --nproc-per-node 2 benchmarks/sharded_prefix.py --device cpu                   # gloo, tiny shapes

    op      one step of attention, 32/8 heads of 128, each rank with its part of the prefix and of each suffix
        local     tatten.bifurcated_attention over this rank's part alone: what a GPU takes for that much
        sharded   the same, then tatten.tree_merge
        one       all of it on one GPU
    step    n samples at Llama-2-7B's shapes: 32 layers with random weights, keys and values
        one       on one GPU
        sequence  the prefix and the suffixes sharded over the sequence, and one merge a layer
        heads     attention's weights, heads and KV sharded instead, and one all-reduce a layer: tensor parallelism

In `step` all arms have the rest of the model on each GPU; what is between attention is compiled by Inductor, attention
is the ops that a compiled model with a shared-prefix cache calls. On a GPU each arm is a captured CUDA graph. Arms are
held to float32 (`op`) or to the first arm (`step`) before they are timed, and take turns; of each turn the slowest rank
counts, and medians are shown. The floor is what a rank has to read, once, at the rate of a plain read, or in `op` its
products at the rate of a large matrix product, if they take longer.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import statistics
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from support import results
from support.command_line import arguments, machine
from support.sharded_llama import Decoder, Sizes
from support.sharded_step import ARMS, KV, Samples, SampleStep
from support.timing import as_graph, in_turns, product_rate, read_rate, seconds
from support.together import Ranks, join, say
from torch import Tensor

import tatten

SHAPES = {  # prefix, suffix, batch, query heads, kv heads
    "cuda": [(131072, 256, 32, 32, 8), (1 << 20, 256, 64, 32, 8)],
    "cpu": [(256, 8, 4, 8, 2), (512, 8, 4, 8, 2)],
}
LLAMA_2_7B = Sizes(intermediate=11008, kv_heads=32, vocabulary=32000, theta=1e4)
MODELS = {
    "cuda": LLAMA_2_7B,
    "cpu": Sizes(layers=2, hidden=128, intermediate=256, q_heads=4, kv_heads=4, head_dim=32, vocabulary=64, theta=1e4),
}
SAMPLES = {
    "cuda": [Samples(prefix << 10, 32, 128) for prefix in (8, 16, 32, 64)],
    "cpu": [Samples(prefix, 4, 8) for prefix in (64, 128)],
}
Steps = Mapping[str, Callable[[], object]]


def timed(steps: Steps, ranks: Ranks, rounds: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the seconds of each step on the slowest rank, and on each rank."""
    once = {name: ranks.seconds(step) for name, step in steps.items()}
    times_here: dict[str, list[float]] = {name: [] for name in steps}

    def slowest(name: str, step: Callable[[], object]) -> float:
        dist.barrier(ranks.group)
        step()  # after the barrier: the GPU is busy while the host launches the timed step
        times_here[name].append(seconds(step, ranks.device, max(1, min(50, int(20e-3 / once[name])))))
        return ranks.largest(times_here[name][-1])

    slowest_medians = in_turns(steps, rounds, slowest)
    every: list[dict[str, float] | None] = [None] * ranks.size
    dist.all_gather_object(every, {name: statistics.median(x) for name, x in times_here.items()}, ranks.group)
    return slowest_medians, {name: [x[name] for x in every if x is not None] for name in steps}


def relative_error(out: Tensor, expected: Tensor) -> float:
    if not out.isfinite().all():
        return math.nan
    out, expected = out.float(), expected.float()
    return ((out - expected).norm() / expected.norm()).item()


def require(ranks: Ranks, errors: dict[str, float], most: float) -> None:
    """Raise on all ranks if an error is larger on one of them, or NaN."""
    wrong = {name: x for name, x in errors.items() if not x < most}
    reason = ranks.agree(f"rank {ranks.rank} has relative errors {wrong}, allowed {most}" if wrong else None)
    if reason:
        raise ArithmeticError(reason)


def captured(ranks: Ranks, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return the step, on a GPU as a graph whose output was overwritten."""
    for _ in range(3):
        step()
    if ranks.device == "cpu":
        return step
    torch.cuda.synchronize()
    dist.barrier(ranks.group)
    graph = as_graph(step)
    graph().fill_(math.nan)
    return graph


def randn(ranks: Ranks, *shape: int) -> Tensor:
    """Return the same numbers on all ranks, which have seeded their generators alike."""
    return torch.randn(shape, device=ranks.device, dtype=torch.bfloat16)


def exact(q: Tensor, keys: list[Tensor], values: list[Tensor], sequence: int) -> Tensor:
    """Return attention of one sequence over all segments, in float32 `[q_heads, d]`."""
    k, v = (torch.cat([x[sequence % len(x)] for x in kv], dim=1).float() for kv in (keys, values))
    heads = q[sequence].float().view(len(k), -1, q.shape[-1])
    return ((heads @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1) @ v).flatten(0, 1)


def measure_op(shape: tuple[int, int, int, int, int], ranks: Ranks, args: argparse.Namespace) -> dict[str, object]:
    prefix, suffix, batch, q_heads, kv_heads = shape
    torch.manual_seed(0)
    q = randn(ranks, batch, q_heads, 1, 128)
    keys, values = (
        [randn(ranks, 1, kv_heads, prefix, 128), randn(ranks, batch, kv_heads, suffix, 128)] for _ in range(2)
    )
    own_keys, own_values = ([x[:, :, ranks.rank :: ranks.size].contiguous() for x in kv] for kv in (keys, values))

    def local() -> tuple[Tensor, Tensor]:
        return tatten.bifurcated_attention(q, own_keys, own_values, return_lse=True)

    calls = {
        "local": lambda: local()[0],
        "sharded": lambda: tatten.tree_merge(*local(), ranks.group)[0],
        "one": lambda: tatten.bifurcated_attention(q, keys, values),
    }
    steps = {name: captured(ranks, call) for name, call in calls.items()}
    errors = {}
    for name, kv in {"local": (own_keys, own_values), "sharded": (keys, values), "one": (keys, values)}.items():
        out, ends = steps[name]().flatten(1, 2), (0, batch - 1)
        errors[name] = max(relative_error(out[b], exact(q, *kv, b)) for b in ends)
    require(ranks, errors, 1e-2)
    medians, each = timed(steps, ranks, args.rounds)
    us = {name: 1e6 * x for name, x in medians.items()}
    read = 4 * 128 * (kv_heads * (prefix + batch * suffix) // ranks.size + batch * q_heads)
    flops = 4 * batch * q_heads * 128 * (prefix + suffix) // ranks.size
    return {
        "prefix": prefix,
        "suffix": suffix,
        "batch": batch,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "us": us,
        "over_local": us["sharded"] - us["local"],
        "rank_us": [1e6 * x for x in each["local"]],
        "spread": max(each["local"]) / min(each["local"]),
        "floor_us": 1e6 * max(read / args.rate, flops / args.products),
        "errors": errors,
    }


def op(ranks: Ranks, args: argparse.Namespace) -> list[dict]:
    say(
        f"\nop, us, {ranks.size} ranks\n  prefix batch |    local  sharded      one     floor |",
        "merge adds, ranks differ by",
    )
    rows = []
    for shape in SHAPES[args.device]:
        r = measure_op(shape, ranks, args)
        us = "".join(f"{r['us'][x]:9.1f}" for x in ("local", "sharded", "one"))
        differ = f"{r['over_local']:.1f} us, {r['spread'] - 1:.1%}"
        say(f"{r['prefix']:8} {r['batch']:5} |{us} {r['floor_us']:9.1f} | {differ}")
        rows.append({"section": "op", "ranks": ranks.size, **r})
        release()
    return rows


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def random_kv(ranks: Ranks, sizes: Sizes, batch: int, length: int) -> KV:
    """Return keys and values of each layer, large enough that the logits depend on which of them attention read."""
    shape = batch, sizes.kv_heads, length, sizes.head_dim
    scale = length**0.5 / 2
    return [(randn(ranks, *shape), randn(ranks, *shape).mul_(scale)) for _ in range(sizes.layers)]


def measure_step(samples: Samples, arms: dict[str, SampleStep], ranks: Ranks, args: argparse.Namespace) -> dict:
    torch.manual_seed(1)
    sizes = MODELS[args.device]
    prefix = random_kv(ranks, sizes, 1, samples.prefix)
    suffix = random_kv(ranks, sizes, samples.batch, samples.suffix)
    steps = {name: captured(ranks, arm.make(samples, prefix, suffix)) for name, arm in arms.items()}
    logits = {name: step().clone() for name, step in steps.items()}
    differences = {name: relative_error(x, logits["one"]) for name, x in logits.items()}
    require(ranks, differences, 0.2)  # without half the prefix they would differ by about 1
    medians, _ = timed(steps, ranks, args.rounds)
    return {
        "prefix": samples.prefix,
        "batch": samples.batch,
        "suffix": samples.suffix,
        "ms": {name: 1e3 * x for name, x in medians.items()},
        "floor_ms": {name: 1e3 * arm.bytes(samples) / args.rate for name, arm in arms.items()},
        "faster": medians["one"] / medians["sequence"],
        "differences": differences,
    }


def step(ranks: Ranks, args: argparse.Namespace) -> list[dict]:
    model = Decoder(MODELS[args.device], ranks, torch.bfloat16)
    arms = {name: SampleStep(model, ranks, name) for name in ARMS}
    head = "".join(f"{name:>18}" for name in ARMS)
    say(
        f"\nstep, ms / floor, {ranks.size} ranks, {model.sizes}\n  prefix    n |{head} |",
        "one / sequence, logits differ by",
    )
    rows = []
    for samples in SAMPLES[args.device]:
        r = measure_step(samples, arms, ranks, args)
        times = "".join(f"{r['ms'][x]:9.2f} /{r['floor_ms'][x]:7.2f}" for x in ARMS)
        differ = max(r["differences"].values())
        say(f"{samples.prefix:8} {samples.batch:4} |{times} | {r['faster']:.2f} {differ:.1e}")
        rows.append({"section": "step", "ranks": ranks.size, **r})
        release()
    return rows


SECTIONS = {"op": op, "step": step}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--section", nargs="*", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    join(args.device, datetime.timedelta(minutes=5))
    ranks = Ranks(dist.get_world_size(), args.device)
    args.rate, args.products = read_rate(args.device), product_rate(args.device, torch.bfloat16)
    rates = f"{args.rate / 1e9:.0f} GB/s, {args.products / 1e12:.2f} TFLOP/s"
    say(f"{ranks.size} x {machine(args.device)}, {rates}")
    rows: list[dict] = []
    with torch.no_grad():
        for section in args.section:
            rows += SECTIONS[section](ranks, args)
            if args.json and ranks.rank == 0:
                results.write(args.json, args.device, rows, bytes_per_second=args.rate)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
