"""The position of the largest score of a row, computed by many programs of a GPU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

CHUNK = 1024  # scores of a program


def argmax(scores: Tensor) -> Tensor:
    """Return `scores.argmax(-1)`: the first of the largest scores of each row, or the first NaN.

    Inductor reads a row of an argmax in one program. Chunks of a row give work to more of a GPU.

    Args:
        scores: `[..., n]`, float32.

    Returns:
        int64 `[...]`.
    """
    if scores.device.type != "cuda" or scores.shape[-1] <= CHUNK:
        return scores.argmax(-1)
    return argmax_of_chunks(scores)


def argmax_of_chunks(scores: Tensor) -> Tensor:
    """Return `scores.argmax(-1)` for scores of any device, by an argmax of each chunk and one of their maxima."""
    padded = F.pad(scores, (0, -scores.shape[-1] % CHUNK), value=float("-inf"))
    chunks: Tensor = padded.unflatten(-1, (-1, CHUNK))
    chunk = chunks.amax(-1).argmax(-1, keepdim=True)
    return (chunk * CHUNK + chunks.argmax(-1).gather(-1, chunk)).squeeze(-1)
