"""The kernels of others, each by a function that returns its attention, or None where it is not available.

FlashAttention-3 and FlashMLA come from vLLM's wheel: `_vllm_fa3_C.abi3.so` and `_flashmla_C.abi3.so`, as they are or
compressed with xz, are looked for in the folder that the environment variable TATTEN_PEERS names, in `.whl/fa3/` at the
root of this repository, and in an installed vllm. FlashInfer compiles its kernels when they are first asked for, about
a minute for each.
"""

from __future__ import annotations

import functools
import importlib.util
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tatten.ops.layout import pack_gqa

FA3, FLASH_MLA = "_vllm_fa3_C", "_flashmla_C"
PAGE = 16
PAGE_OF_FLASH_MLA = 64


def library(name: str) -> Path | None:
    """Return the path of an extension of vLLM's, or None."""
    spec = importlib.util.find_spec("vllm")
    folder_named = os.environ.get("TATTEN_PEERS")
    folders = [Path(folder_named)] if folder_named else []
    folders += [Path(__file__).parents[2] / ".whl" / "fa3"]
    for folder in (spec and spec.submodule_search_locations) or ():
        folders += [Path(folder), Path(folder) / "vllm_flash_attn"]
    paths = [folder / (name + suffix) for folder in folders for suffix in (".abi3.so", ".abi3.so.xz")]
    return next((path for path in paths if path.is_file()), None)


@functools.cache
def ops_of(name: str) -> Any:
    """Return the ops of an extension of vLLM's, all of which are for Hopper, or None."""
    path = library(name)
    if path is None or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    if path.suffix == ".xz":
        with lzma.open(path) as packed, tempfile.NamedTemporaryFile(suffix=".so") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 24)
            unpacked.flush()
            torch.ops.load_library(unpacked.name)
    else:
        torch.ops.load_library(str(path))
    return getattr(torch.ops, name)


def fa3() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return FlashAttention-3 on sequences of any lengths, one after the other."""
    ops = ops_of(FA3)
    if ops is None:
        return None

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor | None,
        max_q: int,
        max_k: int,
        num_splits: int = 0,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend from `q` `[tokens, q_heads, d]` to `k` and `v` `[tokens, kv_heads, d]`, with lse `[q_heads, tokens]`.

        Or, with `seqused_k` instead of `cu_k`, `k` and `v` are `[batch, length, kv_heads, d]`, and with `block_table`
        `[batch, pages]` also they are `[pages, page, kv_heads, d]`. 0 splits: as many as FlashAttention-3 sees fit.
        `causal`: the last query sees all keys, of which a `window` leaves the last ones.
        """
        lengths = cu_q, cu_k, None, None, seqused_k, max_q, max_k, block_table
        before, after = (-1, -1) if window is None else (window - 1, 0)
        seen = causal, before, after, softcap, True  # and an interleaved rotary embedding
        out, lse = ops.fwd(
            *(q, k, v, *[None] * 4, *lengths, *[None] * 8, q.shape[2] ** -0.5 if scale is None else scale, *seen),
            *(None, num_splits, None, 0, sinks, 1, 0, None),
        )[:2]
        return out, lse

    return attention


def fa3_latent() -> Callable[..., Tensor] | None:
    """Return FlashAttention-3's latent attention, which takes the queries of latents as `q_v`."""
    ops = ops_of(FA3)
    if ops is None:
        return None

    def attention(
        query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, kv_lens: Tensor, scale: float
    ) -> Tensor:
        """Return `out` `[batch, heads, 1, rank]`; the arguments are those of `tatten.latent_attention`, contiguous.

        `kv_lens` is int32; as many splits as FlashAttention-3 sees fit.
        """
        q, q_v, k, v = (x.view(len(x), x.shape[2], x.shape[1], -1) for x in (query_rope, query, key_rope, latent))
        lengths = None, None, None, None, kv_lens, 1, latent.shape[2], None
        window = False, -1, -1, 0.0, True  # causal, left, right, soft cap, interleaved rotary embedding
        out: Tensor = ops.fwd(
            *(q, k, v, None, None, q_v, None, *lengths, *[None] * 8, scale, *window),
            *(None, 0, None, 0, None, 1, 0, None),
        )[0]
        return out.view(query.shape)

    return attention


def fa3_picked() -> Callable[..., Tensor] | None:
    """Return FlashAttention-3's latent attention with pages of one token, so that its page table is a list of keys."""
    ops = ops_of(FA3)
    if ops is None:
        return None

    def attention(
        query: Tensor,
        query_rope: Tensor,
        latent: Tensor,
        key_rope: Tensor,
        rows: Tensor,
        counts: Tensor,
        scale: float,
    ) -> Tensor:
        """Return `out` `[batch, heads, 1, rank]`; the arguments are those of `tatten.latent_attention`, contiguous.

        `rows` `[batch, picks]` counts through the latents of all sequences; each has so many picks as `counts` says.
        """
        q, q_v = (x.view(len(x), 1, x.shape[1], -1) for x in (query_rope, query))
        k, v = (x.view(-1, 1, 1, x.shape[3]) for x in (key_rope, latent))
        lengths = None, None, None, None, counts, 1, rows.shape[1], rows
        window = False, -1, -1, 0.0, True  # causal, left, right, soft cap, interleaved rotary embedding
        out: Tensor = ops.fwd(
            *(q, k, v, None, None, q_v, None, *lengths, *[None] * 8, scale, *window),
            *(None, 0, None, 0, None, 1, 0, None),
        )[0]
        return out.view(query.shape)

    return attention


def flash_mla(kv_lens: Tensor, pages: int, scale: float) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return FlashMLA on sequences of these lengths, int32, that it plans once; its pages follow one another.

    Takes `[batch, 1, heads, 576]` and `[batch * pages, 64, 1, 576]`, and returns `[batch, 1, heads, 512]`.
    """
    ops = ops_of(FLASH_MLA)
    if ops is None:
        return None
    batch = len(kv_lens)
    table = torch.arange(batch * pages, dtype=torch.int32, device=kv_lens.device).view(batch, pages)
    plan: list[Tensor] = []

    def attention(query: Tensor, latent: Tensor) -> Tensor:
        inputs = query, latent, 512, kv_lens, table, scale, False  # causal
        out, _, *new_plan = ops.dense_decode_fwd(*inputs, *(plan or (None, None)), None)
        plan[:] = plan or new_plan
        return out

    return attention


def flash_mla_picked() -> Callable[[Tensor, Tensor, Tensor, float], Tensor] | None:
    """Return FlashMLA's sparse attention of many queries in bfloat16.

    Takes `[queries, heads, 576]`, `[rows, 1, 576]` and picked rows `[queries, 1, picks]`, int32, and returns
    `[queries, heads, 512]`.
    """
    ops = ops_of(FLASH_MLA)
    if ops is None:
        return None

    def attention(query: Tensor, latent: Tensor, rows: Tensor, scale: float) -> Tensor:
        out: Tensor = ops.sparse_prefill_fwd(query, latent, rows, scale, 512, None, None, None)[0]
        return out

    return attention


def flash_mla_picked_float8(plan: list[Tensor]) -> Callable[[Tensor, Tensor, Tensor, float], Tensor] | None:
    """Return FlashMLA's sparse decoding over float8; calls of one shape share its schedule in `plan`, empty at first.

    Takes `[batch, 1, heads, 576]`, pages of bytes `[pages, 64, 1, 656]` and picked rows `[batch, 1, picks]`, int32, and
    returns `[batch, 1, heads, 512]`.
    """
    ops = ops_of(FLASH_MLA)
    if ops is None:
        return None

    def attention(query: Tensor, pages: Tensor, rows: Tensor, scale: float) -> Tensor:
        inputs = query, pages, rows, None, None, *(plan or (None, None)), None, None, None, 512, scale, None
        out, _, *new_plan = ops.sparse_decode_fwd(*inputs)
        plan[:] = plan or new_plan
        return out

    return attention


def cudnn() -> Callable[..., Tensor] | None:
    """Return cuDNN on `[batch, heads, length, d]`, as SDPA calls it."""
    if not torch.cuda.is_available():
        return None
    return lambda q, k, v: cudnn_state(q, k, v, lse=False)[0]


def cudnn_state(q: Tensor, k: Tensor, v: Tensor, lse: bool = True) -> tuple[Tensor, Tensor]:
    """Return cuDNN's `out` and `lse`; the lse may have a last dimension of 1."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    return op(q, k, v, None, lse, 0.0, False, False, scale=q.shape[3] ** -0.5)[:2]


def cudnn_packed() -> Callable[..., Tensor] | None:
    """Return cuDNN with the query heads of a kv head as rows."""
    if not torch.cuda.is_available():
        return None
    return lambda q, k, v: cudnn_state(pack_gqa(q, k.shape[1]), k, v, lse=False)[0].reshape(q.shape)


def flash() -> Callable[..., Tensor] | None:
    """Return PyTorch's FlashAttention-2 with the query heads of a kv head as rows; it splits keys where that pays."""
    if not torch.cuda.is_available():
        return None
    return lambda q, k, v: flash_state(pack_gqa(q, k.shape[1]), k, v)[0].reshape(q.shape)


def flash_state(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v)[:2]


def flashinfer_paged(
    lengths: Sequence[int], q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tensor_cores: bool
) -> Callable[..., Tensor] | None:
    """Return FlashInfer's batch decode, planned for sequences of these lengths, whose pages follow one another.

    Takes `q` `[batch, q_heads, d]`, and `k` and `v` `[pages, PAGE, kv_heads, d]`.
    """
    if not has_flashinfer():
        return None
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    used = torch.tensor(lengths, dtype=torch.int32)
    pages = (used + PAGE - 1) // PAGE
    start = torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)])
    indices = torch.arange(int(start[-1]), dtype=torch.int32, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=tensor_cores)
    last = used - (pages - 1) * PAGE
    wrapper.plan(start, indices, last, q_heads, kv_heads, head_dim, PAGE, q_data_type=dtype, kv_data_type=dtype)
    return lambda q, k, v: wrapper.run(q, (k, v))


def flashinfer_single() -> Callable[..., Tensor] | None:
    """Return FlashInfer's decode of one request: `q` `[q_heads, d]`, `k` and `v` `[length, kv_heads, d]`."""
    if not has_flashinfer():
        return None
    from flashinfer import single_decode_with_kv_cache

    return lambda q, k, v: single_decode_with_kv_cache(q, k, v, "NHD")


def has_flashinfer() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("flashinfer") is not None


@functools.cache
def workspace() -> Tensor:
    return torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
