"""A prefill of which each rank runs its share, beside one GPU, and a prompt that is too long for one.

    torchrun --nproc-per-node 2 benchmarks/prefill.py --device cuda                     # about eight minutes
    torchrun --nproc-per-node 2 benchmarks/prefill.py --device cuda --section prompt    # two or three
    torchrun --nproc-per-node 2 benchmarks/prefill.py --device cpu                      # gloo, tiny shapes

    prompt    8192, 32768 and 131072 tokens of a model in the shape of Llama-3.1-8B, random weights, bfloat16
        sdpa     a call of the model on one GPU: SDPA, with whatever kernel PyTorch picks
        alone    `cache.prefill` over a mesh of one rank: the kernels of `striped` without its ring
        striped  `cache.prefill` over all ranks
    long      a million tokens over all ranks, in chunks: once, and whether its logits are finite

Logits of the last token are checked against those of `sdpa` before anything is timed; values are large, so that the
logits depend on all keys that attention read. Times are those of the slowest rank, medians. The floor is the matrix
products of a rank's share, causal attention counted half, at the rate of a large matrix product. Ring bytes are what a
rank sends, computed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from support import models, results
from support.command_line import arguments, machine
from support.timing import product_rate
from support.together import Ranks, join, say
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import DynamicCache, PreTrainedModel

from tatten.integrations.transformers import ShardedKVCache, cache_kwargs

LENGTHS = {
    "cuda": {"prompt": [8192, 32768, 131072], "long": [1 << 20]},
    "cpu": {"prompt": [128, 512], "long": [2048]},
}
CHUNK = {"cuda": 65536, "cpu": 512}
MOST = 0.2  # that logits may differ; where half of the prompt was another, they differ by 0.4 or more


def make_model(device: str, layers: int | None, length: int) -> PreTrainedModel:
    """Return a Llama with the same random weights on all ranks; its logits depend on attention to all tokens."""
    changes: dict[str, object] = {"num_hidden_layers": layers} if layers else {}
    if device == "cuda":
        changes["vocab_size"] = 128256
    rope = {"rope_type": "default", "rope_theta": 5e5}
    changes |= {"max_position_embeddings": 1 << 20, "rope_parameters": rope}
    model = models.build(models.shape("llama", tiny=device == "cpu", **changes), device, torch.bfloat16, "tatten")
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.mul_(length**0.5 / 4)
    return model


def make_prompt(device: str, vocabulary: int, length: int) -> Tensor:
    rng = torch.Generator(device).manual_seed(1)
    return torch.randint(vocabulary, (1, length), generator=rng, device=device)


def products(model: PreTrainedModel, tokens: int) -> int:
    """Return the floating point operations of a prefill."""
    weights = sum(x.weight.numel() for x in model.model.modules() if isinstance(x, nn.Linear))
    return 2 * tokens * weights + 2 * tokens**2 * model.config.hidden_size * model.config.num_hidden_layers


def ring_bytes(model: PreTrainedModel, ranks: int, tokens: int, chunk: int | None) -> int:
    """Return the bytes that a rank sends in a prefill of one prompt."""
    config, each = model.config, -(-tokens // ranks)
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    step = each if chunk is None else chunk // ranks
    return (ranks - 1) * token * sum(min(end, each) for end in range(step, each + step, step))


def striped(model: PreTrainedModel, mesh: DeviceMesh, prompt: Tensor, chunk: int | None) -> Tensor:
    cache = ShardedKVCache(model.config, mesh, capacity=prompt.shape[1] + 256)
    return cache.prefill(model, prompt, chunk)


def by_sdpa(model: PreTrainedModel, prompt: Tensor) -> Tensor:
    return model(prompt, **cache_kwargs(DynamicCache(config=model.config)), logits_to_keep=1).logits[:, -1]


def measured(step: Callable[[], Tensor], ranks: Ranks) -> tuple[float, float]:
    """Return the seconds of a step on the slowest rank, and the most GiB of memory that a rank had; on a CPU 0."""
    gc.collect()
    if ranks.device == "cpu":
        return ranks.seconds(step), 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return ranks.seconds(step), ranks.largest(torch.cuda.max_memory_allocated() / 2**30)


def difference(ranks: Ranks, name: str, logits: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of logits on any rank; raise ArithmeticError on all ranks if it is large."""
    logits, expected = logits.float(), expected.float()
    error = ranks.largest(((logits - expected).norm() / expected.norm()).nan_to_num(math.inf).item())
    if error > MOST:
        raise ArithmeticError(f"logits of {name} differ by {error:.2f}, allowed {MOST}")
    return error


def prompt(ranks: Ranks, args: argparse.Namespace, length: int) -> list[dict]:
    model = make_model(args.device, args.layers, length)
    ids = make_prompt(args.device, model.config.vocab_size, length)
    one = init_device_mesh(args.device, (ranks.size, 1), mesh_dim_names=("copy", "kv"))
    arms: dict[str, tuple[int, Callable[[], Tensor]]] = {
        "sdpa": (1, lambda: by_sdpa(model, ids)),
        "alone": (1, lambda: striped(model, one, ids, args.chunk)),
        "striped": (ranks.size, lambda: striped(model, args.mesh, ids, args.chunk)),
    }
    logits = {name: step() for name, (_, step) in arms.items()}
    errors = {name: difference(ranks, name, got, logits["sdpa"]) for name, got in logits.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for _ in range(args.rounds):
        for name, (_, step) in arms.items():
            times[name].append(measured(step, ranks))
    layers = model.config.num_hidden_layers
    say(f"\nprompt of {length} tokens, {layers} layers, {ranks.size} ranks, chunk {args.chunk}")
    say("      arm |  seconds    floor  / floor |  sdpa /  alone / | ring GB  GiB a rank  logits differ")
    rows = []
    median = {name: statistics.median(x for x, _ in seconds_and_gib) for name, seconds_and_gib in times.items()}
    for name, (size, _) in arms.items():
        seconds, floor = median[name], products(model, length) / size / args.rate
        row = {"section": "prompt", "arm": name, "ranks": size, "length": length, "layers": layers, "chunk": args.chunk}
        row |= {"s": seconds, "floor_s": floor, "faster": {x: median[x] / seconds for x in ("sdpa", "alone")}}
        row |= {"ring_bytes": ring_bytes(model, size, length, args.chunk), "difference": errors[name]}
        row |= {"gib": max(x for _, x in times[name]), "trials_s": [x for x, _ in times[name]]}
        ratios = f"{row['faster']['sdpa']:7.2f} {row['faster']['alone']:8.2f}"
        more = f"{row['ring_bytes'] / 1e9:7.2f} {row['gib']:11.1f} {row['difference']:14.1e}"
        say(f"{name:>9} | {seconds:8.3f} {floor:8.3f} {seconds / floor:8.2f} | {ratios} | {more}")
        rows.append(row)
    return rows


def long(ranks: Ranks, args: argparse.Namespace, length: int) -> list[dict]:
    chunk = args.chunk or CHUNK[args.device]
    model = make_model(args.device, args.layers, length)
    ids = make_prompt(args.device, model.config.vocab_size, length)
    striped(model, args.mesh, ids[:, : 2 * ranks.size], None)  # connects the ranks
    logits = torch.empty(0)

    def step() -> Tensor:
        nonlocal logits
        logits = striped(model, args.mesh, ids, chunk)
        return logits

    seconds, gib = measured(step, ranks)
    floor, layers = products(model, length) / ranks.size / args.rate, model.config.num_hidden_layers
    finite = ranks.largest(0.0 if logits.isfinite().all() else 1.0) == 0.0
    sends = ring_bytes(model, ranks.size, length, chunk)
    say(f"\nlong: {length} tokens, {layers} layers, {ranks.size} ranks, chunk {chunk}")
    say(
        f"  {seconds:.1f} s, {seconds / floor:.2f} times the floor of {floor:.1f} s, {length / seconds:.0f} tokens/s, "
        f"{gib:.1f} GiB a rank, {sends / 1e9:.1f} GB sent by a rank, logits {'finite' if finite else 'NOT FINITE'}"
    )
    row = {"section": "long", "ranks": ranks.size, "length": length, "layers": layers, "chunk": chunk, "s": seconds}
    return [row | {"floor_s": floor, "gib": gib, "ring_bytes": sends, "finite": finite}]


SECTIONS = {"prompt": prompt, "long": long}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--section", nargs="*", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--layers", type=int, help="default: 32, on a CPU 2")
    parser.add_argument("--lengths", nargs="*", type=int, help="of the prompt, for all sections; default: each its own")
    parser.add_argument("--chunk", type=int, help="default: all of `prompt`, and 65536 tokens of `long`, on a CPU 512")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    join(args.device, datetime.timedelta(minutes=10))
    ranks = Ranks(dist.get_world_size(), args.device)
    args.mesh = init_device_mesh(args.device, (ranks.size,), mesh_dim_names=("kv",))
    args.rate = product_rate(args.device, torch.bfloat16)
    say(f"{ranks.size} x {machine(args.device)}, {args.rate / 1e12:.2f} TFLOP/s")
    rows: list[dict] = []
    with torch.no_grad():
        for section in args.section:
            for length in args.lengths or LENGTHS[args.device][section]:
                rows += SECTIONS[section](ranks, args, length)
            if args.json and ranks.rank == 0:
                results.write(args.json, args.device, rows, products_per_second=args.rate)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
