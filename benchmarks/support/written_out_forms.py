"""Attention of layers as models write it out, over static caches with grouped heads and a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LAYERS = 4
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def repeat_kv(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, HEADS // KV_HEADS, s, d).reshape(b, HEADS, s, d)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    """Attend like Llama and most models under `attn_implementation="eager"`."""
    weights = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * HEAD_DIM**-0.5 + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, repeat_kv(v)).transpose(1, 2).contiguous()


def soft_cap(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    """Attend like Gemma 2."""
    weights = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * HEAD_DIM**-0.5
    weights = torch.tanh(weights / 50.0) * 50.0 + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, repeat_kv(v)).transpose(1, 2).contiguous()


def with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    """Attend like gpt-oss."""
    weights = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * HEAD_DIM**-0.5 + mask
    weights = torch.cat([weights, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)], dim=-1)
    weights = F.softmax(weights - weights.max(dim=-1, keepdim=True).values, dim=-1, dtype=weights.dtype)
    return torch.matmul(weights[..., :-1], repeat_kv(v)).transpose(1, 2).contiguous()


def one_to_one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    """Attend with as many heads of keys as of queries, merged with the batch, as in relatives of BART."""
    b, s = q.shape[0], k.shape[2]
    q = q[:, :KV_HEADS].reshape(b * KV_HEADS, -1, HEAD_DIM) * HEAD_DIM**-0.5
    k, v = (x.reshape(b * KV_HEADS, s, HEAD_DIM) for x in (k, v))
    weights = (torch.bmm(q, k.transpose(1, 2)).view(b, KV_HEADS, -1, s) + mask).view(b * KV_HEADS, -1, s)
    return torch.bmm(weights.softmax(-1), v).view(b, KV_HEADS, -1, HEAD_DIM).transpose(1, 2)


FORMS: dict[str, Attend] = {"plain": plain, "soft_cap": soft_cap, "sinks": with_sinks, "one_to_one": one_to_one}


@dataclass(frozen=True)
class Case:
    """`keys` slots, all in use or the first eighth of them."""

    form: str
    batch: int
    keys: int
    full: bool
    dtype: str

    @property
    def used(self) -> int:
        return self.keys if self.full else max(1, self.keys // 8)

    def bytes(self) -> int:
        """Return the bytes of a layer's keys and values in use, each once."""
        return 2 * self.batch * KV_HEADS * self.used * HEAD_DIM * getattr(torch, self.dtype).itemsize


def cases(device: str, forms: Iterable[str]) -> list[Case]:
    batches, keys = ((1, 4), (64, 1024, 4096)) if device == "cpu" else ((1, 8, 32), (64, 512, 2048, 8192))
    dtypes = ("float32", "bfloat16") if device == "cpu" else ("bfloat16",)
    return [
        Case(form, batch, n, full, dtype)
        for form in forms
        for dtype in dtypes
        for batch in batches
        for n in keys
        for full in (True, False)
    ]


def layers(attend: Attend) -> Callable[..., Tensor]:
    """Return attention of several layers, each with a query and a cache, which share a mask."""

    def step(mask: Tensor, sinks: Tensor, *tensors: Tensor) -> Tensor:
        layers = zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True)
        return torch.stack([attend(q, k, v, mask, sinks) for q, k, v in layers])

    return step


def inputs(case: Case, device: str) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    mask = torch.zeros(case.batch, 1, 1, case.keys, dtype=dtype, device=device)
    mask[..., case.used :] = torch.finfo(dtype).min
    query, cache = (case.batch, HEADS, 1, HEAD_DIM), (case.batch, KV_HEADS, case.keys, HEAD_DIM)
    return mask, randn(HEADS), *(randn(*shape) for _ in range(LAYERS) for shape in (query, cache, cache))
