"""Who computes plain decode attention on CUDA: the table, what each can do, and that what is named never falls back."""

from __future__ import annotations

import importlib.util
import sys
import types
from math import log2

import pytest
import torch
from torch import Tensor

from tatten.ops.cuda import dispatch as cuda
from tatten.ops.cuda import providers
from tatten.ops.cuda.providers import fastest, nearest_regime, round_log2, unsupported_reason
from tatten.ops.cuda.tuning.regimes import REGIMES
from tatten.ops.library import decode_kernel
from tatten.ops.reference import decode_attention_reference

TABLE = ("TCF", "CCT", "FFF")  # 1, 2 and 4 pairs; 256, 512 and 1024 keys
LETTERS = {"T": "triton", "C": "cudnn", "F": "flash", "A": "fa3"}
decode_on_cuda = decode_kernel(cuda.decode_attention)


def tensors(
    batch: int = 2,
    q_heads: int = 8,
    kv_heads: int = 2,
    q_len: int = 1,
    kv_len: int = 1024,
    dim: int = 128,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value without data: the choice needs none."""
    shapes = (q_heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, value_dim or dim)
    query, key, value = (torch.empty(batch, *shape, dtype=dtype, device="meta") for shape in shapes)
    return query, key, value


def test_the_table_is_a_table() -> None:
    assert len({len(row) for row in REGIMES}) == 1
    assert REGIMES[0]
    assert set("".join(REGIMES)) <= set(LETTERS)


def test_every_shape_has_a_regime() -> None:
    for pairs in (0, 1, 3, 100, 10**6):
        for kv_len in (0, 1, 256, 5000, 10**8):
            assert nearest_regime(pairs, kv_len) in LETTERS.values()


def test_the_nearest_power_of_two() -> None:
    assert round_log2(0) == 0
    for n in [*range(1, 3000), 2**31 - 1, 2**40 + 1]:
        assert abs(log2(n) - round_log2(n)) <= 0.5 + 1e-9, n


@pytest.mark.parametrize(
    "pairs, kv_len, letter",
    [
        *((2**row, 256 << column, TABLE[row][column]) for row in range(3) for column in range(3)),
        (1, 0, "T"),
        (1, 362, "T"),
        (1, 363, "C"),  # 256 * sqrt(2) is 362.04
        (3, 1, "F"),
        (10**6, 10**9, "F"),
        (2, 10**9, "T"),
    ],
)
def test_the_nearest_regime(pairs: int, kv_len: int, letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "REGIMES", TABLE)
    assert nearest_regime(pairs, kv_len) == LETTERS[letter]


@pytest.mark.parametrize(
    "provider, shape, says",
    [
        ("cudnn", {}, None),
        ("flash", {}, None),
        ("flash", {"dim": 256}, None),
        ("cudnn", {"dtype": torch.float16, "dim": 72, "q_len": 5}, None),
        ("cudnn", {"dim": 256}, "up to 128 in eights, not 256 and 256"),
        ("flash", {"dim": 264}, "up to 256"),
        ("flash", {"dim": 100}, "in eights"),
        ("flash", {"dim": 64, "value_dim": 128}, "not 64 and 128"),
        ("flash", {"dtype": torch.float32}, "not torch.float32"),
        ("cudnn", {"dtype": torch.float64}, "not torch.float64"),
        ("cudnn", {"kv_len": 0}, "at least one"),
    ],
)
def test_what_a_provider_cannot_compute(provider: str, shape: dict, says: str | None) -> None:
    reason = unsupported_reason(provider, *tensors(**shape), plain=True)
    assert reason is None if says is None else says in reason
    assert "no mask" in unsupported_reason(provider, *tensors(**shape), plain=False)


def test_float8_needs_a_gpu_that_converts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    query, *kv = tensors()
    kv = [x.to(torch.float8_e4m3fn) for x in kv]
    assert unsupported_reason("triton", query, *kv, plain=False) is None
    monkeypatch.setattr(providers, "capability", lambda device: (8, 6))
    assert "from compute capability 8.9 on" in unsupported_reason("triton", query, *kv, plain=False)
    assert unsupported_reason("triton", *tensors(), plain=False) is None


def test_fa3_is_asked_for_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "flash_attn_interface, is not installed" in unsupported_reason("fa3", *tensors(), plain=True)
    monkeypatch.setattr(providers, "REGIMES", ("A",))
    assert fastest(*tensors()) == "triton"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert fastest(*tensors()) == "fa3"
    assert fastest(*tensors(dim=100)) == "triton"
    assert "up to 256" in unsupported_reason("fa3", *tensors(dim=264), plain=True)


@pytest.mark.parametrize("q_len", [1, 3])
def test_what_fa3_is_given_and_gives(q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the arguments and layouts of flash_attn_interface: length before heads, the lse behind them."""

    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, softmax_scale: float, return_softmax_lse: bool
    ) -> tuple[Tensor, Tensor]:
        assert return_softmax_lse
        out, lse = decode_attention_reference(*(x.transpose(1, 2) for x in (q, k_cache, v_cache)), scale=softmax_scale)
        return out.transpose(1, 2).contiguous(), lse

    module = types.SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    shapes = (2, 8, q_len, 16), (2, 2, 9, 16), (2, 2, 9, 16)
    query, key, value = (torch.randn(x, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(shapes))
    got = providers.fa3_attention(query, key, value, 0.3)
    want = decode_attention_reference(query, key, value, scale=0.3)
    assert got[0].is_contiguous()
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("provider", ["cudnn", "flash"])
def test_strided_head_dims_are_declined(provider: str, which: int) -> None:
    given = list(tensors(dim=64, kv_len=64, q_len=64))
    given[which] = given[which].mT
    assert "dense" in unsupported_reason(provider, *given, plain=True)


@pytest.mark.parametrize("letter", "TCF")
def test_the_fastest_is_one_that_can(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "REGIMES", (letter,))
    assert fastest(*tensors()) == LETTERS[letter]
    assert fastest(*tensors(dim=256)) == {"F": "flash"}.get(letter, "triton")
    for shape in ({"dtype": torch.float32}, {"kv_len": 0}, {"dim": 100}, {"q_len": 5}, {"q_heads": 64}):
        assert fastest(*tensors(**shape)) == "triton"


@pytest.mark.parametrize("provider", ["cudnn", "flash"])
@pytest.mark.parametrize(
    "name, given",
    [
        ("mask", {"attn_mask": torch.empty(2, 1, 1, 1024, dtype=torch.bool, device="meta")}),
        ("lengths", {"kv_lens": torch.empty(2, dtype=torch.int64, device="meta")}),
        ("window", {"window": 5}),
        ("soft cap", {"softcap": 1.0}),
        ("sinks", {"sinks": torch.empty(8, device="meta")}),
    ],
)
def test_what_is_named_and_cannot_is_an_error(provider: str, name: str, given: dict) -> None:
    with pytest.raises(NotImplementedError, match=f"`provider` '{provider}' can't compute this: .*{name}"):
        decode_on_cuda(*tensors(), **given, provider=provider)


@pytest.mark.parametrize("provider", ["cudnn", "flash"])
def test_what_is_named_does_not_fall_back_for_a_shape(provider: str) -> None:
    for shape in ({"dim": 100}, {"dtype": torch.float32}, {"dtype": torch.float64}, {"kv_len": 0}):
        with pytest.raises(NotImplementedError, match=provider):
            decode_on_cuda(*tensors(**shape), provider=provider)


@pytest.mark.parametrize("letter", "CF")
def test_auto_asks_the_table_and_a_name_does_not(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "REGIMES", (letter,))
    monkeypatch.setattr(cuda, "_plan_decode", cuda._plan_decode.__wrapped__)
    monkeypatch.setattr(cuda, "on_device_of", lambda x, run, *args: run(*args))
    for name in ("cudnn", "flash"):
        monkeypatch.setattr(cuda, f"{name}_attention", lambda *args, name=name: name)
    assert decode_on_cuda(*tensors()) == LETTERS[letter]
    for name in ("cudnn", "flash"):
        assert decode_on_cuda(*tensors(), provider=name) == name
