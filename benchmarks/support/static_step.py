"""One decode step of a model with a static cache, by Inductor and by tatten, each checked against float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

import tatten
from support.errors import relative_error
from support.timing import as_graph, in_turns, seconds
from tatten.integrations.transformers import cache_kwargs


class Shape(Protocol):
    """`used` of `max_cache_len` slots hold tokens; with `padded`, sequence b begins with 4 * b slots of padding."""

    batch: int
    max_cache_len: int
    used: int
    dtype: str
    padded: bool


def decode_step(model: PreTrainedModel, row: Shape, backend: str | None, device: str) -> Callable[[], Tensor]:
    """Return a function that decodes one token at position `used` to its logits; in eager mode without a backend."""
    generator = torch.Generator(device).manual_seed(1)
    cache = StaticCache(model.config, max_cache_len=row.max_cache_len)
    token = torch.arange(1, row.batch + 1, device=device).unsqueeze(1)
    model(token, **cache_kwargs(cache))  # allocates the cache
    for layer in cache.layers:
        for x in (layer.keys, layer.values):
            x.copy_(torch.randn(x.shape, generator=generator, device=device, dtype=getattr(torch, row.dtype)))
    slots = torch.arange(row.max_cache_len, device=device)
    padding = 4 * torch.arange(row.batch, device=device) * row.padded
    mask = ((slots < row.used) & (slots >= padding[:, None]))[:, None, None].contiguous()
    position = torch.full((row.batch, 1), row.used - 1, device=device)
    # Compiled for this row alone: another cache length would otherwise mark sizes dynamic.
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, dynamic=False) if backend else model

    def step() -> Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(row.used - 1)
        return compiled(token, position_ids=position, attention_mask=mask, **cache_kwargs(cache)).logits

    for _ in range(3):
        step()
    if device == "cpu" or backend is None:
        return step
    return as_graph(step)


def measure_step(model: PreTrainedModel, row: Shape, device: str, repeats: int) -> dict[str, float]:
    """Return milliseconds and errors of both; `model` is in float32 afterwards."""
    with torch.no_grad():
        with tatten.recording() as report:
            ours = decode_step(model, row, "tatten", device)
        theirs = decode_step(model, row, "inductor", device)
        logits = {"tatten": ours().float(), "inductor": theirs().float()}
        took = in_turns({"tatten": ours, "inductor": theirs}, repeats, lambda _, step: seconds(step, device))
        # The reference: the same model, weights and cache in float32 and eager mode.
        exact = decode_step(model.float(), row, None, device)()
        errors = {name: relative_error(x, exact) for name, x in logits.items()}
    return {
        "rewritten": len(report.rewritten),
        "tatten_error": errors["tatten"],
        "inductor_error": errors["inductor"],
        "tatten_ms": took["tatten"] * 1e3,
        "inductor_ms": took["inductor"] * 1e3,
    }
