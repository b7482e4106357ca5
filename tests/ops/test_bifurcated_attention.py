"""`tatten::bifurcated_attention`: segments of any tree equal float64 attention over a copy of all for each sequence."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from attention_cases import NEG_INF, assert_state
from devices import DEVICES
from torch import Tensor
from torch.library import opcheck

import tatten
from tatten.ops.cpu import flash, thresholds
from tatten.ops.reference import decode_attention_reference


@dataclass(frozen=True)
class Tree:
    """Segments as `(rows, length)`, root first; `masks` names a kind of mask for each, or one for all."""

    segments: tuple[tuple[int, int], ...]
    batch: int = 4
    q_heads: int = 4
    kv_heads: int | tuple[int, ...] = 2
    q_len: int = 1
    head_dim: int = 32
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    masks: tuple[str, ...] | str = "none"
    scale: float | None = None

    def __str__(self) -> str:
        segments = ",".join(f"{rows}x{length}" for rows, length in self.segments)
        masks = self.masks if isinstance(self.masks, str) else ",".join(self.masks)
        heads = f"H{self.q_heads}x{self.kv_heads}"
        dims = f"D{self.head_dim}" + ("" if self.value_dim is None else f"x{self.value_dim}")
        return f"B{self.batch}-{segments}-{heads}-L{self.q_len}-{dims}-{str(self.dtype)[6:]}-{masks}"

    def inputs(self, device: str = "cpu") -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor | None]]:
        """Random query, keys, values and masks; what no sequence attends to at either end of a row is NaN."""
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        n = len(self.segments)
        kinds = (self.masks,) * n if isinstance(self.masks, str) else self.masks
        all_heads = (self.kv_heads,) * n if isinstance(self.kv_heads, int) else self.kv_heads
        query = randn(self.batch, self.q_heads, self.q_len, self.head_dim)
        keys, values, masks = [], [], []
        for (rows, length), heads, kind in zip(self.segments, all_heads, kinds, strict=True):
            key, value = (randn(rows, heads, length, d) for d in (self.head_dim, self.value_dim or self.head_dim))
            mask = self.mask(kind, rows, length, generator)
            if mask is not None:
                valid = mask if mask.dtype == torch.bool else mask != NEG_INF
                valid = valid.expand(max(rows, mask.shape[0]), -1, -1, -1).flatten(1, 2).any(dim=1)
                valid = valid.unflatten(0, (rows, -1)).any(dim=1)
                unread = ~((valid.cumsum(1) > 0) & (valid.flip(1).cumsum(1).flip(1) > 0))[:, None, :, None]
                key, value = (x.masked_fill(unread, float("nan")) for x in (key, value))
            keys.append(key.to(device))
            values.append(value.to(device))
            masks.append(None if mask is None else mask.to(device))
        return query.to(device), keys, values, masks

    def mask(self, kind: str, rows: int, length: int, generator: torch.Generator) -> Tensor | None:
        places = torch.arange(length)
        match kind:
            case "none":
                return None
            case "rows":  # left padding of each row, the same for all sequences that share it
                return (places >= torch.arange(rows)[:, None])[:, None, None]
            case "sequences":  # a length for each sequence; the first has nothing at all
                return (places < torch.arange(self.batch)[:, None])[:, None, None]
            case "equal":  # one for each sequence, but the same for all that share a row
                padding = torch.arange(rows).repeat_interleave(self.batch // rows)
                return (places >= padding[:, None])[:, None, None]
            case "causal":  # a static suffix: each query sees one key more
                return (places <= length - self.q_len - 2 + torch.arange(self.q_len)[:, None])[None, None]
            case "one":  # stride 0 over the sequences
                return (places < length - 1).expand(self.batch, 1, 1, length)
            case "holes":
                return torch.rand(self.batch, self.q_heads, self.q_len, length, generator=generator) > 0.6
            case "additive":
                noise = torch.randn(self.batch, self.q_heads, 1, length, generator=generator)
                return torch.where(noise > -1, noise, NEG_INF)
            case "nothing":
                return torch.zeros(1, 1, 1, length, dtype=torch.bool)
            case _:
                raise ValueError(kind)


def whole(query: Tensor, keys: list, values: list, masks: list, scale: float | None = None) -> dict:
    """The same question with a copy of everything for each sequence: inputs of decode attention."""
    batch, q_heads, q_len, _ = query.shape
    parts: dict[str, list[Tensor]] = {"key": [], "value": [], "attn_mask": []}
    for key, value, mask in zip(keys, values, masks, strict=True):
        for name, x in (("key", key), ("value", value)):
            x = x.repeat_interleave(batch // x.shape[0], dim=0)
            parts[name].append(x.repeat_interleave(q_heads // x.shape[1], dim=1))
        bias = torch.zeros((1, 1, 1, 1), device=query.device)
        if mask is not None:
            bias = torch.where(mask, 0.0, NEG_INF) if mask.dtype == torch.bool else mask
            if bias.shape[0] not in (1, batch):
                bias = bias.repeat_interleave(batch // bias.shape[0], dim=0)
        parts["attn_mask"].append(bias.expand(batch, q_heads, q_len, key.shape[2]))
    together = {name: torch.cat(x, dim=3 if name == "attn_mask" else 2) for name, x in parts.items()}
    return {"query": query, **together, "scale": scale}


SHAPES = [
    Tree(((1, 33), (4, 5))),
    Tree(((4, 7),)),
    Tree(((1, 9),)),
    Tree(((1, 33), (2, 17), (4, 5)), q_len=3),
    Tree(((1, 5), (3, 4), (6, 3), (12, 2), (12, 1)), batch=12),
    Tree(((2, 31), (1, 8), (4, 5))),  # a KV need not be a tree
    Tree(((1, 0), (4, 5))),
    Tree(((1, 9), (4, 0))),
    Tree(((1, 0), (4, 0))),
    Tree(((1, 300), (5, 2)), batch=5, q_heads=5, kv_heads=5, head_dim=80),
    Tree(((1, 65), (3, 2)), batch=3, q_heads=71, kv_heads=1, head_dim=64),
    Tree(((1, 65), (2, 2)), batch=2, q_heads=8, kv_heads=(2, 4)),
    Tree(((1, 65), (2, 9)), batch=2, q_len=16, value_dim=16),
    Tree(((1, 40), (2, 9)), batch=2, value_dim=64, head_dim=16),
    Tree(((1, 9001), (2, 3)), batch=2, q_heads=3, kv_heads=1, head_dim=64),
    Tree(((1, 130), (16, 20)), batch=16, q_heads=12, kv_heads=3, head_dim=64, q_len=2, scale=0.3),
]
KINDS = ["rows", "sequences", "equal", "causal", "one", "holes", "additive", "nothing"]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "tree",
    [
        *SHAPES,
        *(Tree(((1, 23), (2, 11), (4, 7)), masks=kind, q_len=n) for kind in KINDS for n in (1, 3)),
        *(Tree(((2, 23), (4, 7)), masks=masks) for masks in (("rows", "causal"), ("none", "holes"), ("one", "none"))),
        *(
            Tree(((1, 150), (8, 9)), batch=8, q_heads=24, kv_heads=3, head_dim=64, dtype=dtype, masks=masks)
            for dtype in (torch.bfloat16, torch.float16)
            for masks in (("none", "causal"), "holes", "rows", "additive", "none")
        ),
        *(Tree(((1, 23), (4, 7)), dtype=torch.float64, masks=masks) for masks in ("none", "holes", "additive")),
    ],
    ids=str,
)
def test_equals_float64(tree: Tree, device: str) -> None:
    query, keys, values, masks = tree.inputs(device)
    out, lse = tatten.bifurcated_attention(query, keys, values, attn_masks=masks, scale=tree.scale, return_lse=True)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert_state(out, lse, whole(query, keys, values, masks, tree.scale))


VARIANTS = [
    (Tree(((1, 33), (4, 5))), {"softcap": 2.0}),
    (Tree(((1, 33), (2, 17), (4, 5)), q_len=4, q_heads=6), {"sinks": 1.0, "softcap": 1.5}),
    (Tree(((1, 0), (4, 5))), {"sinks": 1.0}),
    (Tree(((1, 9), (4, 0))), {"sinks": 1.0, "window": 4}),
    (Tree(((1, 0), (4, 0))), {"sinks": 1.0, "softcap": 2.0, "window": 3}),
    (Tree(((1, 9),)), {"sinks": -2.0, "window": 5}),
    (Tree(((1, 300), (16, 20)), batch=16, q_heads=12, kv_heads=3, head_dim=64), {"sinks": 3.0}),
    (Tree(((4, 7), (1, 40))), {"sinks": 3.0, "window": 30}),
    *((Tree(((1, 23), (2, 11), (4, 7)), q_len=4), {"window": n}) for n in (1, 3, 4, 6, 7, 8, 15, 20, 41, 1000)),
    *((Tree(((1, 23), (2, 11), (4, 7))), {"window": n}) for n in (1, 7, 8, 18, 19, 41)),
    (Tree(((1, 23), (4, 2)), q_len=4), {"window": 3}),  # the first queries are at places of the prefix
    (Tree(((1, 1), (4, 2)), q_len=4), {"window": 3, "sinks": 1.0}),  # the first query is before all keys
    *(
        (Tree(((1, 23), (2, 11), (4, 7)), masks=kind, q_len=n), {"window": 12, "softcap": 1.5, "sinks": 1.0})
        for kind in KINDS
        for n in (1, 4)
    ),
    *(
        (Tree(((1, 150), (8, 9)), batch=8, q_heads=24, kv_heads=3, head_dim=64, dtype=dtype), variant)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for variant in ({"sinks": 2.0}, {"softcap": 3.0}, {"window": 40})
    ),
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tree", "variant"), VARIANTS, ids=str)
def test_variants_equal_float64(tree: Tree, variant: dict, device: str) -> None:
    """A sink counts once, whatever the number of segments; keys in no query's window may be NaN."""
    query, keys, values, masks = tree.inputs(device)
    window, total = variant.get("window"), sum(length for _, length in tree.segments)
    if "sinks" in variant:
        sinks = variant["sinks"] + torch.arange(tree.q_heads, device=device) / 4
        variant = variant | {"sinks": sinks.masked_fill(sinks == sinks[1], NEG_INF).to(tree.dtype)}
    begin = 0
    for i, (_, length) in enumerate(tree.segments):
        behind = total - tree.q_len - begin - torch.arange(length, device=device)
        unread = behind >= (total if window is None else window)
        keys[i], values[i] = (x.masked_fill(unread[:, None], float("nan")) for x in (keys[i], values[i]))
        begin += length
    out, lse = tatten.bifurcated_attention(query, keys, values, attn_masks=masks, **variant, return_lse=True)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert_state(out, lse, whole(query, keys, values, masks) | variant)


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_mask_counts_only_where_the_window_cuts_nothing(device: str) -> None:
    query, keys, values, masks = Tree(((1, 230), (4, 70)), masks="equal").inputs(device)
    found = [tatten.block_mask(mask, kv_batch=len(key)) for mask, key in zip(masks, keys, strict=True)]
    out, lse = tatten.bifurcated_attention(
        query, keys, values, attn_masks=masks, block_masks=found, window=100, return_lse=True
    )
    assert_state(out, lse, whole(query, keys, values, masks) | {"window": 100})


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device: str) -> None:
    """Caches that are transposed, narrowed out of a longer one, or expanded by the user."""
    query, keys, values, masks = Tree(((1, 23), (4, 7)), masks="causal").inputs(device)
    query, keys[1], values[1] = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, keys[1], values[1]))
    longer = torch.full((1, 2, 40, 32), float("nan"), device=device)
    longer[:, :, 8:31] = keys[0]
    keys[0] = longer[:, :, 8:31]
    values[0] = values[0].transpose(2, 3).contiguous().transpose(2, 3)
    inputs = whole(query, keys, values, masks)
    assert_state(*tatten.bifurcated_attention(query, keys, values, attn_masks=masks, return_lse=True), inputs)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masks", ["none", "rows", "sequences"])
@pytest.mark.parametrize("variant", [{}, {"window": 7, "softcap": 2.0, "sinks": torch.randn(4)}], ids=["plain", "all"])
def test_opcheck(masks: str, variant: dict, device: str) -> None:
    query, keys, values, masks = Tree(((2, 9), (4, 5)), masks=masks).inputs(device)
    keys, values = ([x.nan_to_num() for x in tensors] for tensors in (keys, values))
    variant = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in variant.items()}
    opcheck(torch.ops.tatten.bifurcated_attention.default, (query, keys, values, masks, [None, None], None), variant)


def test_a_block_mask_found_before_are_used() -> None:
    """The graph finds the spans of a mask once for all layers, in rows of the segment."""
    query, keys, values, masks = Tree(((2, 23), (4, 7)), masks="sequences").inputs()
    found = [torch.ops.tatten.block_mask(mask, key.shape[0]) for mask, key in zip(masks, keys, strict=True)]
    assert found[0].tolist() == [[0, 1, 0], [0, 3, 0]]
    assert found[1].tolist() == [[0, 0, 1], [0, 1, 1], [0, 2, 1], [0, 3, 1]]
    state = torch.ops.tatten.bifurcated_attention(query, keys, values, masks, found)
    assert_state(*state, whole(query, keys, values, masks))


def test_a_padded_prompt_is_not_masked_again() -> None:
    """Where all sequences of a row leave out the same padding, the kernel gets a shorter KV and no mask."""
    query, keys, values, masks = Tree(((2, 23), (4, 7)), masks=("equal", "none")).inputs()
    given = []
    kernel = flash._flash
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "_flash", lambda *args: given.append(args[3]) or kernel(*args))
        patch.setattr(thresholds.CPU, "run_bytes", 0)  # or the two rows would be one call, with a mask
        tatten.bifurcated_attention(query, keys, values, attn_masks=masks)
    assert given == [None, None, None]


@pytest.mark.parametrize("device", DEVICES)
def test_nan_in_keys_that_count_comes_out(device: str) -> None:
    query, keys, values, _ = Tree(((1, 23), (4, 7))).inputs(device)
    keys[1][2, 0, 3] = float("nan")
    out, lse = tatten.bifurcated_attention(query, keys, values, return_lse=True)
    assert out[2, :2].isnan().all()
    assert lse[2, :2].isnan().all()
    assert not out[:2].isnan().any()
    assert not out[2, 2:].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_infinite_values_stay(device: str) -> None:
    query, keys, values, masks = Tree(((1, 5), (2, 3)), batch=2).inputs(device)
    values[0][0, 0, 1, 2] = float("inf")
    inputs = whole(query, keys, values, masks)
    want = decode_attention_reference(**inputs)[0]
    got = tatten.bifurcated_attention(query, keys, values).double()
    assert torch.equal(got.isinf(), want.isinf())
    assert want.isinf().any()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_is_reproducible() -> None:
    query, keys, values, masks = Tree(((1, 4001), (8, 33)), batch=8, q_heads=3, kv_heads=1, masks="holes").inputs()
    first, second = (tatten.bifurcated_attention(query, keys, values, attn_masks=masks) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_lens", [(9000, 40), (700, 3000)])
def test_wide_prefixes_run_beside_suffixes(kv_lens: tuple[int, int], dtype: torch.dtype) -> None:
    """Many queries on one long KV go to the prefix kernel, and the suffix gets SMs of its own where it has work."""
    prefix, suffix = kv_lens
    tree = Tree(((1, prefix), (32, suffix)), batch=32, q_heads=8, kv_heads=2, head_dim=64, dtype=dtype, q_len=2)
    query, keys, values, masks = tree.inputs("cuda")
    out, lse = tatten.bifurcated_attention(query, keys, values, return_lse=True)
    assert_state(out, lse, whole(query, keys, values, masks))


@pytest.mark.gpu
def test_replays_as_a_cuda_graph() -> None:
    query, keys, values, masks = Tree(((1, 300), (4, 20)), dtype=torch.bfloat16, masks=("none", "causal")).inputs(
        "cuda"
    )
    values = [x.nan_to_num() for x in values]
    keys = [x.nan_to_num() for x in keys]
    tatten.bifurcated_attention(query, keys, values, attn_masks=masks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tatten.bifurcated_attention(query, keys, values, attn_masks=masks, return_lse=True)
    for length in (20, 3, 0):
        masks[1].copy_(torch.arange(20, device="cuda") < length)
        query.normal_()
        graph.replay()
        assert_state(out, lse, whole(query, keys, values, masks))
