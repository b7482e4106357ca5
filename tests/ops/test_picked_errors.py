"""Bad `indices`, and arguments that have no meaning beside them: the error names the argument and both values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tatten

B, HQ, HKV, S, D = 2, 4, 2, 9, 8
MIN = torch.finfo(torch.float32).min
PICKS = torch.tensor([0, 3, 5], dtype=torch.int32).expand(B, 1, 1, 3)

BAD: list[tuple[str, dict[str, Any], type[Exception], list[str]]] = [
    ("dtype", {"indices": PICKS.float()}, TypeError, ["int32 or int64", "torch.float32"]),
    ("bool", {"indices": PICKS.bool()}, TypeError, ["int32 or int64", "torch.bool"]),
    ("rank", {"indices": PICKS[0]}, ValueError, ["[2, 1", "1, picks]", "(1, 1, 3)"]),
    ("batch", {"indices": PICKS[:1]}, ValueError, ["[2, 1", "1, picks]", "(1, 1, 1, 3)"]),
    ("query heads", {"indices": PICKS.expand(B, HQ, 1, 3)}, ValueError, ["[2, 1", "1, picks]", "(2, 4, 1, 3)"]),
    ("queries", {"indices": PICKS.expand(B, 1, 2, 3)}, ValueError, ["[2, 1", "1, picks]", "(2, 1, 2, 3)"]),
    ("block of 0", {"index_block": 0}, ValueError, ["`index_block`", "at least 1", "got 0"]),
    ("negative block", {"index_block": -4}, ValueError, ["`index_block`", "at least 1", "got -4"]),
    ("window", {"window": 4}, ValueError, ["`window`", "None with `indices`", "got 4"]),
]
OF_REST: list[tuple[str, dict[str, Any], type[Exception], list[str]]] = [
    ("high rest", {"rest_bias": -1e9}, ValueError, ["`rest_bias`", str(MIN), str(MIN / 2), "got -1000000000.0"]),
    ("infinite rest", {"rest_bias": -torch.inf}, ValueError, ["`rest_bias`", str(MIN), "got -inf"]),
    ("rest is NaN", {"rest_bias": torch.nan}, ValueError, ["`rest_bias`", "got nan"]),
    (
        "rest of a bool mask",
        {"rest_bias": MIN, "attn_mask": torch.ones(S, dtype=torch.bool)},
        TypeError,
        ["`rest_bias`", "additive", "torch.bool"],
    ),
]
TWICE = torch.tensor([1, -1, 4, -1, 4], dtype=torch.int32).expand(B, 1, 1, 5)
LONE = ("index_block", 2), ("distinct_indices", True), ("rest_bias", MIN)


def decode(op: bool, **options: Any) -> Any:
    function = torch.ops.tatten.decode_attention if op else tatten.decode_attention
    return function(torch.randn(B, HQ, 1, D), torch.randn(B, HKV, S, D), torch.randn(B, HKV, S, D), **options)


def latents(op: bool, **options: Any) -> Any:
    function = torch.ops.tatten.latent_attention if op else tatten.latent_attention
    return function(torch.randn(B, HQ, 1, D), None, torch.randn(B, 1, S, D), None, scale=0.3, **options)


def bifurcated(op: bool, **options: Any) -> Any:
    function = torch.ops.tatten.bifurcated_attention if op else tatten.bifurcated_attention
    lists = [torch.randn(1, HKV, 5, D), torch.randn(B, HKV, S, D)]
    options["indices"] = [None, options["indices"]]
    masks = ([None] * 2,) * 2 if op else ()
    return function(torch.randn(B, HQ, 1, D), lists, lists, *masks, **options)


CALLS = decode, latents, bifurcated


def assert_raises(run: Callable[[], Any], error: type[Exception], says: list[str]) -> None:
    with pytest.raises(error) as raised:
        run()
    missing = [text for text in says if text not in str(raised.value)]
    assert not missing, f"{raised.value} lacks {missing}"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("change", "error", "says"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_bad_picks(call: Callable[..., Any], change: dict, error: type[Exception], says: list[str]) -> None:
    name = "`indices[1]`" if call is bifurcated else "`indices`"
    for op in (False, True):
        assert_raises(
            lambda op=op: call(op, **{"indices": PICKS} | change), error, [*says, name] if "indices" in change else says
        )


@pytest.mark.parametrize("call", [decode, latents])
@pytest.mark.parametrize(("change", "error", "says"), [bad[1:] for bad in OF_REST], ids=[bad[0] for bad in OF_REST])
def test_bad_rest(call: Callable[..., Any], change: dict, error: type[Exception], says: list[str]) -> None:
    for op in (False, True):
        assert_raises(lambda op=op: call(op, indices=PICKS, **change), error, says)


@pytest.mark.parametrize("call", CALLS)
def test_a_broken_promise(call: Callable[..., Any]) -> None:
    says = ["once in a row", "got 4 at (0, 0, 0, 2) and again", "`distinct_indices`"]
    assert_raises(lambda: call(False, indices=TWICE, distinct_indices=True), ValueError, says)
    assert_raises(lambda: call(True, indices=TWICE), ValueError, says)
    call(False, indices=TWICE)


@pytest.mark.parametrize("function", ["decode", "latent", "bifurcated"])
@pytest.mark.parametrize(("name", "x"), LONE)
def test_arguments_that_need_picks(function: str, name: str, x: Any) -> None:
    query, key = torch.randn(B, HQ, 1, D), torch.randn(B, 1, S, D)
    if function == "bifurcated" and name == "rest_bias":
        return
    calls = {
        "decode": lambda: tatten.decode_attention(query, key, key, **{name: x}),
        "latent": lambda: tatten.latent_attention(query, None, key, None, scale=1.0, **{name: x}),
        "bifurcated": lambda: tatten.bifurcated_attention(query, [key], [key], **{name: x}),
    }
    assert_raises(calls[function], ValueError, [f"`{name}`", "`indices`", "None"])


def test_segments_need_a_list_of_picks() -> None:
    query, key = torch.randn(B, HQ, 1, D), torch.randn(B, 1, S, D)

    def attend(indices: Any) -> Tensor:
        return tatten.bifurcated_attention(query, [key, key], [key, key], indices=indices)

    assert_raises(lambda: attend(PICKS), TypeError, ["`indices`", "sequence of Tensors", "Tensor"])
    assert_raises(lambda: attend([PICKS]), ValueError, ["`indices`", "each of the 2 `keys`", "got 1"])
    assert_raises(lambda: attend([None, 3]), TypeError, ["`indices[1]`", "Tensor", "int"])
    assert_raises(lambda: tatten.decode_attention(query, key, key, indices=[1]), TypeError, ["`indices`", "list"])


def test_batch_invariant_takes_no_softcap() -> None:
    for call in CALLS:
        run = lambda call=call: call(False, indices=PICKS, softcap=2.0, batch_invariant=True)
        assert_raises(run, NotImplementedError, ["`softcap`", "batch_invariant", "2.0"])


def test_a_block_of_a_size_that_is_no_int() -> None:
    """The function says so; PyTorch's dispatcher has an error of its own for the op."""
    query, key = torch.randn(B, HQ, 1, D), torch.randn(B, 1, S, D)
    run = functools.partial(tatten.decode_attention, query, key, key, indices=PICKS, index_block=2.0)
    assert_raises(run, TypeError, ["`index_block`", "an int", "got float"])
