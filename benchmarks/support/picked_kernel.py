"""Attention to picked keys, and to all of them, for `sparse.py`: each checked against float64, then timed."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor

from support import picked_peers
from support.errors import attempt, relative_error
from support.picked_cases import PICKED_KEYS, SCALE, Inputs, Shape, calls, keys_of
from support.picked_peers import Candidate
from support.timing import as_graph, in_turns, microseconds

OURS = ("dense", "masked", "copied", "short", "tatten")
CANDIDATES = (*OURS, *picked_peers.PEERS)


def attend(x: Inputs, key: Tensor, value: Tensor, rope: Tensor | None, **options: object) -> Tensor:
    if rope is None:
        return torch.ops.tatten.decode_attention.default(x.query, key, value, **options)[0]
    return torch.ops.tatten.latent_attention.default(x.query, x.query_rope, key, rope, scale=SCALE, **options)[0]


def copied(s: Shape, x: Inputs) -> Tensor:
    """Copy the picks of each sequence, and attend to the copies."""
    keys = keys_of(s, x.indices).unsqueeze(-1)

    def gather(stored: Tensor) -> Tensor:
        if s.batch == 1 and keys.shape[1] == 1:
            return stored.index_select(2, keys.flatten())
        return stored.gather(2, keys.expand(-1, stored.shape[1], -1, stored.shape[3]))

    key = gather(x.key)
    value = key if x.value is x.key else gather(x.value)
    return attend(x, key, value, None if x.key_rope is None else gather(x.key_rope))


def candidates(s: Shape) -> dict[str, Candidate]:
    starts = itertools.cycle(range(0, s.length - PICKED_KEYS + 1, PICKED_KEYS))

    def short(x: Inputs) -> Callable[[], Tensor]:
        """Take different keys for each call, as picks differ: the L2 would hold the same ones."""
        start = next(starts)
        key, value, rope = (
            y if y is None else y[:, :, start : start + PICKED_KEYS] for y in (x.key, x.value, x.key_rope)
        )
        return lambda: attend(x, key, value, rope)

    def ours(attention: Callable[[Inputs], Tensor]) -> Candidate:
        return Candidate(lambda x: functools.partial(attention, x))

    return {
        "dense": ours(lambda x: attend(x, x.key, x.value, x.key_rope)),
        "masked": ours(lambda x: attend(x, x.key, x.value, x.key_rope, attn_mask=x.mask)),
        "copied": ours(lambda x: copied(s, x)),
        "short": Candidate(short),
        "tatten": ours(lambda x: attend(x, x.key, x.value, x.key_rope, indices=x.indices, index_block=s.index_block)),
        **picked_peers.candidates(s),
    }


def exact(s: Shape, x: Inputs) -> Tensor:
    """Return attention of one sequence to its picks in float64, `[heads, columns]`."""
    keys = keys_of(s, x.indices)[0]
    heads = torch.arange(x.key.shape[1], device=keys.device).unsqueeze(1)
    key, value = (stored[0][heads, keys].double() for stored in (x.key, x.value))
    query = x.query[0, :, 0].double()
    if x.query_rope is not None and x.key_rope is not None:
        query = torch.cat((query, x.query_rope[0, :, 0].double()), -1)
        key = torch.cat((key, x.key_rope[0][heads, keys].double()), -1)
    scale = SCALE if x.key_rope is not None else s.head_dim**-0.5
    weights = (query.unflatten(0, (len(key), -1)) @ key.mT * scale).softmax(-1)
    return (weights @ value).flatten(0, 1)


def error(s: Shape, x: Inputs, out: Tensor, stored: Callable[[Inputs], Inputs]) -> float:
    """Return the larger relative error of the first and the last sequence; NaN if any number of `out` is."""
    if out.isnan().any():
        return math.nan
    errors = []
    for b in {0, s.batch - 1}:
        want = exact(s, stored(Inputs(*(None if y is None else y[b : b + 1] for y in x))))
        errors.append(relative_error(out[b, :, 0].double(), want))
    return max(errors)


def prepare(s: Shape, name: str, candidate: Candidate, inputs: list[Inputs]) -> Callable[[], object]:
    """Return a step of all calls; raise if it does not run, or is wrong."""
    calls = [candidate.bind(x) for x in inputs]

    def step() -> list[Tensor]:
        return [call() for call in calls]

    if inputs[0].query.is_cuda:
        for _ in range(2):
            calls[0]()
        torch.cuda.synchronize()
        step = as_graph(step)
    outs = step()
    most = 1e-5 if s.dtype == torch.float32 else 1e-2
    errors = [error(s, x, out, candidate.stored) for x, out in zip(inputs, outs, strict=True)]
    if name not in ("dense", "short") and not all(x < most for x in errors):
        raise ArithmeticError(f"wrong: relative errors {min(errors):.1e} to {max(errors):.1e}, at most {most:g}")
    return step


def measure(s: Shape, device: str, rate: float, rounds: int) -> dict[str, object]:
    """Return a row of the results; `rate` is bytes per second."""
    inputs = calls(s, device)
    tried = {name: attempt(functools.partial(prepare, s, name, x, inputs)) for name, x in candidates(s).items()}
    ready = {name: x for name, x in tried.items() if not isinstance(x, str)}
    us = in_turns(ready, rounds, lambda _, step: microseconds(step, device, len(inputs)))
    return {
        **asdict(s),
        "dtype": str(s.dtype)[6:],
        "us": us,
        "bytes_us": s.picked_bytes / rate * 1e6,
        "dense_bytes_us": s.batch * s.length * s.row_bytes / rate * 1e6,
        "left_out": {name: x for name, x in tried.items() if isinstance(x, str)},
    }
