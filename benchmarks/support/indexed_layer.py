"""A decode step of one layer of DeepSeek-V3.2 whose static cache is full, for `sparse_layer.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from support.kernel_parts import Widths
from tatten.integrations.transformers import cache_kwargs

# Next to no MLP and vocabulary: the step is attention with its indexer and projections.
LAYER = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "intermediate_size": 64,
    "vocab_size": 128,
    "pad_token_id": 0,
}
TINY = {
    "hidden_size": 96,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "index_topk": 32,
    "index_head_dim": 20,
    "index_n_heads": 6,
}


@dataclass(frozen=True)
class Row:
    """One sequence of `length` keys, or several."""

    batch: int
    length: int


def config(device: str) -> PreTrainedConfig:
    """Return DeepSeek-V3.2's widths, the defaults of its configuration; tiny ones on a CPU."""
    return AutoConfig.for_model("deepseek_v32", **LAYER, **(TINY if device == "cpu" else {}))


def expanded_bytes(c: PreTrainedConfig, row: Row) -> int:
    """Return the bytes of the projected keys and values and the assembled keys, all live at once in Inductor's step."""
    widths = c.qk_nope_head_dim + c.v_head_dim + c.qk_nope_head_dim + c.qk_rope_head_dim
    return 2 * row.batch * row.length * c.num_attention_heads * widths


def widths(c: PreTrainedConfig, row: Row) -> Widths:
    expanded = c.qk_nope_head_dim + c.v_head_dim
    keys = {c.kv_lora_rank, c.qk_rope_head_dim, c.kv_lora_rank + c.qk_rope_head_dim, expanded, c.v_head_dim}
    keys |= {c.qk_nope_head_dim, c.qk_nope_head_dim + c.qk_rope_head_dim, c.num_attention_heads * expanded}
    return Widths(row.batch, row.length, frozenset(keys), c.index_n_heads, c.index_head_dim)


def full_cache(model: PreTrainedModel, row: Row) -> StaticCache:
    """Return a cache whose slots hold random latents and index keys. No prefill runs, since it would not fit."""
    c, device, dtype = model.config, model.device, model.dtype
    cache = StaticCache(c, max_cache_len=row.length)
    generator = torch.Generator(device).manual_seed(1)
    for layer in cache.layers:
        latent, rope = (torch.empty(row.batch, 1, 0, n, device=device, dtype=dtype) for n in latent_widths(c))
        layer.lazy_initialization(latent, rope)
        layer.lazy_initialization_indexer(torch.empty(row.batch, 0, c.index_head_dim, device=device, dtype=dtype))
        for stored in (layer.keys, layer.values, layer.indexer_keys):
            stored.normal_(generator=generator)
    return cache


def latent_widths(c: PreTrainedConfig) -> tuple[int, int]:
    return c.kv_lora_rank, c.qk_rope_head_dim


def decode_step(model: PreTrainedModel, cache: StaticCache, row: Row, backend: str) -> Callable[[], Tensor]:
    """Return a compiled step, run three times, that decodes the token of the last slot to its logits."""
    token = torch.arange(1, row.batch + 1, device=model.device).unsqueeze(1)
    mask = torch.ones(row.batch, 1, 1, row.length, dtype=torch.bool, device=model.device)
    position = torch.full((row.batch, 1), row.length - 1, device=model.device)
    torch._dynamo.reset()  # for this row alone: another length would mark sizes dynamic
    compiled = torch.compile(model, backend=backend, dynamic=False)

    def step() -> Tensor:
        for layer in cache.layers:
            for length in (layer.cumulative_length, layer.indexer_cumulative_length):
                length.fill_(row.length - 1)
        return compiled(token, position_ids=position, attention_mask=mask, **cache_kwargs(cache)).logits

    for _ in range(3):
        step()
    return step


@contextlib.contextmanager
def picks_hidden(never: Tensor) -> Iterator[None]:
    """Give attention the union of its mask and an all-False mask, which no backend can prove to be all False.

    A union may leave keys that no top-k picked, so tatten searches the mask.
    """
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: object
    ) -> object:
        return sdpa(module, query, key, value, mask | never, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # falls back to transformers' own
