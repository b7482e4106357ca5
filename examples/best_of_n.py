"""Rank n samples of one prompt: with Inductor and a KV cache for each, then with tatten and a shared prefix.

    python examples/best_of_n.py
    python examples/best_of_n.py --device cuda --dtype bfloat16 --n 128 --prompt-len 8000

As in section 5.3 of Bifurcated Attention (arXiv 2403.08845), the samples are drawn by nucleus sampling with p = 0.95 at
temperature 0.8, and the three best distinct ones by mean log-probability are printed. The model is a Llama of about
100M parameters with random weights: nothing is downloaded. Both variants share one prefill, which the static cache
copies for each sample. The time of a step includes the sampling.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, StaticCache

import tatten
from tatten.integrations.transformers import SharedPrefixCache, cache_kwargs

TEMPERATURE, TOP_P = 0.8, 0.95
SHARPNESS = 50  # scales the logits: makes the random model as confident as a trained one


@dataclass
class Clock:
    """A logits processor that records when the logits of each step are ready, and changes nothing."""

    times: list[float] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return scores

    def milliseconds_per_step(self) -> float:
        """Return the median over the steps after the first ones, which compile."""
        return 1e3 * statistics.median(b - a for a, b in zip(self.times[3:], self.times[4:], strict=False))


@dataclass(frozen=True)
class Samples:
    tokens: Tensor  # [n, new_tokens]
    logits: Tensor  # [n, new_tokens, vocabulary], before temperature and nucleus
    milliseconds: float  # per step
    kv_bytes: int
    kv_tokens: str


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=16000,
        max_position_embeddings=1 << 17,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight.mul_(SHARPNESS)
    return model.to(args.device, getattr(torch, args.dtype))


def prefill(model: LlamaForCausalLM, prompt: Tensor) -> SharedPrefixCache:
    """Prefill all tokens but the last, which `generate` gives to each sample."""
    cache = SharedPrefixCache(model.config)
    with torch.no_grad():
        model(prompt[:, :-1], **cache_kwargs(cache), logits_to_keep=1)
    return cache


def copy_for_each(prefix: SharedPrefixCache, model: LlamaForCausalLM, n: int, max_cache_len: int) -> StaticCache:
    """Return the static cache that a prefill of n equal prompts would leave."""
    cache = StaticCache(model.config, max_cache_len=max_cache_len)
    for i, layer in enumerate(prefix.layers):
        ((keys, values),) = layer.kv.segments
        cache.update(keys.expand(n, -1, -1, -1), values.expand(n, -1, -1, -1), i)
    return cache


def sample(
    model: LlamaForCausalLM, prompt: Tensor, prefix: SharedPrefixCache, backend: str, args: argparse.Namespace
) -> Samples:
    print(f"{backend}: compile one decode step (this takes the longest), then sample ...", flush=True)
    n, prompt_len, new = args.n, args.prompt_len, args.new_tokens
    cache: SharedPrefixCache | StaticCache
    if backend == "tatten":
        cache = prefix.fork(n, capacity=new)
        kv_bytes, kv_tokens = cache.nbytes, f"{prompt_len - 1} + {n} x {new} tokens"
    else:
        cache = copy_for_each(prefix, model, n, prompt_len + new)
        kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        kv_tokens = f"{n} x {prompt_len + new} tokens"

    torch._dynamo.reset()
    compile_config = CompileConfig(backend=backend)
    compile_config._compile_all_devices = True  # transformers compiles on accelerators only, unless told
    clock = Clock()
    torch.manual_seed(1)
    out = model.generate(
        prompt,
        **cache_kwargs(cache),
        num_return_sequences=n,
        max_new_tokens=new,
        do_sample=True,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        top_k=0,
        compile_config=compile_config,
        logits_processor=[clock],
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens, logits = out.sequences[:, prompt_len:], torch.stack(out.logits, dim=1)
    return Samples(tokens, logits, clock.milliseconds_per_step(), kv_bytes, kv_tokens)


def compare(ours: Samples, theirs: Samples, dtype: torch.dtype) -> str:
    """Check that the tokens are the same.

    Equal seeds draw equal noise for each token of each sequence, so only a tie within rounding can break either way.
    Low precision has many ties, and after one the texts differ.
    """
    n, new = ours.tokens.shape
    different = (ours.tokens != theirs.tokens).any(dim=1).nonzero().flatten().tolist()
    if not different:
        return f"tokens: identical ({n} sequences of {new})"
    for sequence in different:
        position = int((ours.tokens[sequence] != theirs.tokens[sequence]).int().argmax())
        drawn = torch.stack((theirs.tokens[sequence, position], ours.tokens[sequence, position]))
        logits = torch.stack((theirs.logits[sequence, position], ours.logits[sequence, position]))
        by_inductor, by_tatten = (logits / TEMPERATURE).softmax(-1)[:, drawn].tolist()
        gap = (logits[0] - logits[1]).abs().max().item()
        what = (
            f"sequence {sequence}, token {position}: Inductor drew {drawn[0]}, tatten {drawn[1]}, of probabilities "
            f"{by_inductor} with Inductor and {by_tatten} with tatten; their logits differ by up to {gap:.1e}"
        )
        if dtype == torch.float32 or gap > 8 * torch.finfo(dtype).eps * logits.abs().max().item():
            raise SystemExit(f"tokens: DIFFERENT in {len(different)} of {n} sequences; {what}")
    return f"tokens: identical in {n - len(different)} of {n} sequences, in the others up to a tie in {dtype}"


def best(samples: Samples, count: int) -> str:
    """Return the distinct samples with the highest mean log-probability."""
    chosen = samples.logits.log_softmax(-1).gather(-1, samples.tokens.unsqueeze(-1))
    scores = chosen.mean(dim=(1, 2)).tolist()
    texts = [tuple(text) for text in samples.tokens.tolist()]
    times, score = Counter(texts), dict(zip(texts, scores, strict=True))
    lines = [f"{len(times)} different samples of {len(texts)}; the best {count}:", "mean log p  drawn  tokens"]
    for text in sorted(times, key=score.__getitem__, reverse=True)[:count]:
        shown = " ".join(map(str, text[:16])) + (" ..." if len(text) > 16 else "")
        lines.append(f"{score[text]:10.4f} {times[text]:6}  {shown}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--n", type=int, default=32, help="samples")
    parser.add_argument("--prompt-len", type=int, default=2000)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()

    model = build(args)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"a Llama of {size:.0f}M parameters, {args.dtype}, {args.device}; {args.n} samples, prompt {args.prompt_len}")
    prompt = torch.randint(model.config.vocab_size, (1, args.prompt_len), device=args.device)
    prefix = prefill(model, prompt)
    with tatten.recording() as report:
        runs = {backend: sample(model, prompt, prefix, backend, args) for backend in ("inductor", "tatten")}
    ours, theirs = runs["tatten"], runs["inductor"]

    print(f"\n{report}\n\n{best(ours, 3)}\n\n{compare(ours, theirs, getattr(torch, args.dtype))}\n")
    print("backend     ms per step    KV MiB")
    for backend, run in runs.items():
        print(f"{backend:10} {run.milliseconds:12.2f} {run.kv_bytes / 2**20:9.1f}   {run.kv_tokens}")
    faster, smaller = theirs.milliseconds / ours.milliseconds, theirs.kv_bytes / ours.kv_bytes
    print(f"tatten is {faster:.1f} times as fast, with {smaller:.1f} times less KV")


if __name__ == "__main__":
    main()
