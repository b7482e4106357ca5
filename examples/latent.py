"""Run `generate` of a DeepSeek-V3 of about 100M parameters with Inductor and with tatten: the same tokens, faster.

    python examples/latent.py
    python examples/latent.py --device cuda --dtype bfloat16 --batch 8 --max-cache-len 8192

Its cache holds a latent of each token, which all heads share. In each step Inductor expands all slots of the cache to
keys and values for each head; tatten attends to the latents. Both are equal in exact arithmetic but round differently,
so where two tokens are equally likely within rounding, either may be taken. The weights are random: nothing
is downloaded.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field

import torch
from transformers import CompileConfig, DeepseekV3Config, DeepseekV3ForCausalLM, StaticCache

import tatten
from tatten.integrations.transformers import cache_kwargs


@dataclass
class Clock:
    """A logits processor that records when each token is ready, and changes nothing."""

    times: list[float] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return scores

    def milliseconds_per_token(self) -> float:
        """Return the median over the steps after the prefill and the first decode steps, which compile."""
        return 1e3 * statistics.median(b - a for a, b in zip(self.times[3:], self.times[4:], strict=False))


def build(layers: int, dtype: torch.dtype, device: str) -> DeepseekV3ForCausalLM:
    """Build a model with DeepSeek-V3's widths of latents and heads; without experts, so that all layers are alike."""
    config = DeepseekV3Config(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=512,
        vocab_size=8000,
        max_position_embeddings=1 << 16,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config).to(device, dtype).eval()


def generate(
    model: DeepseekV3ForCausalLM, prompt: torch.Tensor, backend: str, args: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the generated tokens, their logits, and the milliseconds per token."""
    print(f"{backend}: prefill, then compile one decode step (this takes the longest) ...", flush=True)
    torch._dynamo.reset()
    compile_config = CompileConfig(backend=backend)
    compile_config._compile_all_devices = True  # transformers compiles on accelerators only, unless told
    clock = Clock()
    out = model.generate(
        prompt,
        **cache_kwargs(StaticCache(model.config, max_cache_len=args.max_cache_len)),
        compile_config=compile_config,
        logits_processor=[clock],
        max_new_tokens=args.new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, prompt.shape[1] :], torch.stack(out.logits, dim=1), clock.milliseconds_per_token()


def compare(ours: torch.Tensor, theirs: torch.Tensor, logits: torch.Tensor, dtype: torch.dtype) -> str:
    """Check that the tokens are the same but for ties within rounding; `logits` are those of `theirs`."""
    ties = 0
    for sequence in (ours != theirs).any(dim=1).nonzero().flatten().tolist():
        position = int((ours[sequence] != theirs[sequence]).int().argmax())  # from here on the texts differ
        at = logits[sequence, position].float()
        gap = (at[theirs[sequence, position]] - at[ours[sequence, position]]).item()
        if gap > 8 * torch.finfo(dtype).eps * at.abs().max().item():
            raise SystemExit(f"tokens: DIFFERENT, by {gap} in the logits of sequence {sequence}, token {position}")
        ties += 1
    shape = f"{ours.shape[0]} sequences of {ours.shape[1]}"
    if ties:
        return f"tokens: {shape}, {ties} of them the same up to a tie within the rounding of {dtype}"
    return f"tokens: identical ({shape})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--max-cache-len", type=int, default=2048)
    parser.add_argument("--prompt-len", type=int, default=500)
    parser.add_argument("--new-tokens", type=int, default=16)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)

    model = build(args.layers, dtype, args.device)
    size, config = sum(p.numel() for p in model.parameters()) / 1e6, model.config
    print(f"a DeepSeek-V3 of {size:.0f}M parameters, {args.dtype}, {args.device}; ", end="")
    print(f"batch {args.batch}, prompt {args.prompt_len}")
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    heads = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    print(f"a token and layer: {latent} numbers in the cache, {heads} as keys and values of all heads")
    prompt = torch.randint(config.vocab_size, (args.batch, args.prompt_len), device=args.device)

    tokens, logits, ms = {}, {}, {}
    with tatten.recording() as report:
        for backend in ("inductor", "tatten"):
            tokens[backend], logits[backend], ms[backend] = generate(model, prompt, backend, args)

    print(f"\n{report}\n\n{compare(tokens['tatten'], tokens['inductor'], logits['inductor'], dtype)}\n")
    print("backend    ms per token")
    for backend, value in ms.items():
        print(f"{backend:10} {value:12.2f}")
    print(f"tatten is {ms['inductor'] / ms['tatten']:.1f} times as fast")


if __name__ == "__main__":
    main()
