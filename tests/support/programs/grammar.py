"""Whole programs: caches, writes, segments put together, masks, attention of one or several layers, and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st

from programs.attention import attend, make_query, use_elsewhere, use_result
from programs.builder import Builder
from programs.masks import Scores, mask_for_call, mask_input
from programs.program import Mode, Program
from programs.storage import segment
from programs.views import detour, joined, more_heads, more_sequences
from programs.writes import write, write_mask

BATCHES = {4: (1, 2, 4), 2: (1, 2), 6: (1, 2, 3, 6), 1: (1,), 3: (1, 3)}  # and rows that their sequences may share
LENGTHS = (3, 8, 5, 17, 33, 1, 64, 70)
DTYPES = ("float32", "float32", "bfloat16", "bfloat16", "float16", "float64")


LATER = (65, 130, 301, 517)  # of a conversation whose first turns are short
LOW = {"bfloat16", "float16"}


@st.composite
def programs(
    draw: Callable[..., Any], inner: tuple[str, ...] = ("eager",) * 5 + ("aot_eager",), cpp_wrapper: bool = False
) -> Program:
    """A program that eager PyTorch runs, with the ways to run it."""
    dtype = draw(st.sampled_from(DTYPES))
    dynamic = draw(st.sampled_from((None,) * 15 + (True,)))  # which takes seconds for each
    depth = draw(st.sampled_from((2, 1) if dynamic else (2, 1, 2, 3)))
    calls = draw(st.sampled_from((2, 2, 3) if dynamic else (1, 1, 1, 1, 2, 3)))
    lengths = st.sampled_from(LENGTHS if calls == 1 else (3, 8, 5, 17))
    sizes = [{f"n{i}": draw(lengths) + i for i in range(depth)} for _ in range(calls)]
    autocast = draw(st.integers(0, 99)) >= 95
    b = Builder(draw, dtype, sizes, autocast)
    return _program(
        b, depth, 1 if dynamic else b.pick((1, 1, 1, 2, 2, 3)), inner, Mode(cpp_wrapper=cpp_wrapper, dynamic=dynamic)
    )


@st.composite
def dynamic_programs(draw: Callable[..., Any], inner: tuple[str, ...] = ("eager",) * 5 + ("aot_eager",)) -> Program:
    """A program whose sizes and numbers are inputs of its graphs, called with several of them."""
    way = draw(st.sampled_from(("dynamic", "dynamic", "short first", "marked", "unbacked", "items")))
    depth = draw(st.sampled_from((1, 2)))
    if way == "short first":
        lengths = [draw(st.sampled_from((3, 4, 8))), draw(st.sampled_from((5, 6, 9)))]
        lengths += [draw(st.sampled_from(LATER)) for _ in range(2)]
    else:
        lengths = draw(st.permutations((3, 8, 5, 17)))[: draw(st.sampled_from((2, 2, 3)))]
    sizes = [{f"n{i}": n + i * (1 + n % 3) for i in range(depth)} for n in lengths]
    mode = Mode(
        dynamic=True if way in ("dynamic", "items") else draw(st.sampled_from((None, True))),
        marks={"marked": "dynamic", "unbacked": "unbacked"}.get(way, ""),
        scalars=way == "items" and draw(st.sampled_from((True, True, False))),
        weighed=way == "short first" and draw(st.booleans()),
    )
    b = Builder(draw, draw(st.sampled_from(DTYPES)), sizes, False, "dynamic")
    return _program(b, depth, 1, inner, mode, items=way == "items")


@st.composite
def wrapped_programs(draw: Callable[..., Any], inner: tuple[str, ...] = ("eager",) * 5 + ("aot_eager",)) -> Program:
    """A program whose attention is under `vmap`, `functional_call` or `grad`."""
    dynamic = draw(st.sampled_from((None, None, None, True)))
    depth = draw(st.sampled_from((1, 2)))
    lengths = draw(st.permutations((3, 8, 5, 17)))[: draw(st.sampled_from((2, 3) if dynamic else (1, 1, 2)))]
    sizes = [{f"n{i}": n + i * (1 + n % 3) for i in range(depth)} for n in lengths]
    b = Builder(draw, draw(st.sampled_from(DTYPES)), sizes, False, "wrapped")
    return _program(b, depth, b.pick((1, 1, 1, 2)), inner, Mode(dynamic=dynamic))


def _program(b: Builder, depth: int, layers: int, inner: tuple[str, ...], mode: Mode, items: bool = False) -> Program:
    returned = [*_layers(b, depth, layers, items), *b.returned]
    returned += [x for x in b.tensors if not x.startswith("out") and b.chance(15)]
    # Compilers other than "eager" round what is written out elsewhere than eager PyTorch does.
    exactly = b.forms and (b.dtype in LOW or "gradient" in b.forms or "flex" in b.forms)
    mode = dataclasses.replace(
        mode,
        inner="eager" if exactly or any(x.startswith("scores") for x in returned) else b.pick(inner),
        inference="gradient" not in b.forms and b.chance(15),
        threads=b.pick((1, 2, 3)),
        thresholds=b.pick(((0, 1, 1), (1 << 18, 1 << 20, 64), (1 << 18, 1, 64))),
    )
    if mode.inner == "eager" and b.chance(20):
        mode = dataclasses.replace(mode, fuses=True)
    return Program(
        b.dtype,
        tuple(b.sizes),
        tuple(b.inputs),
        tuple(b.steps),
        tuple(dict.fromkeys(returned)),
        mode,
        b.autocast,
        tuple(b.settings),
        b.marks() if mode.marks else (),
    )


def _layers(b: Builder, depth: int, layers: int, items: bool) -> list[str]:
    """The steps of all layers; the names of what they return."""
    batch = b.pick(tuple(BATCHES))
    kv_heads, group = b.pick((2, 1, 3)), b.pick((2, 1, 4, 3))
    head_dim, q_len = b.pick((8, 4, 16)), b.pick((1, 1, 1, 1, 1, 2) if b.kind == "dynamic" else (1, 1, 2, 3, 4))
    widths = head_dim, head_dim + (4 if b.chance(10) else 0)
    scores = Scores(batch, kv_heads * group, q_len, b.length)
    rows = [*sorted(b.pick(BATCHES[batch]) for _ in range(depth - 1)), batch]
    if b.chance(10):
        rows[-1] = b.pick(BATCHES[batch])
    gqa, heads_first = b.chance(40), b.chance(30)
    poisoned = b.chance(5)
    mask = mask_input(b, scores, poisoned) if poisoned or b.chance(75) else None

    slower = 3 if b.kind == "dynamic" else 1  # each op costs Dynamo about ten times as much with symbolic sizes
    returned: list[str] = []
    last = None
    kept: list[str] = []
    for _ in range(layers):
        segments = [segment(b, r, kv_heads, f"n{i}", widths, items) for i, r in enumerate(rows)]
        if kept and b.chance(20):  # this layer reads what the first one wrote
            segments[0] = kept
        kept = segments[0]
        query = make_query(b, batch, scores.heads, q_len, head_dim, last)
        if b.chance(40 // slower):
            write(b)
        parts = []
        for pair in segments:
            pair = more_sequences(b, detour(b, pair), batch)
            if heads_first and not gqa:
                pair = more_heads(b, pair, scores.heads)
            parts.append(detour(b, pair))
            if b.chance(8 // slower):
                write(b)
        pair = joined(b, parts)
        if poisoned:
            for x in pair:
                b.step(f"{x} = torch.where(torch.arange({x}.size(2))[:, None] == {x}.size(2) - 1, nan, {x})")
        if not heads_first and not gqa:
            pair = more_heads(b, pair, scores.heads)
        key, value = detour(b, pair)
        if b.chance(30 // slower):
            write(b)
        if mask is not None and b.chance(6):
            write_mask(b, mask)
        seen = None if mask is None else mask_for_call(b, mask, key)
        if b.chance(10):
            write(b)
        out = attend(b, query, key, value, seen)
        if out is None:
            continue
        last = out
        if b.chance(25 // slower):
            write(b)
        returned += use_result(b, out)
        if b.chance(25):
            returned += use_elsewhere(b)
    return returned or list(b.tensors)
