"""A model over the shared-prefix cache, whose every output is checked against recomputation of the whole text."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tatten.caches.shared_prefix import SharedPrefixCache

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 4, 2, 8, 23
Texts = list[list[int]]


class Decoder(torch.nn.Module):
    """A model of attention only; without a cache it processes whole texts."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        width = HEADS * HEAD_DIM
        random_table = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
        self.register_buffer("tokens", random_table(VOCAB, width))
        self.register_buffer("places", random_table(64, width))
        self.register_buffer("weights", random_table(LAYERS, width, width + 2 * KV_HEADS * HEAD_DIM) / width**0.5)

    def forward(self, tokens: Tensor, cache: SharedPrefixCache | None = None) -> Tensor:
        q_len = tokens.shape[1]
        positions = torch.arange(q_len)[None] if cache is None else cache.positions(q_len)
        mask = torch.ones(q_len, q_len, dtype=torch.bool).tril() if cache is None else cache.mask(q_len)
        x = self.tokens[tokens] + self.places[positions]
        for layer, weight in enumerate(self.weights):
            heads = (x @ weight).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            if cache is not None:
                k, v = cache.update(layer, k, v)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            x = x + out.transpose(1, 2).flatten(2)
        return x


MODEL = Decoder()


def step(cache: SharedPrefixCache, texts: Texts, q_len: int = 1, forward: Callable = MODEL) -> Texts:
    """Append tokens to the texts, and check each output against that of the whole text."""
    new = torch.randint(VOCAB, (len(texts), q_len))
    got = forward(new, cache)
    texts = [text + row for text, row in zip(texts, new.tolist(), strict=True)]
    want = torch.cat([MODEL(torch.tensor([text]))[:, -q_len:] for text in texts])
    torch.testing.assert_close(got, want)
    return texts


def prefill(prompts: int = 2, length: int = 5, padding: str | None = None) -> tuple[SharedPrefixCache, Texts]:
    tokens = torch.randint(VOCAB, (prompts, length))
    real = torch.ones(prompts, length, dtype=torch.bool)
    if padding:
        real[0, :2] = False
        real = real if padding == "left" else real.flip(1)
    lens = real.sum(1) if padding == "lengths" else None
    cache = SharedPrefixCache(LAYERS, real if padding in ("left", "right") else None, prompt_lens=lens)
    for chunk in tokens.split(3, dim=1):
        MODEL(chunk, cache)
    return cache, [row[mask].tolist() for row, mask in zip(tokens, real, strict=True)]


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def state(cache: SharedPrefixCache) -> list[Tensor]:
    lengths = [layer.length for layer in cache.layers if layer.static]
    return [tensor.clone() for tensor in (*(t for layer in cache.layers for t in layer.tensors), *lengths)]


def tensors(*shape: int, **kwargs: object) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, *shape, dtype=torch.float64, **kwargs).unbind()  # type: ignore[arg-type]
