"""A decode step of many samples from one context, as models with and without a shared-prefix cache run it."""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, StaticCache

from support.timing import as_graph, seconds
from tatten.integrations.transformers import SharedPrefixCache, cache_kwargs

HEAD_DIM, DTYPE = 128, torch.bfloat16

Cache = SharedPrefixCache | StaticCache
Result = TypeVar("Result")


@dataclass(frozen=True)
class Sizes:
    context: int
    batch: int
    suffix: int


def randn(model: LlamaForCausalLM, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield keys and values, layer by layer."""
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
        suffixes = layer.kv if isinstance(cache, SharedPrefixCache) else layer
        suffixes.keys[:, :, -sizes.suffix :] = key
        suffixes.values[:, :, -sizes.suffix :] = value


VARIANTS = {"without": ("inductor", copied_cache), "packed": ("tatten", copied_cache), "with": ("tatten", shared_cache)}


def kv_bytes(model: LlamaForCausalLM, variant: str, sizes: Sizes) -> int:
    config = model.config
    tokens = (1 if variant == "with" else sizes.batch) * sizes.context + sizes.batch * sizes.suffix
    return tokens * 2 * config.num_hidden_layers * config.num_key_value_heads * HEAD_DIM * DTYPE.itemsize


def decode_step(forward: Callable[..., object], cache: Cache, sizes: Sizes, device: str) -> Callable[[], Tensor]:
    """Return a function that decodes the last token of the suffix and returns the logits."""
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
        return forward(token, position_ids=position, attention_mask=mask, **cache_kwargs(cache)).logits

    return step


class Runner:
    """A model, compiled for one variant."""

    def __init__(self, model: LlamaForCausalLM, variant: str, args: argparse.Namespace):
        self.model, self.variant, self.args = model, variant, args
        backend, self.make_cache = VARIANTS[variant]
        torch._dynamo.reset()
        self.forward = torch.compile(model, backend=backend, dynamic=not args.static, fullgraph=True)

    def latency(self, sizes: Sizes) -> tuple[float, Tensor]:
        """Return milliseconds per step, and the logits."""
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
        """Search by doubling, then by halving the gap, down to a sixteenth; return `args.largest` if that fits."""
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
