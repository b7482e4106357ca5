"""`generate` with a cache in 8 bits beside one in 16 bits, both compiled by tatten: tokens per second, bytes, errors.

    python benchmarks/quantised.py --device cuda      # 32 x 4096 tokens, 32 layers of Llama-3.1-8B
    python benchmarks/quantised.py --device cuda --layers 4 --rounds 1
    python benchmarks/quantised.py                    # a tiny model on a CPU, to try the code

Caches: `transformers.StaticCache` in the dtype of the model, and `tatten.QuantizedStaticCache` in float8 and int8, each
with `--capacity` slots, of which a prompt fills `--used`. A time is that of one more token of all sequences: the
difference of two calls, one of which generates more; calls take turns. Bytes are those of the whole cache.

Errors are relative, `|x - y| / |y|`: of the logits of one step after the prompt in eager mode, where y has the cache in
16 bits and the model random weights; and of attention to keys and values that are normally distributed, where y is in
float64.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable

import torch
import torch.nn.functional as F
from generate import FEW, MANY, MODES
from support import models, results
from support.command_line import arguments, machine
from support.errors import relative_error
from support.timing import in_turns, more_tokens_ms
from torch import Tensor
from transformers import Cache, CompileConfig, PreTrainedModel, StaticCache

import tatten
from tatten.integrations.transformers import cache_kwargs
from tatten.integrations.transformers.quantised import dequantise, quantise

DTYPES = {"float8": torch.float8_e4m3fn, "int8": torch.int8}
WIDE = "16 bits"
FASTER, SMALLER = 1.3, 0.55  # asked for on a GPU: tokens per second over, and bytes of, those in 16 bits


def make_cache(name: str, model: PreTrainedModel, capacity: int) -> Cache:
    if name == WIDE:
        return StaticCache(model.config, max_cache_len=capacity)
    return tatten.QuantizedStaticCache(model.config, capacity, DTYPES[name])


def bytes_of(cache: Cache) -> int:
    if isinstance(cache, tatten.QuantizedStaticCache):
        return cache.nbytes
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def generator(
    model: PreTrainedModel, prompt: Tensor, cache: Cache, config: CompileConfig
) -> tuple[Callable[[int], Tensor], tatten.Report]:
    """Return a compiled function that generates a number of tokens, and the report of its compilation."""

    def generate(tokens: int) -> Tensor:
        cache.reset()
        options = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return model.generate(prompt, **cache_kwargs(cache), compile_config=config, **options)

    with tatten.recording() as report:
        generate(FEW)
    generate(MANY)
    return generate, report


def logits_after(model: PreTrainedModel, prompt: Tensor, cache: Cache) -> Tensor:
    """Return the logits of a step after the prompt, in eager mode."""
    cache.reset()
    model(prompt, **cache_kwargs(cache), logits_to_keep=1)
    token = torch.ones_like(prompt[:, :1])
    return model(token, **cache_kwargs(cache)).logits.float()


def attention_errors(batch: int, length: int, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Return the errors of attention in the shapes of an 8B model, over normally distributed keys and values."""
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(batch, heads, n, 128, generator=generator, device=device).to(dtype)
        for heads, n in ((32, 1), (8, length), (8, length))
    )

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(x[:1].double() for x in (q, k, v)), enable_gqa=True)

    want = exact(query, key, value)
    errors = {WIDE: relative_error(tatten.decode_attention(query, key, value)[:1].double(), want)}
    for name, narrow in DTYPES.items():
        (k, k_scale), (v, v_scale) = (quantise(x, narrow) for x in (key, value))
        scales = {"key_scale": k_scale.squeeze(-1), "value_scale": v_scale.squeeze(-1)}
        got = tatten.decode_attention(query, k, v, **scales)[:1].double()
        errors[name] = relative_error(got, want)
        represented = exact(query, dequantise(k, k_scale, torch.float64), dequantise(v, v_scale, torch.float64))
        errors[f"{name}, beyond its rounding"] = relative_error(got, represented)
    return errors


def measure(model: PreTrainedModel, args: argparse.Namespace) -> list[dict]:
    device = args.device
    prompt = torch.randint(1, model.config.vocab_size, (args.batch, args.used), device=device)
    caches = {name: make_cache(name, model, args.capacity) for name in (WIDE, *DTYPES)}
    logits = {name: logits_after(model, prompt, cache) for name, cache in caches.items()}
    rows = []
    for mode in args.modes:
        torch._dynamo.reset()
        config = CompileConfig(backend="tatten", **MODES[mode])
        config._compile_all_devices = True
        calls, reports = {}, {}
        for name, cache in caches.items():
            calls[name], reports[name] = generator(model, prompt, cache, config)
        took = in_turns(calls, args.rounds, lambda _, call: more_tokens_ms(call, FEW, MANY, device))
        for name, cache in caches.items():
            narrow = name != WIDE
            read = [x for x in reports[name].rewritten if f"k {str(DTYPES[name])[6:]}[" in x.shapes] if narrow else []
            if narrow and len(read) != len(reports[name].rewritten):
                raise RuntimeError(f"{name}: attention must read 8 bits:\n{reports[name]}")
            rows.append(
                {
                    "cache": name,
                    "mode": mode,
                    "batch": args.batch,
                    "capacity": args.capacity,
                    "used": args.used,
                    "layers": args.layers,
                    "token_ms": took[name],
                    "tokens_per_s": args.batch / took[name] * 1e3,
                    "faster": took[WIDE] / took[name],
                    "bytes": bytes_of(cache),
                    "of_16_bits": bytes_of(cache) / (bytes_of(caches[WIDE]) / model.dtype.itemsize * 2),
                    "logits_error": relative_error(logits[name], logits[WIDE]),
                }
            )
        calls.clear()
        gc.collect()
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, help="default: 32; on a CPU 1")
    parser.add_argument("--batch", type=int, help="default: 32; on a CPU 2")
    parser.add_argument("--capacity", type=int, help="slots of the caches; default: 4096; on a CPU 96")
    parser.add_argument("--used", type=int, help="tokens of the prompt; default: as many as leave room to generate")
    parser.add_argument("--modes", nargs="*", default=["default"], choices=list(MODES), help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    small = args.device == "cpu"
    args.layers, args.batch = args.layers or (1 if small else 32), args.batch or (2 if small else 32)
    args.capacity = args.capacity or (96 if small else 4096)
    args.used = args.used or args.capacity - MANY
    print(f"{machine(args.device)}; {args.batch} x {args.capacity} slots, {args.used} used, {args.layers} layers")
    config = models.shape("llama", tiny=small, num_hidden_layers=args.layers)
    model = models.build(config, args.device, torch.float32 if small else torch.bfloat16)
    with torch.no_grad():
        errors = attention_errors(args.batch, args.capacity, model.dtype, args.device)
        print("attention, relative error to float64: " + ", ".join(f"{name} {x:.1e}" for name, x in errors.items()))
        rows = measure(model, args)
    print("mode            cache   | ms a token  tokens/s  over 16 bits |    MB  of 16 bits | logits error")
    for r in rows:
        speed = f"{r['token_ms']:10.2f} {r['tokens_per_s']:9.1f} {r['faster']:12.2f}x"
        size = f"{r['bytes'] / 1e6:7.1f} {r['of_16_bits']:10.3f}"
        print(f"{r['mode']:15} {r['cache']:7} | {speed} | {size} | {r['logits_error']:.1e}")
        if not small and r["cache"] != WIDE:
            met = r["faster"] >= FASTER and r["of_16_bits"] <= SMALLER
            print(f"  at least {FASTER}x and at most {SMALLER} are asked for: {'yes' if met else 'NO'}")
    if args.json:
        results.write(args.json, args.device, rows, attention_errors=errors)


if __name__ == "__main__":
    main()
