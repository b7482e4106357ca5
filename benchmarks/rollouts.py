"""Rollouts as GRPO draws them, end to end: tokens per second by the number of samples of each prompt.

    python benchmarks/rollouts.py --device cuda    # about four minutes, of which compilation takes more than half
    python benchmarks/rollouts.py --device cpu     # a tiny model, to try the code

What is timed is `examples/rollouts.py`: prompts of up to 2048 tokens, on a model in the shape of Llama-3.1-8B with
random weights, and 256 tokens of each sample, none of which ends before.

    inductor  `generate` from each prompt as often as it has samples, with a static cache, compiled by Inductor
    tatten    the same, compiled by tatten
    fork      the prompts once, and a fork of a `SharedPrefixCache`, compiled by tatten

Each is compiled, and on a GPU captured, by a few steps beforehand; then one rollout is drawn, prefill included. All
draw with the same noise. In float32 they must draw the same tokens. In bfloat16 rounding makes texts part, so there it
is a quarter at least of their first tokens.
"""

from __future__ import annotations

import argparse
import gc
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support import results
from support.command_line import arguments, machine
from torch import Tensor
from transformers import PreTrainedModel

example = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "examples" / "rollouts.py")))
DEFAULTS = {
    "cuda": {"shape": "8b", "prompts": 8, "prompt_len": 2048, "samples": [4, 16], "new_tokens": 256},
    "cpu": {"shape": "tiny", "prompts": 2, "prompt_len": 200, "samples": [2, 4], "new_tokens": 16},
}
ARMS: dict[str, Callable[[PreTrainedModel, Any], Any]] = {
    "inductor": lambda model, task: example.Duplicated(model, task, "inductor").draw(1),
    "tatten": lambda model, task: example.Duplicated(model, task, "tatten").draw(1),
    "fork": lambda model, task: example.Shared(model, task).draw(1)[0],
}


def check(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> float:
    """Return the share of sequences with equal first tokens; raise if it is small, or a token differs in float32."""
    print(f"  {example.compare(ours, theirs, dtype)}", flush=True)
    first = (ours[:, 0] == theirs[:, 0]).double().mean().item()
    if first < 0.25:
        raise ArithmeticError(f"at least 25% of the first tokens must be the same, got {first:.0%}")
    return first


def measure(model: PreTrainedModel, samples: int, args: argparse.Namespace) -> dict[str, object]:
    """Return a row: rollouts with `samples` samples of each prompt."""
    torch.manual_seed(0)
    task = example.make_task(
        model.config.vocab_size, argparse.Namespace(**{**vars(args), "samples": samples, "ends": 0})
    )
    drawn = {}
    for name, draw in ARMS.items():
        torch._dynamo.reset()
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()  # a static cache takes a third of an H200
        drawn[name] = draw(model, task)
    row: dict[str, object] = {"samples": samples, "prompts": args.prompts, "prompt_len": args.prompt_len}
    row |= {"new_tokens": args.new_tokens, "layers": model.config.num_hidden_layers, "dtype": str(args.dtype)[6:]}
    for column in ("seconds", "tokens_per_second", "steps_per_second", "prefilled", "kv_bytes"):
        row[column] = {name: getattr(rollout, column) for name, rollout in drawn.items()}
    tokens = {name: rollout.tokens for name, rollout in drawn.items()}
    return row | {"first": {name: check(tokens["fork"], tokens[name], args.dtype) for name in ("inductor", "tatten")}}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=example.SHAPES, help="default: 8b, on a CPU tiny")
    parser.add_argument("--prompts", type=int, help="default: 8, on a CPU 2")
    parser.add_argument("--prompt-len", type=int, help="of the longest; default: 2048, on a CPU 200")
    parser.add_argument("--samples", nargs="*", type=int, help="of each prompt; default: 4 16, on a CPU 2 4")
    parser.add_argument("--new-tokens", type=int, help="of each sample; default: 256, on a CPU 16")
    args = parser.parse_args()
    for name, default in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    print(f"{machine(args.device)}, {args.shape}, {args.prompts} prompts, {args.new_tokens} tokens of each sample")
    model, rows = example.build(args), []
    for samples in args.samples:
        row = measure(model, samples, args)
        print(f"{samples:3} samples |   seconds  tokens/s   steps/s   prefilled   KV GB | tokens/s of fork to it")
        for name, speed in row["tokens_per_second"].items():
            cells = f"{row['seconds'][name]:9.2f} {speed:9.0f} {row['steps_per_second'][name]:9.1f}"
            memory = f"{row['prefilled'][name]:11} {row['kv_bytes'][name] / 1e9:7.2f}"
            print(f"{name:>11} | {cells} {memory} | {row['tokens_per_second']['fork'] / speed:.2f}", flush=True)
        rows.append(row)
        if args.json:
            results.write(args.json, args.device, rows)


if __name__ == "__main__":
    main()
