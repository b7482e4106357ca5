"""The shapes of models that write their attention out, with random weights and 4 layers, for `written_out.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from transformers import Gemma2Config, GptOssConfig, PreTrainedModel, StaticCache
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM

import tatten
from support.static_step import weight_bytes
from support.timing import as_graph, in_turns, seconds


@dataclass(frozen=True)
class Row:
    """A step of a batch with `used` of `slots` in use; it has to be at least so many times as fast."""

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
    """gpt-oss-20b's or Gemma-2-9b's; on a CPU a layer of each kind, with next to no experts, MLP and vocabulary."""
    layers, small = (2, {"vocab_size": 128, "intermediate_size": 64}) if device == "cpu" else (4, {})
    torch.manual_seed(0)
    with torch.device(device):
        if name == "gpt_oss":
            experts, picked = (2, 1) if device == "cpu" else (32, 4)
            small |= {"num_local_experts": experts, "num_experts_per_tok": picked}
            config = GptOssConfig(num_hidden_layers=layers, layer_types=None, **small)
            model: PreTrainedModel = GptOssForCausalLM(config)
        else:
            sizes = {"hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}
            sizes |= {"intermediate_size": 14336, "query_pre_attn_scalar": 256, "vocab_size": 256000}
            model = Gemma2ForCausalLM(Gemma2Config(num_hidden_layers=layers, layer_types=None, **(sizes | small)))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return model.to(dtype).eval().requires_grad_(False)


def decode_step(model: PreTrainedModel, row: Row, backend: str | None, device: str) -> Callable[[], Tensor]:
    """A function that decodes one token at position `used` and returns the logits, with masks of the model's own."""
    generator = torch.Generator(device).manual_seed(1)
    cache = StaticCache(model.config, max_cache_len=row.slots)
    token = torch.arange(1, row.batch + 1, device=device).unsqueeze(1)
    model(token, past_key_values=cache)  # allocates the cache
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
        return compiled(token, position_ids=position, past_key_values=cache).logits

    for _ in range(3):
        step()
    return step if device == "cpu" or backend is None else as_graph(step)


def floor_bytes(model: PreTrainedModel, row: Row) -> int:
    """Each weight once, of the experts as many as evenly drawn tokens would pick, and each key and value in use once.

    Windows keep as many keys as they have.
    """
    config = model.config
    head_dim = config.head_dim
    keys = [min(row.used, config.sliding_window) if "sliding" in x else row.used for x in config.layer_types]
    per_key = 2 * config.num_key_value_heads * head_dim * row.batch
    weights = weight_bytes(model)
    if row.model == "gpt_oss":
        unpicked = (1 - config.num_experts_per_tok / config.num_local_experts) ** row.batch
        weights -= int(unpicked * sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name))
    return weights + sum(keys) * per_key * model.dtype.itemsize


def step(row: Row, device: str, rate: float, rounds: int) -> dict[str, object]:
    """A row of the results: milliseconds of both, and their errors against float32 in eager mode."""
    model = build(row.model, device)
    floor = floor_bytes(model, row) / rate * 1e3
    with torch.no_grad():
        with tatten.recording() as report:
            ours = decode_step(model, row, "tatten", device)
        theirs = decode_step(model, row, "inductor", device)
        logits = {"tatten": ours().float(), "inductor": theirs().float()}
        took = in_turns({"tatten": ours, "inductor": theirs}, rounds, lambda _, f: seconds(f, device))
        exact = decode_step(model.float(), row, None, device)().float()
    errors = {f"{name}_error": ((x - exact).norm() / exact.norm()).item() for name, x in logits.items()}
    times = {f"{name}_ms": x * 1e3 for name, x in took.items()}
    found = {"rewritten": len(report.rewritten), "floor_ms": floor, "faster": took["inductor"] / took["tatten"]}
    return {"section": "step", **asdict(row), **times, **errors, **found}
