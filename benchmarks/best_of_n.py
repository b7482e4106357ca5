"""One decode step of n samples from one prompt, at Llama-2-7B's shapes: how far it is from reading everything once.

    python benchmarks/best_of_n.py --device cuda                     # about three minutes, most of them compilation
    python benchmarks/best_of_n.py --device cuda --n 32 --static --variants with
    python benchmarks/best_of_n.py --device cpu                      # two layers of 256 columns, to try the code

All 32 layers, multi-head, bfloat16, with random weights, keys and values; n sequences share a context of 8192 tokens
and have 128 tokens of their own, of which the step decodes the last.

    with      tatten's SharedPrefixCache, compiled by tatten
    without   a KV copied for each sequence, transformers' StaticCache, compiled by Inductor, until memory runs out

On a GPU each step is a captured CUDA graph. A model is compiled once for all n (n = 1 is another graph), or with
--static once for each. The floor is the weights, the prefix and the suffixes once, at the best rate of a plain read or
copy in the same run. The authors' fork of gpt-fast (Bifurcated Attention, arXiv 2403.08845) published 13.5 ms for
n = 32 on an H100.
"""

from __future__ import annotations

import argparse
import time

import torch
from support import results
from support.command_line import arguments, machine
from support.errors import relative_error
from support.samples import DTYPE, HEAD_DIM, Runner, Sizes, kv_bytes, unless_out_of_memory
from support.timing import read_rate
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tatten

DEFAULTS = {
    "cuda": {"n": [1, 4, 16, 32, 64, 128, 256], "layers": 32, "context": 8192, "suffix": 128, "repeats": 15},
    "cpu": {"n": [1, 4, 8], "layers": 2, "context": 1024, "suffix": 16, "repeats": 5},
}


def build(layers: int, device: str) -> LlamaForCausalLM:
    hidden, intermediate = (4096, 11008) if device == "cuda" else (2 * HEAD_DIM, 688)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        vocab_size=32000,
        max_position_embeddings=1 << 17,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval().requires_grad_(False)


def measure(
    model: LlamaForCausalLM, variant: str, rows: dict[int, dict], rate: float, args: argparse.Namespace
) -> None:
    """Fill in the milliseconds for each n, None where memory runs out, and the difference of two variants' logits."""
    start = time.perf_counter()
    # A step reads one row of the embedding for each sequence.
    weights = sum(p.nbytes for p in model.parameters()) - model.model.embed_tokens.weight.nbytes
    fits = True
    with torch.no_grad(), tatten.recording() as report:
        runner = Runner(model, variant, args)
        for n, row in rows.items():
            sizes = Sizes(args.context, n, args.suffix)
            timed = unless_out_of_memory(runner.latency, sizes) if fits else None
            fits = timed is not None
            row[f"{variant}_ms"], logits = timed or (None, None)
            row["floor_ms"] = 1e3 * (weights + kv_bytes(model, "with", sizes)) / rate
            row[f"{variant}_kv_gib"] = kv_bytes(model, variant, sizes) / 2**30
            if logits is not None:
                compare(row, logits.float())
            shown = f"{row[f'{variant}_ms']:.2f} ms, floor {row['floor_ms']:.2f} ms" if fits else "out of memory"
            print(f"{variant}, n = {n}: {shown}", flush=True)
    done = f"{len(report.rewritten)} calls rewritten, {len(report.declined)} left"
    print(f"{variant}: {time.perf_counter() - start:.0f} s; {done}", flush=True)


def compare(row: dict, logits: Tensor) -> None:
    other = row.setdefault("logits", logits)
    if other is not logits:
        row["difference"] = relative_error(logits, other)


def show(rows: dict[int, dict], variants: list[str]) -> None:
    print("   n |" + "".join(f"{f'{v} ms':>12}" for v in variants), end="")
    print("    floor ms |" + "".join(f"{f'{v}/floor':>15}" for v in variants), end="")
    print(" |" + "".join(f"{f'{v} KV GiB':>16}" for v in variants) + " | logits differ by")
    for n, r in rows.items():
        times = "".join("         OOM" if r[f"{v}_ms"] is None else f"{r[f'{v}_ms']:12.2f}" for v in variants)
        ratios = "".join(
            "              -" if r[f"{v}_ms"] is None else f"{r[f'{v}_ms'] / r['floor_ms']:14.2f}x" for v in variants
        )
        kv = "".join(f"{r[f'{v}_kv_gib']:16.2f}" for v in variants)
        difference = f"{r['difference']:.1e}" if "difference" in r else "-"
        print(f"{n:4} |{times} {r['floor_ms']:11.2f} |{ratios} |{kv} | {difference}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--n", type=int, nargs="*", help="samples, in ascending order")
    parser.add_argument("--variants", nargs="*", choices=["with", "without"], default=["with", "without"])
    parser.add_argument("--context", type=int)
    parser.add_argument("--suffix", type=int, help="tokens that each sequence has to itself")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--static", action="store_true", help="compile for each n")
    parser.add_argument("--repeats", type=int)
    args = parser.parse_args()
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)

    # Else, with dynamic shapes, Dynamo treats floats as dynamic too, and compiles everything twice.
    torch._dynamo.config.specialize_float = True
    rate = read_rate(args.device)
    model = build(args.layers, args.device)
    size = sum(p.numel() for p in model.parameters()) / 1e9
    print(f"{machine(args.device)}, {rate / 1e9:.0f} GB/s; {size:.2f}B parameters, {args.layers} layers")
    print(f"context {args.context}, suffix {args.suffix}", flush=True)
    rows: dict[int, dict] = {n: {"n": n} for n in args.n}
    for variant in args.variants:
        measure(model, variant, rows, rate, args)
    show(rows, args.variants)
    if args.json:
        json_rows = [{key: value for key, value in row.items() if key != "logits"} for row in rows.values()]
        results.write(
            args.json, args.device, json_rows, bytes_per_second=rate, context=args.context, suffix=args.suffix
        )


if __name__ == "__main__":
    main()
