"""An attention backend of vLLM 0.33: a mixed batch is one call, and sequences with one query read shared pages once.

It has not been run with vLLM: tests run it with stubs of vLLM's classes, made from the names and signatures of vLLM
0.33. A package names `register` as a plug-in, so that vLLM loads it:

    [project.entry-points."vllm.general_plugins"]
    tatten = "vllm_backend:register"

    vllm serve <model> --attention-backend TATTEN
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import register_backend

import tatten


def register() -> None:
    """Register the name TATTEN. vLLM calls this in each of its processes."""
    register_backend("TATTEN", f"{TattenBackend.__module__}.{TattenBackend.__qualname__}")


class TattenBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]  # that of the queries
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "TATTEN"

    @staticmethod
    def get_impl_cls() -> type[TattenImpl]:
        return TattenImpl

    @staticmethod
    def get_builder_cls() -> type[TattenMetadataBuilder]:
        return TattenMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [16, 32, 64, 128, 256]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


@dataclass
class TattenMetadata(AttentionMetadata):
    """The inputs of a step, for all layers of a group. Captured graphs read these tensors in this memory."""

    tokens: int
    starts: Tensor
    lens: Tensor
    table: Tensor
    decode: bool  # one token for each sequence
    shared: tatten.SharedPages | None


class TattenMetadataBuilder(AttentionMetadataBuilder[TattenMetadata]):
    # A graph of decode steps replays decode steps, and one that was captured with longer queries takes the mixed call.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.full_attention = getattr(kv_cache_spec, "sliding_window", None) is None  # windows share no pages
        self.shared: dict[tuple[int, int], tatten.SharedPages] = {}  # by shape of the table

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TattenMetadata:
        step = common_attn_metadata
        n = step.num_reqs
        table, lens = step.block_table_tensor[:n], step.seq_lens[:n]
        decode = step.max_query_len == 1 and n == step.num_actual_tokens  # or padding, whose length is 0
        shared = self.find_shared(table, lens) if self.full_attention else None
        return TattenMetadata(step.num_actual_tokens, step.query_start_loc[: n + 1], lens, table, decode, shared)

    def find_shared(self, table: Tensor, lens: Tensor) -> tatten.SharedPages:
        """Find the shared pages of a step, and write them where a graph for a table of this shape reads them."""
        n_pages, _, page, _ = self.layer.kv_cache.shape
        shared_pages = tatten.shared_pages(table, lens, n_pages=n_pages, page_size=page)
        read_by_graphs = self.shared.setdefault((table.shape[0], table.shape[1]), shared_pages)
        if read_by_graphs is not shared_pages:
            read_by_graphs.data.copy_(shared_pages.data)
        return read_by_graphs


class TattenImpl(AttentionImpl[TattenMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise NotImplementedError("`alibi_slopes` must be None for TATTEN")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        softcap = logits_soft_cap or None  # vLLM's 0 means no soft cap
        self.options: dict[str, Any] = {"scale": scale, "window": sliding_window, "softcap": softcap, "sinks": sinks}

    def pools(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """View `[blocks, kv_heads, block, 2 * head_size]` as keys and values `[blocks, block, kv_heads, head_size]`."""
        key, value = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return key, value

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        slots = slot_mapping.clamp(min=0)  # padding has -1; vLLM keeps no token in block 0
        block, place = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
        for pool, new in zip(self.pools(kv_cache), (key, value), strict=True):
            pool[block, place] = new[: len(slots)]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TattenMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("`output_scale` and `output_block_scale` must be None for TATTEN")
        if attn_metadata is None:  # vLLM measures memory before it makes a cache
            return output.zero_()
        step, (keys, values) = attn_metadata, self.pools(kv_cache)
        query = query[: step.tokens]
        if step.decode:
            pages = {"block_table": step.table, "kv_lens": step.lens, "shared_pages": step.shared}
            out = tatten.decode_attention(query[:, :, None], keys, values, **pages, **self.options)[:, :, 0]
        else:
            mixed = (step.table, step.starts, step.lens)
            out = tatten.paged_attention(query, keys, values, *mixed, shared_pages=step.shared, **self.options)
        output[: step.tokens] = out
        return output
