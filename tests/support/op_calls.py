"""Random calls of `decode_attention` and `bifurcated_attention`, as data: a call prints as what makes it again.

`draw_call` takes whatever chooses one of a sequence: hypothesis, or `random.Random(seed).choice`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from attention_cases import places_in_reach
from op_masks import NEG_INF, Choose, Mask, draw_mask, laid_out
from torch import Tensor

import tatten

KV_LENS = (1, 0, 2, 3, 7, 33, 63, 64, 65, 100, 127, 128, 129, 150)
HEAD_DIMS = (8, 1, 3, 16, 23, 32, 64, 80)
TINY_KV_LENS, TINY_HEAD_DIMS = (1, 0, 7, 63, 64, 65, 129), (8, 3, 16, 23)
LAYOUTS = ("dense", "heads_inside", "transposed", "length_first", "sliced", "stepped", "one_batch", "one_head")
FLOORS = (NEG_INF, -1e4, -1e9, "min")


@dataclass(frozen=True)
class Segment:
    """Keys and values that `batch // rows` sequences share, with their mask; `mask_rows` if it has batch.

    `indexed`: each sequence reads any of the rows instead.
    """

    rows: int
    kv_len: int
    mask: Mask | None = None
    mask_rows: int = 1
    layouts: tuple[str, str] = ("dense", "dense")
    indexed: bool = False


@dataclass(frozen=True)
class Call:
    """One call; with more than one segment, or fewer rows than sequences, of `bifurcated_attention`.

    Attributes:
        lens, float8: for decode attention only; `float8` is "", "plain" or "scaled".
        sinks: "", "random" or "some", where others are -inf.
        found: whether what the mask leaves is found beforehand, as the backend does it.
        factors: of keys and of values, which are normal else.
        thresholds: of a CPU, see `fuzz.small_shapes`: RUN_BYTES, keys of a piece and PACKED_ROWS; None for its own.
        threads: how many a CPU thinks it has.
        poison: whether keys and values that are never read are NaN; a CPU goes other ways where they are numbers.
    """

    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    segments: tuple[Segment, ...]
    batch: int = 1
    q_len: int = 1
    head_dim: int = 8
    value_dim: int = 8
    scale: float | None = None
    layout: str = "dense"
    lens: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: str = ""
    sinks_dtype: torch.dtype = torch.float32
    float8: str = ""
    found: bool = False
    factors: tuple[float, float] = (1.0, 1.0)
    thresholds: tuple[int, int, int] | None = None
    threads: int = 2
    poison: bool = True
    seed: int = 0

    @property
    def is_decode(self) -> bool:
        return len(self.segments) == 1 and self.segments[0].rows == self.batch and not self.segments[0].indexed

    @property
    def split_bytes(self) -> int:
        """SPLIT_BYTES for which a piece has at least so many keys as `thresholds` says."""
        element = 4 if self.float8 and self.dtype != torch.float64 else self.dtype.itemsize
        rows = max(segment.rows for segment in self.segments)
        each = 2 * rows * self.kv_heads * max(self.head_dim, self.value_dim) * element
        return 1 if self.thresholds is None else max(1, self.thresholds[1] * each)

    @property
    def most_parts(self) -> int:
        """Into how many parts the KV can be cut: a few for each thread of a CPU, tiles of 16 keys on a GPU."""
        return sum(max(2 * self.threads + 1, segment.kv_len // 16 + 1) for segment in self.segments)

    def inputs(self, device: str = "cpu") -> dict[str, Any]:
        """Arguments of the op. Poison is before the first key that counts, and after the last."""
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int, dtype: torch.dtype = self.dtype, factor: float = 1.0) -> Tensor:
            return (factor * torch.randn(*shape, generator=generator)).to(dtype)

        def placed(x: Tensor, layout: str = "dense") -> Tensor:
            return laid_out(x.to(device), layout)

        query = randn(self.batch, self.q_heads, self.q_len, self.head_dim)
        given: dict[str, Any] = {"query": placed(query, self.layout), "scale": self.scale}
        lens = None
        if self.lens is not None:
            lens = torch.randint(0, self.segments[0].kv_len + 1, (self.batch,), generator=generator).to(self.lens)
        keys, values, masks, rows = [], [], [], []
        total = sum(segment.kv_len for segment in self.segments)
        in_reach = places_in_reach(lens, self.batch, self.q_len, total, self.window)
        reach_of_each = in_reach.split([segment.kv_len for segment in self.segments], dim=3)
        for segment, reach in zip(self.segments, reach_of_each, strict=True):
            own_rows = torch.randint(segment.rows, (self.batch,), generator=generator) if segment.indexed else None
            sizes = (self.batch, self.q_heads, self.q_len, segment.kv_len)
            mask = None if segment.mask is None else segment.mask.make(sizes, segment.mask_rows, generator)
            shape = (segment.rows, self.kv_heads, segment.kv_len)
            pair = [
                randn(*shape, dim, factor=factor)
                for dim, factor in zip((self.head_dim, self.value_dim), self.factors, strict=True)
            ]
            unread = ~self._span(segment, mask, reach, own_rows)
            for x, layout, held in zip(pair, segment.layouts, (keys, values), strict=True):
                blank = unread.all(dim=0, keepdim=True) if layout == "one_batch" else unread
                x = x.masked_fill(blank[:, None, :, None] & self.poison, float("nan"))
                held.append(placed(x.to(torch.float8_e4m3fn) if self.float8 else x, layout))
            masks.append(None if mask is None else segment.mask.lay_out(mask.to(device), sizes))
            rows.append(None if own_rows is None else own_rows.to(device))
        given |= {"window": self.window, "softcap": self.softcap}
        if self.sinks:
            sinks = 3 * randn(self.q_heads, dtype=self.sinks_dtype)
            if self.sinks == "some":
                sinks = sinks.masked_fill(sinks < 0, NEG_INF)
            given["sinks"] = sinks.to(device)
        if not self.is_decode:
            return given | {"keys": keys, "values": values, "attn_masks": masks, "rows": rows}
        given |= {"key": keys[0], "value": values[0], "attn_mask": masks[0]}
        given["kv_lens"] = None if lens is None else lens.to(device)
        if self.float8 == "scaled":
            scales = randn(2, self.kv_heads, dtype=torch.float32).to(device)
            given["key_scale"], given["value_scale"] = scales.unbind()
        return given

    def _span(self, segment: Segment, mask: Tensor | None, reach: Tensor, rows: Tensor | None) -> Tensor:
        """bool `[rows, kv_len]`: keys between the first and the last that any sequence of a row attends to."""
        if mask is not None:
            visible = mask if mask.dtype == torch.bool else mask != NEG_INF
            reach = reach & for_each_sequence(visible, self.batch, rows)
        used = reach.flatten(1, 2).any(dim=1)
        read = torch.arange(self.batch) * segment.rows // self.batch if rows is None else rows
        used = torch.zeros(segment.rows, segment.kv_len).index_add(0, read, used.expand(self.batch, -1).float()) > 0
        return (used.cumsum(1) > 0) & (used.flip(1).cumsum(1).flip(1) > 0)

    def run(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The op's answer."""
        if not self.found:
            op = tatten.decode_attention if self.is_decode else tatten.bifurcated_attention
            return op(**inputs, return_lse=True)
        query, scale = inputs["query"], inputs["scale"]
        if not self.is_decode:
            lists = [inputs[name] for name in ("keys", "values", "attn_masks")]
            found = [_found(*x) for x in zip(lists[0], lists[2], inputs["rows"], strict=True)]
            groups = [row_groups(query, *x) for x in zip(lists[0], inputs["rows"], strict=True)]
            variant = {name: inputs.get(name) for name in ("window", "softcap", "sinks")}
            return torch.ops.tatten.bifurcated_attention.default(query, *lists, found, scale, groups, **variant)
        names = ("query", "key", "value", "attn_mask", "kv_lens")
        extras = {name: x for name, x in inputs.items() if name not in (*names, "scale")}
        found = _found(inputs["key"], inputs["attn_mask"])
        return torch.ops.tatten.decode_attention.default(*[inputs[name] for name in names], scale, found, **extras)


def _found(key: Tensor, mask: Tensor | None, rows: Tensor | None = None) -> Tensor | None:
    if mask is None or mask.shape[-1] != key.shape[2]:
        return None
    return torch.ops.tatten.block_mask.default(mask, key.shape[0], rows)


def row_groups(query: Tensor, key: Tensor, rows: Tensor | None) -> Tensor | None:
    queries = query.shape[1] // key.shape[1] * query.shape[2]
    return None if rows is None else torch.ops.tatten.row_groups.default(rows, key.shape[0], queries)


def for_each_sequence(x: Tensor, batch: int, rows: Tensor | None) -> Tensor:
    """Return the row of each sequence in a tensor with an entry for each stored row.

    A tensor with one entry for all, or with one for each sequence, is returned as it is.
    """
    if x.dim() < 4 or x.shape[0] in (1, batch):
        return x
    return x.repeat_interleave(batch // x.shape[0], dim=0) if rows is None else x[rows]


def together(inputs: dict[str, Any]) -> dict[str, Any]:
    """Segments as one KV with a copy for each sequence: what `decode_attention` is given for the same answer."""
    if "keys" not in inputs:
        return inputs
    query = inputs["query"]
    exact = torch.promote_types(query.dtype, torch.float32)  # for masks of either dtype
    parts: dict[str, list[Tensor]] = {"key": [], "value": [], "attn_mask": []}
    for key, value, mask, rows in zip(
        inputs["keys"], inputs["values"], inputs["attn_masks"], inputs["rows"], strict=True
    ):
        for name, x in (("key", key), ("value", value)):
            copies = x.repeat_interleave(query.shape[0] // x.shape[0], dim=0) if rows is None else x[rows]
            parts[name].append(copies)
        bias = torch.zeros((), dtype=exact, device=query.device) if mask is None else mask
        if bias.dtype == torch.bool:
            bias = torch.where(bias, 0.0, NEG_INF)
        bias = for_each_sequence(bias, query.shape[0], rows)
        parts["attn_mask"].append(bias.to(exact).expand(*query.shape[:3], key.shape[2]))
    whole = {name: torch.cat(x, dim=3 if name == "attn_mask" else 2) for name, x in parts.items()}
    variant = {name: inputs[name] for name in ("window", "softcap", "sinks") if name in inputs}
    return {"query": query, **whole, "scale": inputs["scale"], **variant}


def draw_call(choose: Choose, tiny: bool = False) -> Call:
    """A call of either op; `tiny` is for an interpreter."""
    dtype = choose([torch.float32, torch.float16, torch.bfloat16, *([] if tiny else [torch.float64])])
    batch, kv_heads = choose([1, 2] if tiny else [1, 2, 3, 4, 6]), choose([1, 2] if tiny else [1, 2, 3])
    kv_lens, head_dims = (TINY_KV_LENS, TINY_HEAD_DIMS) if tiny else (KV_LENS, HEAD_DIMS)
    decode = choose([True, False])
    divisors = [batch] if decode else [n for n in range(1, batch + 1) if batch % n == 0]
    infinities = [False, False, False, True]

    def segment() -> Segment:
        indexed = not decode and choose([False, True])
        rows = choose(range(1, batch + 2)) if indexed else choose(divisors)
        masked = choose([False, True, True])
        mask = draw_mask(choose, dtype, FLOORS, infinities) if masked else None
        layouts = choose(LAYOUTS), choose(LAYOUTS)
        return Segment(rows, choose(kv_lens), mask, choose(sorted({rows, batch})), layouts, indexed)

    segments = tuple(segment() for _ in range(1 if decode else choose([2, 1, 3] if tiny else [2, 1, 3, 4, 5])))
    common = {
        "dtype": dtype,
        "q_heads": kv_heads * choose([1, 2, 3] if tiny else [1, 2, 3, 4]),
        "kv_heads": kv_heads,
        "segments": segments,
        "batch": batch,
        "q_len": choose([1, 2] if tiny else range(1, 9)),
        "head_dim": choose(head_dims),
        "value_dim": choose(head_dims),
        "scale": choose([None, 0.3, 2.0, -1.0, 0.0]),
        "window": choose([None, 1, 5, 40] if decode else [None, None, 1, 40]),
        "softcap": choose([None, None, 1.5, 30.0]),
        "sinks": choose(["", "", "random", "some"]),
        "sinks_dtype": choose([torch.float32, dtype]),
        "layout": choose(LAYOUTS),
        "found": choose([False, True]),
        "factors": (choose([1.0, 8.0]), choose([1.0, 1e-3, 1e3])),
        "thresholds": choose([None, (0, 0, 1), (0, 1, 1), (0, 20, 64), (1 << 18, 1, 1)]),
        "threads": choose([2, 1, 3, 16]),
        "poison": choose([True, False]),
        "seed": choose(range(1000)),
    }
    if not Call(**common).is_decode:
        return Call(**common)
    float8 = choose(["", "", "plain", "scaled"])
    if float8:
        common["factors"] = common["factors"][0], 1.0
    return Call(
        **common,
        lens=choose([None, torch.int64, torch.int32]),
        float8=float8,
    )
