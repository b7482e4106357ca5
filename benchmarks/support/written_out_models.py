"""The steps of models that write their attention out, which `written_out.py` measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

import tatten
from support import models
from support.errors import relative_error
from support.timing import as_graph, in_turns, seconds
from tatten.integrations.transformers import cache_kwargs


@dataclass(frozen=True)
class Row:
    """A step of a batch with `used` of `slots` in use, to be `at_least` times as fast as Inductor."""

    model: str
    batch: int
    slots: int
    used: int
    at_least: float


def rows(device: str) -> list[Row]:
    batch, slots, used = (2, 1024, (128, 1000)) if device == "cpu" else (8, 8192, (1000, 8000))
    return [
        Row(name, batch, slots, n, at_least) for name, at_least in (("gpt_oss", 1.5), ("gemma2", 2.0)) for n in used
    ]


def build(name: str, device: str) -> PreTrainedModel:
    """Build 4 layers; on a CPU a layer of each kind, with next to no experts, MLP and vocabulary."""
    if device == "cuda":
        return models.build(models.shape(name, num_hidden_layers=4), device, torch.bfloat16)
    small = {"num_hidden_layers": 2, "vocab_size": 128, "intermediate_size": 64}
    if name == "gpt_oss":
        small |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    return models.build(models.shape(name, **small), device, torch.float32)


def decode_step(model: PreTrainedModel, row: Row, backend: str | None, device: str) -> Callable[[], Tensor]:
    """Return a function that decodes one token at position `used` to its logits, with the model's own masks."""
    generator = torch.Generator(device).manual_seed(1)
    cache = StaticCache(model.config, max_cache_len=row.slots)
    token = torch.arange(1, row.batch + 1, device=device).unsqueeze(1)
    model(token, **cache_kwargs(cache))  # allocates the cache
    for layer in cache.layers:
        for x in (layer.keys, layer.values):
            x.copy_(torch.randn(x.shape, generator=generator, device=device))
    position = torch.full((row.batch, 1), row.used - 1, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, dynamic=False) if backend else model

    def step() -> Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(row.used - 1)
            if hasattr(layer, "cumulative_length_int"):  # of sliding windows, on which a graph depends
                layer.cumulative_length_int = row.used - 1
        return compiled(token, position_ids=position, **cache_kwargs(cache)).logits

    for _ in range(3):
        step()
    return step if device == "cpu" or backend is None else as_graph(step)


def step(row: Row, device: str, rate: float, rounds: int) -> dict[str, object]:
    """Return a row of the results: milliseconds of both, and their errors against float32 in eager mode."""
    model = build(row.model, device)
    floor = models.floor_bytes(model, row.batch, row.used) / rate * 1e3
    with torch.no_grad():
        with tatten.recording() as report:
            ours = decode_step(model, row, "tatten", device)
        theirs = decode_step(model, row, "inductor", device)
        logits = {"tatten": ours().float(), "inductor": theirs().float()}
        took = in_turns({"tatten": ours, "inductor": theirs}, rounds, lambda _, f: seconds(f, device))
        exact = decode_step(model.float(), row, None, device)().float()
    errors = {f"{name}_error": relative_error(x, exact) for name, x in logits.items()}
    times = {f"{name}_ms": x * 1e3 for name, x in took.items()}
    figures = {"rewritten": len(report.rewritten), "floor_ms": floor, "faster": took["inductor"] / took["tatten"]}
    return {"section": "step", **asdict(row), **times, **errors, **figures}
