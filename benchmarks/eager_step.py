"""A decode step without torch.compile, by wall clock: `attn_implementation` "eager", "sdpa" and "tatten".

    python benchmarks/eager_step.py --device cuda    # shapes of Llama-3.1-8B, gpt-oss-20b and Gemma-2-9b, 16 layers
    python benchmarks/eager_step.py --device cpu     # smaller ones; a minute

Models of transformers with random weights and a static cache of `--capacity` slots, of which `--used` are used. The
logits of each are compared with those of "eager"; the table has the largest difference. Steps take turns; a time is
the median of their seconds from call to logits on the host. gpt-oss has no SDPA. Where a release of transformers lets
Gemma 2 take SDPA, that is without its soft cap.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from support import models, results
from support.command_line import arguments, machine
from support.timing import in_turns
from transformers import PreTrainedModel, StaticCache

import tatten.integrations.transformers  # noqa: F401  (registers "tatten")
from tatten.integrations.transformers import cache_kwargs

ATTENTIONS = "eager", "sdpa", "tatten"
MODELS = "llama", "gpt_oss", "gemma2"


def build(name: str, attention: str, layers: int, device: str) -> PreTrainedModel:
    sizes = {"num_hidden_layers": layers, "vocab_size": 32000}
    if name == "gpt_oss":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    small = device == "cpu"
    config = models.shape(name, tiny=small, **sizes)
    return models.build(config, device, torch.float32 if small else torch.bfloat16, attention)


class Step:
    """A model's next step: each call adds tokens to a cache that already holds `used`."""

    def __init__(self, model: PreTrainedModel, batch: int, used: int, capacity: int, queries: int):
        config, device = model.config, model.device
        self.model, self.queries, self.length = model, queries, used
        self.cache = StaticCache(config, max_cache_len=capacity)
        generator = torch.Generator(device).manual_seed(0)
        shape = batch, config.num_key_value_heads, used, config.head_dim
        for layer in range(config.num_hidden_layers):
            kv = (torch.randn(shape, generator=generator, device=device, dtype=model.dtype) for _ in "kv")
            self.cache.update(*kv, layer)
        self.tokens = torch.ones(batch, queries, dtype=torch.int64, device=device)

    def __call__(self) -> torch.Tensor:
        self.length += self.queries
        seen = self.tokens.new_ones(len(self.tokens), self.length)
        seen[0, :3] = 0
        return self.model(self.tokens, attention_mask=seen, **cache_kwargs(self.cache)).logits.float().cpu()


def measure(name: str, batch: int, queries: int, args: Any) -> dict[str, Any]:
    steps = {}
    for attention in ATTENTIONS:
        if attention == "sdpa" and not steps["eager"].model._supports_sdpa:
            continue
        model = build(name, attention, args.layers, args.device)
        steps[attention] = Step(model, batch, args.used, args.capacity, queries)
    want = steps["eager"]()
    error = {attention: (step() - want).abs().max().item() for attention, step in steps.items() if attention != "eager"}
    for step in steps.values():
        step()

    def milliseconds(_: str, step: Step) -> float:
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3

    return {"ms": in_turns(steps, args.rounds, milliseconds), "error": error}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--queries", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--used", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    small = args.device == "cpu"
    args.capacity, args.used = args.capacity or (4096 if small else 8192), args.used or 1000
    print(f"{machine(args.device)}; {args.layers} layers, {args.capacity} slots, {args.used} used")
    print("model    batch queries |    eager     sdpa   tatten ms | of eager  of the better | error")
    rows_so_far = []
    with torch.inference_mode():
        for name in args.models:
            for batch in args.batch:
                for queries in args.queries:
                    row = {"model": name, "batch": batch, "queries": queries} | measure(name, batch, queries, args)
                    rows_so_far.append(row | {"capacity": args.capacity, "used": args.used, "layers": args.layers})
                    ms = row["ms"]
                    others = [ms[x] for x in ATTENTIONS[:2] if x in ms]
                    shown = " ".join(f"{ms[x]:8.2f}" if x in ms else " " * 8 for x in ATTENTIONS)
                    print(
                        f"{name:8} {batch:5} {queries:7} | {shown}    | {ms['tatten'] / ms['eager']:8.3f} "
                        f"{ms['tatten'] / min(others):14.3f} | {row['error']['tatten']:.1e}",
                        flush=True,
                    )
                    if args.json:
                        results.write(args.json, args.device, rows_so_far)


if __name__ == "__main__":
    main()
