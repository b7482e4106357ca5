"""The latency experiment of Bifurcated Attention (arXiv 2403.08845, section 5.2.2): one context, many samples.

    python benchmarks/bifurcated_paper.py --device cuda      # the paper's three models of about 1B parameters
    python benchmarks/bifurcated_paper.py --device cpu       # two layers of two of them, small sizes

The multi-head, multi-group and multi-query models of its Table 3, in bfloat16 with random weights: milliseconds for one
decode step, and the largest batch for which the step fits into memory.

    without   a KV copied for each sequence, transformers' StaticCache, compiled by Inductor
    packed    the same KV, compiled by tatten, which does not repeat its heads; see --variants
    with      tatten's SharedPrefixCache, compiled by tatten

All get the same weights, keys, values and mask (a bool input `[batch, 1, 1, total]`, as `generate` passes it) and
decode the last token of the suffix. On a GPU each step is a captured CUDA graph. A model is compiled once for all
shapes (batch 1 is another graph), or with --static once for each.

The paper's MLP has two matrices of 4 x 2560 columns; a Llama's has three, here of 6912. It does not name its
vocabulary; with GPT-2's, rounded up to 50304, and tied embeddings the models have 1.080, 1.161 and 1.198 billion
parameters where Table 3 has 1.077, 1.156 and 1.193.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

import torch
from support import results
from support.command_line import arguments, machine
from support.errors import relative_error
from support.samples import DTYPE, HEAD_DIM, VARIANTS, Runner, Sizes, kv_bytes, unless_out_of_memory
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tatten

FAMILIES = {"MH": (20, 12), "MG": (4, 15), "MQ": (1, 16)}  # groups, which are the kv heads, and layers
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


def measure(family: str, args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """Return the rows of both tables, for all sizes and variants."""
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
                timed = unless_out_of_memory(runner.latency, s)
                rows[s][f"{variant}_ms"] = timed and timed[0]
                rows[s][f"{variant}_kv_gib"] = kv_bytes(model, variant, s) / 2**30
                if timed and s in logits:
                    rows[s]["difference"] = relative_error(timed[1].float(), logits[s])
                elif timed:
                    logits[s] = timed[1].float()
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
    parser = arguments(__doc__)
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
    args = parser.parse_args()
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)

    if args.static:
        args.largest = 0
    # Else, with dynamic shapes, Dynamo treats floats as dynamic too, and compiles everything twice.
    torch._dynamo.config.specialize_float = True
    print(f"{machine(args.device)}; suffix {args.suffix}; variants {', '.join(args.variants)}")
    latency, largest = [], []
    for family in args.families:
        rows, most = measure(family, args)
        show(rows, most, args.variants, args.largest)
        latency += rows
        largest += most
        if args.json:
            results.write(args.json, args.device, latency, largest=largest)


if __name__ == "__main__":
    main()
