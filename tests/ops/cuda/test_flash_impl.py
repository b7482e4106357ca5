"""torch.nn.attention can put another kernel in the place of PyTorch's flash attention, in the whole process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import attention

from tatten.ops.cuda import decode, dispatch, providers
from tatten.ops.cuda.launcher import by_layout
from tatten.ops.cuda.providers import choose_provider, replaced_flash, unsupported_reason
from tatten.ops.cuda.tuning import Tuning
from tatten.ops.cuda.workload import Workload
from tatten.ops.kernel_signatures import bifurcated_kernel, decode_kernel


class Handle:
    def remove(self) -> None:
        pass


@pytest.fixture
def _replaced() -> Iterator[None]:
    attention.register_flash_attention_impl("TATTEN_TEST", register_fn=Handle)
    attention.activate_flash_attention_impl("TATTEN_TEST")
    yield
    attention.restore_flash_attention_impl(_raise_warn=False)


def use_table(monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
    monkeypatch.setattr(providers, "tuning_of", lambda *_: Tuning("a GPU", (9, 0), {1: {256: provider}}))


def tensors() -> tuple[Tensor, ...]:
    shapes = (1, 8, 1, 64), (1, 2, 512, 64), (1, 2, 512, 64)
    return tuple(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)


@pytest.mark.usefixtures("_replaced")
def test_auto_does_not_take_another_kernel_for_the_one_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workload.of(*tensors())
    use_table(monkeypatch, "flash")
    assert choose_provider(work) == "triton"
    assert replaced_flash(work) == "not flash: torch.nn.attention has TATTEN_TEST in its place"
    for other in ("cudnn", "triton"):
        use_table(monkeypatch, other)
        assert choose_provider(work) == other
        assert replaced_flash(work) == ""


@pytest.mark.usefixtures("_replaced")
def test_flash_by_name_is_an_error_that_says_who_is_there_and_the_way_back() -> None:
    says = r"'flash' can't compute this: .*activate_flash_attention_impl\('TATTEN_TEST'\).*restore_flash_attention_impl"
    with pytest.raises(NotImplementedError, match=says):
        decode_kernel(dispatch.attention)(*tensors(), provider="flash")
    assert unsupported_reason("cudnn", Workload.of(*tensors())) is None


def test_without_a_replacement_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch, "flash")
    work = Workload.of(*tensors())
    assert work.flash_impl is None
    assert choose_provider(work) == "flash"
    assert replaced_flash(work) == ""


def test_a_plan_is_for_the_kernel_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are remembered by layout: one that was made before the replacement must not serve after it."""
    use_table(monkeypatch, "flash")
    monkeypatch.setattr(dispatch, "_plan", by_layout(dispatch._plan.__wrapped__))
    monkeypatch.setattr(dispatch, "on_device_of", lambda x, run, *args: run(*args))
    monkeypatch.setattr(dispatch, "flash_attention", lambda *args: "flash")
    monkeypatch.setattr(decode, "plan_attention", lambda *args, **options: lambda *args: "triton")
    attention.register_flash_attention_impl("TATTEN_TEST", register_fn=Handle)
    query, key, value = tensors()

    def chosen() -> list[str]:
        plain = decode_kernel(dispatch.attention)(query, key, value)
        return [plain, bifurcated_kernel(dispatch.attention)(query, [key], [value], [None], [None])]

    assert chosen() == ["flash", "flash"]
    attention.activate_flash_attention_impl("TATTEN_TEST")
    try:
        assert chosen() == ["triton", "triton"]
    finally:
        attention.restore_flash_attention_impl()
    assert chosen() == ["flash", "flash"]
