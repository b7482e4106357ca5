"""The latency experiment of Bifurcated Attention (arXiv 2403.08845, section 5.2.2): one context, many samples.

    python benchmarks/bifurcated_paper.py --device cuda      # the paper's three models of about 1B parameters
    python benchmarks/bifurcated_paper.py --device cpu       # two layers of two of them, small sizes

The multi-head, multi-group and multi-query models of its Table 3, in bfloat16 with random weights: milliseconds for one
decode step, and the largest batch for which the step fits into memory.

    without   a KV copied for each sequence, transformers' StaticCache, compiled by Inductor
    packed    the same KV, compiled by tatten, which does not repeat its heads; see --variants
    with      tatten's SharedPrefixCache, compiled by tatten

All get the same weights, keys, values and mask (a bool input `[batch, 1, 1, total]`, as `generate` hands it in) and
decode the last token of the suffix. On a GPU each step is a captured CUDA graph. A model is compiled once for all
shapes (batch 1 is another graph), or with --static once for each.

The paper's MLP has two matrices of 4 x 2560 columns; a Llama's has three, here of 6912. It does not name its
vocabulary; with GPT-2's, rounded up to 50304, and tied embeddings the models have 1.080, 1.161 and 1.198 billion
parameters where Table 3 has 1.077, 1.156 and 1.193.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from timing import as_graph, seconds
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import tatten
from tatten.integrations.transformers import SharedPrefixCache

FAMILIES = {"MH": (20, 12), "MG": (4, 15), "MQ": (1, 16)}  # groups, which are the kv heads, and layers
HEAD_DIM, DTYPE = 128, torch.bfloat16
DEFAULTS = {
    "cuda": {
        "families": list(FAMILIES),
        "contexts": [1024, 8192, 32768],
        "batches": [1, 16, 128, 512],
        "suffix": 128,
        "largest": 16384,
        "repeats": 15,
    },
    "cpu": {
        "families": ["MH", "MG"],
        "contexts": [1024, 4096],
        "batches": [1, 4, 16],
        "suffix": 16,
        "largest": 128,
        "layers": 2,
        "kv_gib": 0.25,
        "repeats": 5,
    },
}

Cache = SharedPrefixCache | StaticCache
Result = TypeVar("Result")


@dataclass(frozen=True)
class Sizes:
    context: int
    batch: int
    suffix: int


def build(family: str, layers: int | None, device: str) -> LlamaForCausalLM:
    groups, paper_layers = FAMILIES[family]
    config = LlamaConfig(
        hidden_size=20 * HEAD_DIM,
        intermediate_size=6912,
        num_hidden_layers=layers or paper_layers,
        num_attention_heads=20,
        num_key_value_heads=groups,
        head_dim=HEAD_DIM,
        vocab_size=50304,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(DTYPE).eval().requires_grad_(False)


def randn(model: LlamaForCausalLM, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values, layer by layer."""
    generator = torch.Generator(model.device).manual_seed(seed)
    shape = batch, model.config.num_key_value_heads, length, HEAD_DIM
    for _ in range(model.config.num_hidden_layers):
        key, value = (torch.randn(shape, generator=generator, device=model.device, dtype=DTYPE) for _ in range(2))
        yield key, value


def shared_cache(model: LlamaForCausalLM, sizes: Sizes) -> SharedPrefixCache:
    root = SharedPrefixCache(model.config)
    for layer, (key, value) in enumerate(randn(model, 1, sizes.context, seed=1)):
        root.update(key, value, layer)
    return root.fork(sizes.batch, capacity=sizes.suffix)


def copied_cache(model: LlamaForCausalLM, sizes: Sizes) -> StaticCache:
    cache = StaticCache(model.config, max_cache_len=sizes.context + sizes.suffix)
    for i, (key, value) in enumerate(randn(model, 1, sizes.context, seed=1)):
        token = key[:, :, :1].expand(sizes.batch, -1, -1, -1)
        cache.update(token, token, i)  # allocates
        cache.layers[i].keys[:, :, : sizes.context] = key
        cache.layers[i].values[:, :, : sizes.context] = value
    return cache


def fill_suffixes(model: LlamaForCausalLM, cache: Cache, sizes: Sizes) -> None:
    for layer, (key, value) in zip(cache.layers, randn(model, sizes.batch, sizes.suffix, seed=2), strict=True):
        held = layer.kv if isinstance(cache, SharedPrefixCache) else layer
        held.keys[:, :, -sizes.suffix :] = key
        held.values[:, :, -sizes.suffix :] = value


VARIANTS = {"without": ("inductor", copied_cache), "packed": ("tatten", copied_cache), "with": ("tatten", shared_cache)}


def kv_bytes(model: LlamaForCausalLM, variant: str, sizes: Sizes) -> int:
    config = model.config
    tokens = (1 if variant == "with" else sizes.batch) * sizes.context + sizes.batch * sizes.suffix
    return tokens * 2 * config.num_hidden_layers * config.num_key_value_heads * HEAD_DIM * DTYPE.itemsize


def decode_step(forward: Callable[..., object], cache: Cache, sizes: Sizes, device: str) -> Callable[[], Tensor]:
    """A function that decodes the last token of the suffix and returns the logits."""
    last = sizes.context + sizes.suffix - 1
    token = torch.arange(1, sizes.batch + 1, device=device).unsqueeze(1)
    position = torch.full((sizes.batch, 1), last, device=device)
    mask = torch.ones(sizes.batch, 1, 1, last + 1, dtype=torch.bool, device=device)

    def step() -> Tensor:
        for layer in cache.layers:
            if isinstance(cache, SharedPrefixCache):
                layer.kv.length.fill_(sizes.suffix - 1)
            else:
                layer.cumulative_length.fill_(last)
        return forward(token, position_ids=position, attention_mask=mask, past_key_values=cache).logits

    return step


class Runner:
    """A model, compiled for one variant."""

    def __init__(self, model: LlamaForCausalLM, variant: str, args: argparse.Namespace):
        self.model, self.variant, self.args = model, variant, args
        backend, self.make_cache = VARIANTS[variant]
        torch._dynamo.reset()
        self.forward = torch.compile(model, backend=backend, dynamic=not args.static, fullgraph=True)

    def latency(self, sizes: Sizes) -> tuple[float, Tensor]:
        """Milliseconds per step, and the logits."""
        if self.args.static:
            torch._dynamo.reset()
        cache, device = self.make_cache(self.model, sizes), self.args.device
        fill_suffixes(self.model, cache, sizes)
        step = decode_step(self.forward, cache, sizes, device)
        for _ in range(3):
            step()
        if device == "cuda":
            step = as_graph(step)
        logits = step().cpu()
        return 1e3 * statistics.median(seconds(step, device) for _ in range(self.args.repeats)), logits

    def fits(self, sizes: Sizes) -> bool:
        if self.args.kv_gib is not None and kv_bytes(self.model, self.variant, sizes) > self.args.kv_gib * 2**30:
            return False

        def one_step(sizes: Sizes) -> float:
            step = decode_step(self.forward, self.make_cache(self.model, sizes), sizes, self.args.device)
            return step()[-1, -1, -1].item()

        return unless_out_of_memory(one_step, sizes) is not None

    def largest_batch(self, context: int) -> int:
        """By doubling, then by halving the gap, down to a sixteenth; `args.largest` if so many fit."""
        fits = lambda batch: self.fits(Sizes(context, batch, self.args.suffix))
        fitting, failing = 0, min(16, self.args.largest)
        while fits(failing):
            if failing == self.args.largest:
                return failing
            fitting, failing = failing, min(2 * failing, self.args.largest)
        while failing - fitting > max(1, fitting // 16):
            middle = (fitting + failing) // 2
            fitting, failing = (middle, failing) if fits(middle) else (fitting, middle)
        return fitting


def unless_out_of_memory(fn: Callable[[Sizes], Result], sizes: Sizes) -> Result | None:
    try:
        return fn(sizes)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def measure(family: str, args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """The rows of both tables, for all sizes and variants."""
    model = build(family, args.layers, args.device)
    sizes = [Sizes(context, batch, args.suffix) for context in args.contexts for batch in args.batches]
    rows = {s: {"family": family, **asdict(s)} for s in sizes}
    largest = {context: {"family": family, "context": context} for context in args.contexts}
    logits: dict[Sizes, Tensor] = {}
    for variant in args.variants:
        start = time.perf_counter()
        with torch.no_grad(), tatten.recording() as report:
            runner = Runner(model, variant, args)
            for s in sizes:
                found = unless_out_of_memory(runner.latency, s)
                rows[s][f"{variant}_ms"] = found and found[0]
                rows[s][f"{variant}_kv_gib"] = kv_bytes(model, variant, s) / 2**30
                if found and s in logits:
                    rows[s]["difference"] = ((found[1].float() - logits[s]).norm() / logits[s].norm()).item()
                elif found:
                    logits[s] = found[1].float()
            for context in args.contexts if args.largest else ():
                largest[context][variant] = runner.largest_batch(context)
        done = f"{len(report.rewritten)} calls rewritten, {len(report.declined)} left"
        print(f"{family}, {variant}: {time.perf_counter() - start:.0f} s; {done}", flush=True)
    return list(rows.values()), list(largest.values())


def show(rows: list[dict], largest: list[dict], variants: list[str], bound: int) -> None:
    print("family context batch |" + "".join(f"{f'{v} ms':>12}" for v in variants), end="")
    print(" | speedup |" + "".join(f"{f'{v} KV GiB':>16}" for v in variants) + " | logits differ by")
    for r in rows:
        times = "".join("         OOM" if r[f"{v}_ms"] is None else f"{r[f'{v}_ms']:12.2f}" for v in variants)
        a, b = (r[f"{v}_ms"] for v in (variants[0], variants[-1]))
        speedup = f"{a / b:6.2f}x" if a and b else "      -"
        kv = "".join(f"{r[f'{v}_kv_gib']:16.3f}" for v in variants)
        difference = f"{r['difference']:.1e}" if "difference" in r else "-"
        print(f"{r['family']:6} {r['context']:7} {r['batch']:5} |{times} | {speedup} |{kv} | {difference}")
    for r in largest if bound else ():
        most = ", ".join(f"{r[v]}{'+' if r[v] == bound else ''} {v}" for v in variants)
        ratio = f"{r[variants[-1]] / r[variants[0]]:.1f}" if r[variants[0]] else "-"
        print(f"{r['family']:6} {r['context']:7} largest batch: {most}; ratio {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES))
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=["without", "with"])
    parser.add_argument("--contexts", type=int, nargs="*")
    parser.add_argument("--batches", type=int, nargs="*")
    parser.add_argument("--suffix", type=int, help="tokens that each sequence has to itself")
    parser.add_argument("--layers", type=int, help="of each model; default: the paper's, on a CPU 2")
    parser.add_argument("--largest", type=int, help="try batches up to this one, by doubling from 16; 0: try none")
    parser.add_argument("--kv-gib", type=float, help="KV that counts as out of memory in this search; on a CPU 0.25")
    parser.add_argument("--static", action="store_true", help="compile for each shape, without the search")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)

    if args.static:
        args.largest = 0
    # A float that may vary, as it may with dynamic shapes, makes Dynamo compile everything twice.
    torch._dynamo.config.specialize_float = True
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}; suffix {args.suffix}; variants {', '.join(args.variants)}")
    latency, largest = [], []
    for family in args.families:
        rows, most = measure(family, args)
        show(rows, most, args.variants, args.largest)
        latency += rows
        largest += most
        if args.json:
            args.json.write_text(json.dumps({"device": name, "latency": latency, "largest": largest}, indent=1))


if __name__ == "__main__":
    main()
