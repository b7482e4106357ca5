"""FlashAttention-3 under transformers' continuous batching, from vLLM's wheel instead of a package of its own.

`install` adds the attention implementation `NAME`, which transformers takes for FlashAttention-3: it calls `varlen` in
steps with a chunk of a prefill, and `with_kvcache` in decode steps of models without sliding layers. The latter writes
the keys of a step first, in one launch of its own, as vLLM does.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations.flash_attention import flash_attention_forward

from support import peers

NAME = "vllm_flash_attention_3"


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attend over `q`, `k` and `v` `[tokens, heads, head_dim]`, one sequence after the other."""
    options = {"causal": causal, "scale": softmax_scale, "softcap": softcap, "sinks": s_aux}
    options["window"] = window_size[0] + 1 if window_size else None
    attention = peers.fa3() if q.is_cuda else _plain
    return attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)[0]


def with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Write `k` and `v` `[batch, 1, heads, head_dim]` at `cache_seqlens`, and attend; rows of padding have -1 there."""
    batch, pages = block_table.shape
    longest = pages * k_cache.shape[1]
    options = {"seqused_k": cache_seqlens + 1, "block_table": block_table, "causal": causal, "scale": softmax_scale}
    options |= {"softcap": softcap, "sinks": s_aux}
    if q.is_cuda:
        from support.page_writer import write_tokens

        write_tokens(k_cache, v_cache, k, v, cache_seqlens, block_table)
    else:
        _write_plainly(k_cache, v_cache, k, v, cache_seqlens, block_table)
    attention = peers.fa3() if q.is_cuda else _plain
    out: Tensor = attention(q[:, 0], k_cache, v_cache, _starts(q.device)[: batch + 1], None, 1, longest, **options)[0]
    return out[:, None]


@functools.cache
def _starts(device: torch.device) -> Tensor:
    """Return starts of up to 4096 sequences of one token, made outside of graphs, whose memory others may take."""
    assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing()
    return torch.arange(4097, dtype=torch.int32, device=device)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Compute the same on a CPU, to try the code: a sequence at a time, without soft caps and sinks."""
    assert not softcap
    assert sinks is None
    out, starts = torch.zeros_like(q), cu_q.tolist()
    for i, (start, stop) in enumerate(itertools.pairwise(starts)):
        if block_table is None:
            keys, values = (x[cu_k[i] : cu_k[i + 1]] for x in (k, v))
        else:
            pages = block_table[i, : -(-int(seqused_k[i]) // k.shape[1])]
            keys, values = (x[pages].flatten(0, 1)[: int(seqused_k[i])] for x in (k, v))
        if start == stop or not len(keys):
            continue
        distance = torch.arange(start - stop + len(keys), len(keys))[:, None] - torch.arange(len(keys))
        mask = (distance >= 0) | (not causal)
        if window is not None:
            mask &= distance < window
        heads = (x.transpose(0, 1)[None] for x in (q[start:stop], keys, values))
        out[start:stop] = F.scaled_dot_product_attention(*heads, mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
    return out, None


def _write_plainly(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, block_table: Tensor
) -> None:
    for i, at in enumerate(cache_seqlens.tolist()):
        if at >= 0:
            page, slot = divmod(at, k_cache.shape[1])
            k_cache[block_table[i, page], slot], v_cache[block_table[i, page], slot] = k[i, 0], v[i, 0]


def install() -> None:
    """Make transformers take `NAME` for FlashAttention-3."""
    load = flash_utils._lazy_imports
    if load.__module__ == __name__:
        return

    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if implementation == NAME:  # dense attention, which continuous batching never calls, and the others in order
            return None, varlen, with_kvcache, flash_utils._pad_input, flash_utils._unpad_input
        return load(implementation, *args, **kwargs)

    if torch.cuda.is_available():
        _starts(torch.device("cuda", torch.cuda.current_device()))
    flash_utils._lazy_imports = lazy_imports
    AttentionInterface.register(NAME, flash_attention_forward)


def use(model: PreTrainedModel) -> None:
    """Make a model attend with `NAME`, which gpt-oss would replace by an implementation that it lists."""
    install()
    model._compatible_flash_implementations = None
    model.set_attn_implementation(NAME)
