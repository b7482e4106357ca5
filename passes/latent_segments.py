"""Segments of latents along the sequence, where sequences share some: each with the rope that belongs to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from tatten.ops.layout import BATCH, LENGTH
from tatten.passes.segments import find_segments
from tatten.passes.stored import Stored
from tatten.passes.symbolic import known_different, known_equal
from tatten.passes.views import Walk


@dataclass(frozen=True)
class LatentSegment:
    """Latents as they are stored, and what all heads' keys have in common there, if there is such a thing."""

    latent: Stored
    rope: Stored | None


def shared_segments(latent: Walk, rope: Walk | None, call: Node) -> tuple[LatentSegment, ...]:
    """The segments of latents and of rope; none if no sequences share latents, or if the two are not cut alike.

    Empty ones, such as what was not generated yet, are left out.

    Args:
        latent: from what keys and values are projected from.
        rope: from the part of the keys that heads share, as it is copied into them.
        call: the attention; what was concatenated may not be written before it.
    """
    latents = _with_keys(latent)
    ropes: Sequence[Stored | None] = [None] * len(latents) if rope is None else _with_keys(rope)
    if not any(x.shared for x in latents) or len(latents) != len(ropes):
        return ()
    segments = tuple(map(LatentSegment, latents, ropes))
    return segments if all(_can_be_read(x, call) for x in segments) else ()


def _with_keys(start: Walk) -> list[Stored]:
    return [x for x in find_segments(start, rows=False) if not known_equal(x.size(LENGTH), 0)]


def _can_be_read(segment: LatentSegment, call: Node) -> bool:
    stored = [x for x in (segment.latent, segment.rope) if x is not None]
    alike = all(known_equal(x.size(role), segment.latent.size(role)) for x in stored for role in (BATCH, LENGTH))
    alike = alike and known_different(segment.latent.size(LENGTH), 0)
    return alike and all(x.rows is None and not x.written_before(call) for x in stored)
