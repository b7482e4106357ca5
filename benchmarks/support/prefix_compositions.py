"""Attention to a shared prefix as others do it: compositions of two kernels and a merge, shared pages, a cascade."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from support import peers
from support.prefix_cases import Row
from tatten.ops.layout import pack_gqa


def compiled(fn: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    return torch.compile(fn, backend=backend, dynamic=False)


def merge(prefix_out: Tensor, prefix_lse: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Merge two states, heads in rows of any shape, the prefix's `[batch, ..., d]`, to `[batch, q_heads, 1, d]`."""
    share = torch.sigmoid(prefix_lse - lse.reshape(prefix_lse.shape)).unsqueeze(-1)
    merged = prefix_out.float() * share + out.reshape(prefix_out.shape).float() * (1 - share)
    return merged.to(out.dtype).reshape(out.shape[0], -1, 1, out.shape[-1])


def flash_prefix(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state `[batch, kv_heads, group, d]` of all queries over the prefix."""
    batch, _, _, head_dim = q.shape
    kv_heads = k.shape[1]
    rows = q.view(batch, kv_heads, -1, head_dim).transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
    out, lse = peers.flash_state(rows, k, v)
    return out.view(kv_heads, batch, -1, head_dim).transpose(0, 1), lse.view(kv_heads, batch, -1).transpose(0, 1)


def aten_flash(q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the composition that anyone can write: fold, two flash kernels, a merge."""
    return merge(*flash_prefix(q, prefix_k, prefix_v), *peers.flash_state(pack_gqa(q, k.shape[1]), k, v))


def flash_cudnn(q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merge(*flash_prefix(q, prefix_k, prefix_v), *peers.cudnn_state(q, k, v))


def fa3_cudnn(
    row: Row, q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor
) -> Callable[[], Tensor] | None:
    """Return FlashAttention-3 on the prefix, sequences as tokens of one query, and cuDNN; None if unavailable."""
    kernel = peers.fa3()
    if kernel is None:
        return None
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=q.device) for n in (row.batch, row.prefix))
    keys, values = prefix_k[0].transpose(0, 1), prefix_v[0].transpose(0, 1)
    merged = compiled(merge, "inductor")

    def attention() -> Tensor:
        out, lse = kernel(q.squeeze(2), keys, values, cu_q, cu_k, row.batch, row.prefix)
        return merged(out, lse.t(), *peers.cudnn_state(q, k, v))

    return attention


def shared_pages(row: Row, prefix: Tensor, suffix: Tensor) -> Tensor:
    """Return `[pages, PAGE, kv_heads, d]`: pages of the prefix, then those of each sequence's suffix."""
    return torch.cat([x.transpose(1, 2).reshape(-1, peers.PAGE, row.kv_heads, row.head_dim) for x in (prefix, suffix)])


def paged(row: Row, q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor] | None:
    """Return FlashAttention-3 over pages, where all sequences name those of the prefix; None if unavailable."""
    kernel = peers.fa3()
    if kernel is None:
        return None
    keys, values = shared_pages(row, prefix_k, k), shared_pages(row, prefix_v, v)
    n_prefix, length = row.prefix // peers.PAGE, row.prefix + row.suffix
    pages = torch.arange(len(keys), dtype=torch.int32, device=q.device)
    table = torch.cat([pages[:n_prefix].expand(row.batch, -1), pages[n_prefix:].view(row.batch, -1)], 1)
    cu_q = torch.arange(row.batch + 1, dtype=torch.int32, device=q.device)
    used = torch.full((row.batch,), length, dtype=torch.int32, device=q.device)
    options = {"seqused_k": used, "block_table": table}
    return lambda: kernel(q.squeeze(2), keys, values, cu_q, None, 1, length, **options)[0].unsqueeze(2)


def cascade(
    row: Row, q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor
) -> Callable[[], Tensor] | None:
    """Return FlashInfer's two-level cascade on pages, planned beforehand; None if it is not installed."""
    try:
        import flashinfer
    except ImportError:
        return None
    page = peers.PAGE
    n_prefix, n_suffix = row.prefix // page, row.suffix // page
    pages = torch.stack((shared_pages(row, prefix_k, k), shared_pages(row, prefix_v, v)), dim=1)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=q.device)

    steps = torch.arange(row.batch + 1, dtype=torch.int32, device=q.device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, torch.empty(256 << 20, dtype=torch.uint8, device=q.device), "NHD"
    )
    wrapper.plan(
        [ints(0, row.batch), steps],
        [ints(0, n_prefix), steps * n_suffix],
        [
            torch.arange(n_prefix, dtype=torch.int32, device=q.device),
            n_prefix + torch.arange(row.batch * n_suffix, dtype=torch.int32, device=q.device),
        ],
        [ints(page), torch.full((row.batch,), page, dtype=torch.int32, device=q.device)],
        row.q_heads,
        row.kv_heads,
        row.head_dim,
        page,
        q_data_type=q.dtype,
    )
    flat = q.squeeze(2)
    return lambda: wrapper.run(flat, pages).unsqueeze(2)
