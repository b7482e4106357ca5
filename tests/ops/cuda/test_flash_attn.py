"""FlashAttention's packages as providers: what they are given, what comes back, and why one can't compute a call."""

from __future__ import annotations

import re
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from flash_attn_packages import MODULES, PACKAGES, install, uninstall
from packaging.requirements import Requirement
from provider_calls import provider_of_op
from torch import Tensor

from tatten.ops.cuda import dispatch as cuda
from tatten.ops.cuda import flash_attn, providers
from tatten.ops.cuda.flash_attn import package_attention
from tatten.ops.cuda.providers import choose_provider, unsupported_reason
from tatten.ops.cuda.recording import NotRecordableError, record
from tatten.ops.cuda.tuning import Tuning
from tatten.ops.cuda.workload import Workload, needs_of
from tatten.ops.kernel_signatures import decode_call, decode_kernel
from tatten.ops.reference import attention_reference

decode_on_cuda = decode_kernel(cuda.attention)
LENGTHS = (0, 1, 2, 9, 40)  # of 40 keys: none, fewer than there are queries, some, all


def tensors(q_len: int = 1, dtype: torch.dtype = torch.float32, kv_len: int = 40, dim: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(q_len)
    shapes = (5, 8, q_len, dim), (5, 2, kv_len, dim), (5, 2, kv_len, dim)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def workload(needs: tuple[str, ...] = (), **sizes: Any) -> Workload:
    return Workload.of(*tensors(**{"dtype": torch.bfloat16, **sizes}), needs)


def on_capability(monkeypatch: pytest.MonkeyPatch, *version: int) -> None:
    monkeypatch.setattr(flash_attn, "capability", lambda device: version)


VARIANTS = [
    {"window": window, "softcap": softcap, "sinks": sinks}
    for window, softcap, sinks in product((None, 1, 4, 40, 1000), (None, 1.5), (None, torch.linspace(-2, 3, 8)))
]


@pytest.mark.parametrize("with_lens", [False, True])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("provider", PACKAGES)
def test_equals_decode_attention(provider: str, q_len: int, with_lens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, provider)
    query, key, value = tensors(q_len)
    kv_lens = torch.tensor(LENGTHS) if with_lens else None
    for variant in VARIANTS:
        if variant["sinks"] is not None and provider != "fa4":
            continue
        call = decode_call(query, key, value, None, kv_lens, 0.3, **variant)
        out, lse = package_attention(provider, call)
        want = attention_reference(call)
        assert out.is_contiguous()
        assert lse.is_contiguous()
        assert lse.dtype == torch.float32
        want = want[0].float(), want[1].float()
        torch.testing.assert_close((out, lse), want, msg=lambda m, v=variant: f"{v}: {m}")


@pytest.mark.parametrize("provider", PACKAGES)
def test_more_queries_than_keys(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lengths, too, the first queries stand before the first key of a window."""
    install(monkeypatch, provider)
    query, key, value = tensors(q_len=5, kv_len=3)
    call = decode_call(query, key, value, scale=0.3, window=2)
    got, want = package_attention(provider, call), attention_reference(call)
    assert (want[1] == -torch.inf).any()
    torch.testing.assert_close(got, (want[0].float(), want[1].float()))


def test_an_lse_that_is_infinite_for_another_reason_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores may overflow: fa2 gives +inf to them as to queries without keys, which only the lengths tell apart."""
    install(monkeypatch, "fa2")
    query, key, value = tensors()
    key[4, 0, 7] = query[4, 0, 0] * torch.inf
    _, lse = package_attention("fa2", decode_call(query, key, value, None, torch.tensor(LENGTHS), 0.3))
    assert lse[4, 0, 0] == torch.inf
    assert (lse[0] == -torch.inf).all()


@pytest.mark.parametrize("provider", PACKAGES)
def test_what_is_not_asked_for_is_not_given(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = install(monkeypatch, provider)
    package_attention(provider, decode_call(*tensors(), scale=0.3))
    splits = {"num_splits"} if provider == "fa4" else set()
    lse = "return_lse" if provider == "fa4" else "return_softmax_lse"
    inputs = {"q", "k", "v"} if provider == "fa4" else {"q", "k_cache", "v_cache"}
    assert set(stand_in.given) - splits == {*inputs, "softmax_scale", lse}


@pytest.mark.parametrize("provider", PACKAGES)
def test_keys_and_values_are_not_copied(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = install(monkeypatch, provider)
    query, key, value = tensors()
    package_attention(provider, decode_call(query, key, value, scale=0.3))
    given = [x for name, x in stand_in.given.items() if name[0] in "qkv"]
    assert [x.data_ptr() for x in given] == [x.data_ptr() for x in (query, key, value)]
    assert [tuple(x.shape) for x in given] == [(5, 1, 8, 16), (5, 40, 2, 16), (5, 40, 2, 16)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("provider", PACKAGES)
def test_lengths_are_clamped_as_on_a_gpu(provider: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = install(monkeypatch, provider)
    kv_lens = torch.tensor([[-3, 7], [0, 7], [5, 7], [40, 7], [2**31 - 1, 7]], dtype=dtype)[:, 0]
    package_attention(provider, decode_call(*tensors(), None, kv_lens, 0.3))
    given = stand_in.given["seqused_k" if provider == "fa4" else "cache_seqlens"]
    assert given.dtype == torch.int32
    assert given.tolist() == [0, 0, 5, 40, 40]


@pytest.mark.parametrize("major, splits", [(9, 1), (10, 0), (11, 0)])
def test_fa4_splits_keys_on_blackwell_alone(major: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = install(monkeypatch, "fa4")
    on_capability(monkeypatch, major, 0)
    package_attention("fa4", decode_call(*tensors(), scale=0.3))
    assert stand_in.given.get("num_splits", 1) == splits


@pytest.mark.parametrize("module", MODULES["fa3"])
def test_both_modules_of_fa3(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = install(monkeypatch, "fa3", module)
    assert unsupported_reason("fa3", workload()) is None
    package_attention("fa3", decode_call(*tensors(), scale=0.3))
    assert stand_in.given["softmax_scale"] == 0.3


@pytest.mark.parametrize("provider", PACKAGES)
def test_a_missing_package_is_an_error_that_says_what_to_install(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninstall(monkeypatch)
    says = {
        "fa2": "pip install .*'flash-attn>=2.8'",
        "fa3": "build hopper/",
        "fa4": "pip install 'flash-attn-4>=4.0.0b36'",
    }
    with pytest.raises(NotImplementedError, match=f"`provider` '{provider}' can't .* imported .*{says[provider]}"):
        decode_on_cuda(*(x.to("meta") for x in tensors(dtype=torch.bfloat16)), provider=provider)
    for module in MODULES[provider]:
        assert module in unsupported_reason(provider, workload())


@pytest.mark.parametrize("provider", PACKAGES)
def test_a_package_without_the_function(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, provider)
    for module in MODULES[provider]:
        monkeypatch.setitem(sys.modules, module, ModuleType("another"))
    assert re.search(r"has no flash_attn_\w+\); to get it", unsupported_reason(provider, workload()))


def test_a_release_that_lacks_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 2.8 brings a flash_attn.cute of its own, which is older than flash-attn-4."""
    install(monkeypatch, "fa4")
    old = ModuleType("old")
    old.flash_attn_varlen_func = lambda q, k, v, softmax_scale, window_size, learnable_sink, softcap: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn.cute", old)
    reason = unsupported_reason("fa4", workload(("lengths", "sinks")))
    assert "takes no return_lse, seqused_k, num_splits; to get one that does: pip install" in reason


TAKEN = {
    "lengths": PACKAGES,
    "window": PACKAGES,
    "soft cap": PACKAGES,
    "sinks": ("fa4",),
    "mask": (),
    "float8 or int8": (),
    "scale that is 0 or less": (),
}


@pytest.mark.parametrize("need", TAKEN)
@pytest.mark.parametrize("provider", PACKAGES)
def test_the_needs_that_a_package_meets(provider: str, need: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, provider)
    reason = unsupported_reason(provider, workload((need,)))
    assert reason == (None if provider in TAKEN[need] else f"it takes no {need}")


def test_needs_have_the_names_of_the_arguments() -> None:
    x = torch.empty(1)
    assert needs_of(decode_call(x, x, x)) == needs_of(decode_call(x, x, x, scale=0.1)) == ()
    assert needs_of(decode_call(x, x, x, x, x, 0.1, window=3, softcap=2.0, sinks=x, key_scale=x)) == (
        *("mask", "lengths", "window", "soft cap", "sinks", "float8 or int8"),
    )
    for scale in (0.0, -1.0, float("nan")):
        assert needs_of(decode_call(x, x, x, scale=scale)) == ("scale that is 0 or less",)


@pytest.mark.parametrize(
    "provider, version, dims, says",
    [
        ("fa2", (8, 6), (256, 256), None),
        ("fa2", (12, 0), (8, 8), None),
        ("fa2", (7, 5), (64, 64), "compute capability 8, 9, 10, 12, not 7.5"),
        ("fa2", (9, 0), (264, 264), "up to 256"),
        ("fa2", (9, 0), (192, 128), "not 192 and 128"),
        ("fa2", (9, 0), (100, 100), "in eights, not 100"),
        ("fa3", (9, 0), (192, 128), None),
        ("fa3", (9, 0), (256, 256), None),
        ("fa3", (8, 0), (192, 128), "not 192 and 128"),
        ("fa3", (9, 0), (128, 64), "not 128 and 64"),
        ("fa3", (10, 0), (64, 64), "compute capability 8, 9, not 10.0"),
        ("fa4", (9, 0), (256, 64), None),
        ("fa4", (9, 0), (264, 64), "up to 256"),
        ("fa4", (10, 0), (192, 128), None),
        ("fa4", (10, 3), (256, 256), None),
        ("fa4", (11, 0), (64, 128), None),
        ("fa4", (10, 0), (192, 192), "not 192 and 192"),
        ("fa4", (8, 0), (64, 64), "compute capability 9, 10, 11, not 8.0"),
        ("fa4", (12, 0), (64, 64), "not 12.0"),
    ],
)
def test_gpus_and_head_dims(
    provider: str, version: tuple[int, int], dims: tuple[int, int], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, provider)
    on_capability(monkeypatch, *version)
    shapes = (2, 8, 1, dims[0]), (2, 2, 9, dims[0]), (2, 2, 9, dims[1])
    reason = unsupported_reason(provider, Workload.of(*(torch.empty(x, dtype=torch.bfloat16) for x in shapes)))
    assert reason is None if says is None else says in reason


@pytest.mark.parametrize("provider", PACKAGES)
def test_tensors_that_its_kernels_cannot_read(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, provider)
    assert "not torch.float32" in unsupported_reason(provider, workload(dtype=torch.float32))
    assert "at least one" in unsupported_reason(provider, workload(kv_len=0))
    query, key, value = tensors(dtype=torch.bfloat16)
    float8 = [x.to(torch.float8_e4m3fn) for x in (key, value)]
    assert "no float8" in unsupported_reason(provider, Workload.of(query, *float8))
    assert "dense in head_dim" in unsupported_reason(provider, Workload.of(query, key.mT.contiguous().mT, value))
    wider = torch.empty(5, 2, 40, 20, dtype=torch.bfloat16)[..., :16]  # rows are 40 bytes apart
    assert "multiples of 16 bytes" in unsupported_reason(provider, Workload.of(query, key, wider))
    flat = torch.empty(key.numel() + 4, dtype=torch.bfloat16)
    shifted = flat[4:].view_as(key)
    with pytest.raises(NotImplementedError, match=f"'{provider}' can't .* `value` begins 8 bytes behind one"):
        package_attention(provider, decode_call(query, key, shifted, scale=0.3))


@pytest.mark.parametrize("provider", PACKAGES)
def test_the_op_runs_what_is_named(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, provider)
    given = [x.to("meta") for x in tensors(dtype=torch.bfloat16)]
    kv_lens = torch.empty(5, dtype=torch.int64, device="meta")
    for extras in ({}, {"kv_lens": kv_lens}, {"window": 3, "softcap": 2.0}):
        assert provider_of_op(*given, **extras, provider=provider) == provider
    mask = torch.empty(5, 1, 1, 40, dtype=torch.bool, device="meta")
    with pytest.raises(NotImplementedError, match=f"'{provider}' can't compute this: it takes no mask$"):
        decode_on_cuda(*given, attn_mask=mask, window=3, provider=provider)


@pytest.mark.parametrize("provider", PACKAGES)
def test_auto_takes_one_where_a_table_names_it_and_it_is_installed(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "tuning_of", lambda *_: Tuning("a GPU", (9, 0), {1: {256: provider}}))
    uninstall(monkeypatch)
    assert choose_provider(workload()) == "triton"
    install(monkeypatch, provider)
    assert choose_provider(workload()) == provider
    assert choose_provider(workload(dim=100)) == "triton"
    assert choose_provider(workload(("lengths",))) == "triton"  # never measured


@pytest.mark.parametrize("provider", PACKAGES)
def test_inductor_cannot_launch_it(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in, given = install(monkeypatch, provider), tensors()
    with pytest.raises(NotRecordableError, match="is computed by FlashAttention-"):
        record(package_attention, provider, decode_call(*given, scale=0.3))
    assert not stand_in.given


@pytest.mark.parametrize("provider", ["fa2", "fa4"])
def test_the_extra_of_a_package_is_what_its_error_says(provider: str) -> None:
    (said,) = re.findall(r"'(.*)'", flash_attn.PACKAGES[provider].install)
    extra = Requirement(said).name
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    (declared,) = re.findall(rf'^{extra} = \["(.*?)"\]', pyproject, re.MULTILINE)
    assert Requirement(declared).name == extra
    assert Requirement(declared).specifier == Requirement(said).specifier
