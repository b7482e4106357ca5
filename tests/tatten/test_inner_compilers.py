"""The rewritten graph goes to any backend that Dynamo knows, with what torch.compile would hand it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends import registry
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.fx import GraphModule

import tatten  # noqa: F401

Calls = list[tuple[GraphModule, dict[str, Any]]]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True) * 2


def attend_to_cache(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k[:, :, :1] = q[:, :2]
    return attend(q, k, v, mask)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 2, 40, 16).unbind()
    return torch.randn(2, 4, 1, 16), k, v, (torch.arange(40) < 30)[None, None, None]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def register() -> Iterator[Callable[[str, Callable], None]]:
    """Registers backends that are gone after the test."""
    names = []

    def add(name: str, backend: Callable) -> None:
        registry.register_backend(backend, name=name)
        names.append(name)

    yield add
    for name in names:
        registry._BACKENDS.pop(name, None)
        registry._COMPILER_FNS.pop(name, None)


def recorder(calls: Calls) -> Callable:
    def backend(gm: GraphModule, example_inputs: list[Tensor], **kwargs: Any) -> Callable:
        calls.append((gm, kwargs))
        return gm.forward

    return backend


@torch.no_grad()
def check(fn: Callable, **kwargs: Any) -> None:
    """The compiled function gives what eager mode gives, and writes what it writes."""
    given, expected = inputs(), inputs()
    out = torch.compile(fn, backend="tatten", **kwargs)(*given)
    torch.testing.assert_close(out, fn(*expected))
    torch.testing.assert_close(given, expected)
    assert counters["tatten"]["rewritten"] == 1


@pytest.mark.drawn(2)
@pytest.mark.parametrize("fn", [attend, attend_to_cache])
@pytest.mark.parametrize(
    "inner",
    [
        "aot_eager",
        "aot_eager_decomp_partition",
        "aot_eager_default_partitioner",
        "cudagraphs",  # which skips graphs on a CPU
        "eager",
        "eager_debug",
        "eager_noexcept",
        "invoke_subgraph",
        "pre_dispatch_eager",
    ],
)
def test_backends_of_dynamo(inner: str, fn: Callable) -> None:
    check(fn, options={"inner": inner})


@pytest.mark.parametrize("options", [{}, {"precision": 3, "deep": {"a": 1}}], ids=str)
def test_options_are_those_of_torch_compile(options: dict, register: Callable[[str, Callable], None]) -> None:
    calls: Calls = []
    register("stand_in", recorder(calls))
    torch.compile(attend, backend="stand_in", options=options)(*inputs())
    check(attend, options={"inner": "stand_in", **options})
    (_, plain), (rewritten, given) = calls
    assert torch.ops.tatten.decode_attention.default in {node.target for node in rewritten.graph.nodes}
    assert given == plain


@pytest.mark.parametrize("mode", [None, "default", "max-autotune"])
def test_mode_is_that_of_torch_compile(mode: str | None, register: Callable[[str, Callable], None]) -> None:
    """torch.compile itself takes a mode or options, and not both: so tatten is called as a backend."""
    calls: Calls = []
    register("stand_in", recorder(calls))
    torch.compile(torch.neg, backend="stand_in", mode=mode)(torch.ones(1))
    gm, kwargs = calls.pop()
    registry.lookup_backend("tatten")(gm, [torch.ones(1)], mode=mode, options={"inner": "stand_in"})
    assert calls[0][1] == kwargs


def test_reset_reaches_the_inner_backend(register: Callable[[str, Callable], None]) -> None:
    backend = recorder([])
    resets = []
    backend.reset = lambda: resets.append(1)  # type: ignore[attr-defined]
    register("stand_in", backend)
    check(attend, options={"inner": "stand_in"})
    assert not resets
    torch._dynamo.reset()
    assert resets == [1]


def tensorrt(calls: Calls) -> Callable:
    """Trace as torch_tensorrt does, to aten, and run that: its plain trace copies inputs, so that writes are lost."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import aot_export_joint_simple

    def backend(gm: GraphModule, example_inputs: list[Tensor], **kwargs: Any) -> Callable:
        calls.append((gm, kwargs))
        settings = kwargs["options"] if set(kwargs) == {"options"} else kwargs
        if settings.get("use_distributed_mode_trace"):
            return aot_autograd(fw_compiler=lambda aten, _: aten.forward)(gm, example_inputs)

        def with_copies(*args: Tensor) -> tuple[Tensor, ...]:
            return tuple(gm(*(x.clone() for x in args)))

        return aot_export_joint_simple(with_copies, example_inputs, trace_joint=False)

    return backend


@pytest.fixture
def tensorrt_calls(monkeypatch: pytest.MonkeyPatch, register: Callable[[str, Callable], None]) -> Calls:
    calls: Calls = []
    monkeypatch.setitem(sys.modules, "torch_tensorrt", ModuleType("torch_tensorrt"))
    register("torch_tensorrt", tensorrt(calls))
    return calls


def test_tensorrt_gets_options_alone(tensorrt_calls: Calls) -> None:
    check(attend, options={"inner": "torch_tensorrt", "min_block_size": 3})
    gm, given = tensorrt_calls.pop()
    assert given == {"options": {"min_block_size": 3}}
    with pytest.raises(ValueError, match=r"`mode` must be None or 'default'.*got 'max-autotune'"):
        registry.lookup_backend("tatten")(gm, [], mode="max-autotune", options={"inner": "torch_tensorrt"})


def test_tensorrt_compiles_a_graph_that_writes_to_a_cache(tensorrt_calls: Calls) -> None:
    check(attend_to_cache, options={"inner": "torch_tensorrt"})


def test_tensorrt_would_lose_writes_in_its_plain_trace(tensorrt_calls: Calls) -> None:
    options = {"inner": "torch_tensorrt", "use_distributed_mode_trace": False}
    check(attend, options=options)  # which writes nothing
    fn = torch.compile(attend_to_cache, backend="tatten", options=options)
    said = r"`use_distributed_mode_trace` must be True or left out .* got False"
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=said):
        fn(*inputs())
