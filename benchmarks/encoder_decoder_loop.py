"""Milliseconds of a token of an encoder-decoder: `generate` in eager mode, `generate` under Inductor, `decode_loop`.

    python benchmarks/encoder_decoder_loop.py --device cuda     # 32 decoder layers of Whisper-large-v3, 24 of T5-3B
    python benchmarks/encoder_decoder_loop.py                   # on a CPU: layers of the same kinds, tiny, one source

A time is that of one more token by wall clock: the difference of two calls, one of which generates more. Calls take
turns. Weights are random, in bfloat16 on a GPU, so that texts soon part where two scores are close. `generate_inductor`
compiles the model with a static cache, in mode `reduce-overhead`. Whisper has one layer in its encoder, which reads
3000 frames to 1500 states; sources of T5 have 512 tokens. The floor is each weight that a step reads, and each key and
value in use, once, at the rate of a plain read.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from encoder_decoder import MODELS
from support import results
from support.command_line import arguments, machine
from support.timing import clock, in_turns, more_tokens_ms, read_rate
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel

from tatten.integrations.transformers import DecodeLoop

FEW, MANY = 8, 136  # tokens of the two calls
CANDIDATES = "generate", "generate_inductor", "loop"
# A step reads one row of the positions, and keys and values of the source from the cache.
UNREAD = "embed_positions", "encoder_attn.k_proj", "encoder_attn.v_proj", "EncDecAttention.k.", "EncDecAttention.v."


def build(name: str, device: str, layers: int | None) -> tuple[PreTrainedModel, int]:
    """Return the model, whose texts never end, and the number of tokens of its sources."""
    torch.manual_seed(0)
    with torch.device(device):
        model, tokens = MODELS[name](device, layers)
    model = model.to(torch.float32 if device == "cpu" else torch.bfloat16).eval().requires_grad_(False)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.begin_suppress_tokens = None, None
    model.generation_config.decoder_start_token_id = 1
    return model, tokens


def source(model: PreTrainedModel, batch: int, tokens: int) -> dict[str, Tensor]:
    if model.config.model_type == "whisper":
        frames = torch.randn(batch, model.config.num_mel_bins, 2 * tokens, device=model.device, dtype=model.dtype)
        return {"input_features": frames}
    ids = torch.randint(2, model.config.vocab_size, (batch, tokens), device=model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def floor_bytes(model: PreTrainedModel, batch: int, tokens: int) -> int:
    """Return the bytes of the weights, keys and values that a step reads."""
    config, decoder = model.config, model.get_decoder()
    weights = sum(p.nbytes for name, p in decoder.named_parameters() if not any(x in name for x in UNREAD))
    is_t5 = config.model_type == "t5"
    layers = config.num_decoder_layers if is_t5 else config.decoder_layers
    width = config.num_heads * config.d_kv if is_t5 else config.d_model
    return weights + batch * layers * (tokens + (FEW + MANY) // 2) * 2 * width * model.dtype.itemsize


def candidate(name: str, model: PreTrainedModel, inputs: dict[str, Tensor]) -> Callable[[int], Tensor]:
    """Return a function that generates a number of tokens."""
    fixed: dict[str, Any] = {"do_sample": False, **inputs}
    loop = DecodeLoop()
    if name == "generate":
        fixed["disable_compile"] = True
    elif name == "generate_inductor":
        config = CompileConfig(backend="inductor", mode="reduce-overhead")
        config._compile_all_devices = True
        fixed |= {"cache_implementation": "static", "compile_config": config}
    else:
        fixed["custom_generate"] = loop

    def generate(tokens: int) -> Tensor:
        result: Tensor = model.generate(**fixed, max_new_tokens=tokens)
        if name == "loop":
            assert loop.launched_steps >= tokens - 1, loop.reason
            assert result.device.type == "cpu" or loop.not_captured is None, loop.not_captured
        return result

    return generate


def measure(model: PreTrainedModel, batch: int, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    inputs = source(model, batch, tokens)
    torch._dynamo.reset()
    calls = {name: candidate(name, model, inputs) for name in args.only}
    first_call_s = {name: clock(functools.partial(call, FEW), args.device) for name, call in calls.items()}
    texts = {name: call(MANY) for name, call in calls.items()}
    ms = in_turns(calls, args.rounds, lambda _, call: more_tokens_ms(call, FEW, MANY, args.device))
    row: dict[str, Any] = {"token_ms": ms, "first_call_s": first_call_s}
    if "generate" in texts:
        row["equal_tokens"] = {name: float((x == texts["generate"]).float().mean()) for name, x in texts.items()}
    return row


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batch", nargs="*", type=int, help="sources; default: 1 and 8, on a CPU 1")
    parser.add_argument("--layers", type=int, help="of the decoder; default: the model's, on a CPU 2")
    parser.add_argument("--only", nargs="*", default=list(CANDIDATES), choices=CANDIDATES)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    args = parse()
    rate = read_rate(args.device)
    print(f"{machine(args.device)}, {rate / 1e9:.1f} GB/s", flush=True)
    rows = []
    for name in args.models:
        model, tokens = build(name, args.device, args.layers)
        for batch in args.batch or ([1] if args.device == "cpu" else [1, 8]):
            floor = floor_bytes(model, batch, tokens) / rate * 1e3
            row = {"model": name, "batch": batch, **measure(model, batch, tokens, args), "floor_ms": floor}
            rows.append(row)
            print(f"{name}, batch {batch}: floor {floor:.3f} ms")
            for candidate_name, ms in row["token_ms"].items():
                equal = row.get("equal_tokens", {}).get(candidate_name, float("nan"))
                first = row["first_call_s"][candidate_name]
                print(
                    f"  {candidate_name:18} {ms:8.3f} ms  {ms / floor:6.2f} x the floor, first call {first:.1f} s, "
                    f"{equal:.3f} of tokens as in eager mode",
                    flush=True,
                )
            if args.json:
                results.write(args.json, args.device, rows, bytes_per_second=rate)


if __name__ == "__main__":
    main()
