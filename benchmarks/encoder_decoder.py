"""A decode step of an encoder-decoder with beams: Inductor with plain caches, tatten with one copy of encoder keys.

    python benchmarks/encoder_decoder.py --device cuda                # --layers 8: a fourth of the time to compile
    python benchmarks/encoder_decoder.py                    # on a CPU: layers of the same kinds, tiny

The shapes are Whisper-large-v3's (1500 frames) and T5-3B's (512 tokens, the shorter sources padded), with random
weights in bfloat16 and beams of 5; both have a static cache for the decoder's tokens. `both` is Inductor with tatten's
cache, which separates the gain of the cache from that of the backend. A GPU's steps are captured CUDA graphs. All take
turns, and medians are shown. Logits are checked against eager mode in the same dtype with the caches of transformers.
`rest` is Inductor with sources of one token: the time of everything but the attention to them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from support import results
from support.command_line import arguments, machine
from support.errors import relative_error
from support.timing import as_graph, in_turns, seconds
from torch import Tensor
from transformers import (
    EncoderDecoderCache,
    PreTrainedModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutput

import tatten
from tatten.integrations.transformers import CrossAttentionCache, cache_kwargs

BEAMS, SLOTS = 5, 128
AT_LEAST = 2.0  # times as fast as Inductor
CANDIDATES = {"inductor": ("inductor", False), "both": ("inductor", True), "tatten": ("tatten", True)}


def whisper(device: str, layers: int | None) -> tuple[PreTrainedModel, int]:
    """Return the model and the length of its sources."""
    if device == "cpu":
        sizes = {"d_model": 256, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 256}
        sizes |= {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    else:
        sizes = {"d_model": 1280, "decoder_layers": 32, "decoder_attention_heads": 20, "decoder_ffn_dim": 5120}
        sizes |= {"vocab_size": 51866, "num_mel_bins": 128}
    sizes["decoder_layers"] = layers or sizes["decoder_layers"]
    config = WhisperConfig(encoder_layers=1, encoder_attention_heads=sizes["decoder_attention_heads"], **sizes)
    return WhisperForConditionalGeneration(config), 1500


def t5(device: str, layers: int | None) -> tuple[PreTrainedModel, int]:
    sizes = {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_heads": 32, "num_layers": 24}
    if device == "cpu":
        sizes = {"d_model": 256, "d_kv": 64, "d_ff": 256, "num_heads": 4, "num_layers": 2, "vocab_size": 512}
    sizes["num_layers"] = layers or sizes["num_layers"]
    return T5ForConditionalGeneration(T5Config(**sizes)), 512


MODELS = {"whisper-large-v3": whisper, "t5-3b": t5}


def decode_step(
    model: PreTrainedModel, states: Tensor, mask: Tensor | None, backend: str | None, once: bool
) -> tuple[Callable[[], Tensor], int]:
    """Return a function that decodes the second token of each beam to its logits, and the bytes of encoder keys."""
    config, device = model.config.get_text_config(decoder=True), states.device
    cross = CrossAttentionCache(BEAMS) if once else StaticCache(config, max_cache_len=states.shape[1])
    cache = EncoderDecoderCache(StaticCache(config, max_cache_len=SLOTS), cross)
    encoded = BaseModelOutput(last_hidden_state=states)
    token = torch.ones(len(states), 1, dtype=torch.long, device=device)
    masking = {} if mask is None else {"attention_mask": mask}
    model(encoder_outputs=encoded, decoder_input_ids=token, **cache_kwargs(cache), **masking)
    own_mask = (torch.arange(SLOTS, device=device) < SLOTS // 2).expand(len(states), 1, 1, SLOTS).contiguous()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, dynamic=False) if backend else model

    def step() -> Tensor:
        for layer in cache.self_attention_cache.layers:
            layer.cumulative_length.fill_(SLOTS // 2 - 1)
        return compiled(
            encoder_outputs=encoded,
            decoder_input_ids=token,
            decoder_attention_mask=own_mask,
            **cache_kwargs(cache),
            **masking,
        ).logits

    for _ in range(3):
        step()
    key_bytes = sum(x.nbytes for layer in cross.layers for x in (layer.stored if once else (layer.keys, layer.values)))
    return (step if device.type == "cpu" or backend is None else as_graph(step)), key_bytes


def measure(name: str, batch: int, device: str, layers: int | None, rounds: int) -> dict[str, object]:
    torch.manual_seed(0)
    with torch.device(device):
        model, length = MODELS[name](device, layers)
        model = model.to(torch.bfloat16).eval().requires_grad_(False)
        states = torch.randn(batch, length, model.config.d_model, dtype=torch.bfloat16).repeat_interleave(BEAMS, 0)
        lengths = length - length // 8 * torch.arange(batch).repeat_interleave(BEAMS)
        mask = None if name.startswith("whisper") else (torch.arange(length) < lengths[:, None]).long()
    with torch.no_grad():
        want = decode_step(model, states, mask, None, False)[0]().float()
        with tatten.recording() as report:
            prepared = {what: decode_step(model, states, mask, *how) for what, how in CANDIDATES.items()}
        steps = {what: step for what, (step, _) in prepared.items()}
        errors = {what: relative_error(step().float(), want) for what, step in steps.items()}
        one_token = states[:, :1], None if mask is None else mask[:, :1]
        steps["rest"] = decode_step(model, *one_token, "inductor", False)[0]
        took = in_turns(steps, rounds, lambda _, step: seconds(step, device))
    return {
        "model": name,
        "batch": batch,
        "layers": model.config.decoder_layers if name.startswith("whisper") else model.config.num_decoder_layers,
        "ms": {what: s * 1e3 for what, s in took.items()},
        "held_bytes": {what: held for what, (_, held) in prepared.items()},
        "errors": errors,
        "read_once": sum(x.op == "tatten.bifurcated_attention.default" for x in report.rewritten),
        "faster": took["inductor"] / took["tatten"],
    }


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batch", nargs="*", type=int, help="sources; default: 1, 4 and 8, on a CPU 2")
    parser.add_argument("--layers", type=int, help="of the decoder; default: the model's, on a CPU 2")
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


def main() -> None:
    args = parse()
    print(f"{machine(args.device)}, beams of {BEAMS}, milliseconds of a step")
    print(
        "model            sources | inductor     both   tatten     rest | speedup | layers read once | "
        "encoder keys MiB | errors"
    )
    rows = []
    for name in args.models:
        for batch in args.batch or ([2] if args.device == "cpu" else [1, 4, 8]):
            r = measure(name, batch, args.device, args.layers, args.rounds)
            rows.append(r)
            print(f"{name:16} {batch:7} |", *(f"{ms:8.2f}" for ms in r["ms"].values()), end=" ")
            mib = " to ".join(f"{r['held_bytes'][what] / 2**20:.1f}" for what in ("inductor", "tatten"))
            errors = " ".join(f"{error:.1e}" for error in r["errors"].values())
            print(f"| {r['faster']:6.2f}x | {r['read_once']:16} | {mib:>16} | {errors}", flush=True)
            if args.device == "cuda":
                print(f"  at least {AT_LEAST:g} is asked for: {'yes' if r['faster'] >= AT_LEAST else 'NO'}")
                torch.cuda.empty_cache()
    if args.json:
        results.write(args.json, args.device, rows)


if __name__ == "__main__":
    main()
