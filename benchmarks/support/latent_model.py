"""The steps of DeepSeek-V3's shapes that `latent.py` measures."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, dataclass

import generate
import torch
from transformers import PreTrainedModel

from support import models
from support.static_step import measure_step


@dataclass(frozen=True)
class Row:
    """A step in which `used` of `max_cache_len` slots hold latents, to be `at_least` times as fast as Inductor."""

    batch: int
    max_cache_len: int
    used: int
    at_least: float
    dtype: str = "bfloat16"
    padded: bool = False


def rows(device: str) -> list[Row]:
    if device == "cpu":
        return [Row(4, 4096, 4096, 8, dtype) for dtype in ("float32", "bfloat16")]
    return [Row(1, 32768, 32000, 12), Row(8, 4096, 4000, 12), Row(1, 8192, 1000, 4)]


def build(device: str, dtype: str) -> PreTrainedModel:
    """Build 4 layers with 128 heads; on a CPU a layer with 16, beside which MLP and vocabulary are next to nothing."""
    sizes = {"num_hidden_layers": 4}
    if device == "cpu":
        sizes = {"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 128, "num_attention_heads": 16}
        sizes |= {"num_key_value_heads": 16, "hidden_size": 2048}
    return models.build(models.shape("deepseek_v3", **sizes), device, getattr(torch, dtype))


def step(row: Row, device: str, rate: float, repeats: int) -> dict[str, object]:
    """Return a row of the results."""
    model = build(device, row.dtype)
    floor = models.floor_bytes(model, row.batch, row.used) / rate * 1e3
    measured = measure_step(model, row, device, repeats)
    faster = measured["inductor_ms"] / measured["tatten_ms"]
    heads = model.config.num_attention_heads
    return {"section": "step", "heads": heads, **asdict(row), **measured, "floor_ms": floor, "faster": faster}


def tokens(device: str, rate: float, rounds: int) -> list[dict[str, object]]:
    """Return rows of `generate`: a prompt fills a quarter of a static cache, in two modes of torch.compile."""
    batch, capacity, used, modes = (8, 8192, 2000, ("default", "reduce-overhead"))
    if device == "cpu":
        batch, capacity, used, modes = (2, 256, 64, ("default",))
    model = build(device, "float32" if device == "cpu" else "bfloat16")
    floor = models.floor_bytes(model, batch, used) / rate * 1e3
    options = Namespace(device=device, capacity=capacity, used=used, rounds=rounds)
    rows: list[dict[str, object]] = []
    for mode in modes:
        with torch.no_grad():
            r = generate.measure(model, batch, mode, options)
        faster = r["token_ms"]["inductor"] / r["token_ms"]["tatten"]
        row = {"section": "generate", "batch": batch, "mode": mode, "capacity": capacity, "used": used}
        rows.append({**row, **r, "floor_ms": floor, "faster": faster})
    return rows
