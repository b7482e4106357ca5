"""The private PyTorch APIs that we rest on, each used in one file: if one moves, this says which."""

from __future__ import annotations

import torch
from torch._dynamo.variables import functions
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true


def test_passes_symbolic() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(3, 4))
    assert isinstance(x, FakeTensor)
    assert torch._C._is_alias_of(x, x.view(-1)[2:])
    assert not torch._C._is_alias_of(x, x.clone())
    env = ShapeEnv()
    size = env.create_unbacked_symint()
    assert size.node.maybe_as_int() is None
    assert size.node.hint is None
    assert statically_known_true(size == size)
    torch._check(size <= 16)
    assert statically_known_true(size <= 16)
    assert not statically_known_true(size <= 15)


def test_passes_calls() -> None:
    """`torch.special` and its like take their functions from modules of `torch._C`; Dynamo's own are by module name."""
    for public, private in (("special", "_special"), ("linalg", "_linalg"), ("fft", "_fft")):
        assert any(
            x is y for x in vars(getattr(torch, public)).values() for y in vars(getattr(torch._C, private)).values()
        )
    assert torch.nn.functional.gelu is torch._C._nn.gelu
    assert isinstance(torch.ops.aten.add.Tensor, OpOverload)
    assert isinstance(torch.ops.aten.add, OpOverloadPacket)
    assert functions.__name__.startswith("torch._dynamo.variables.")


def test_passes_autocast() -> None:
    """Dynamo records an autocast region as calls of these two."""
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

    seen = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        seen.extend(node.target for node in gm.graph.nodes)
        return gm

    @torch.compile(backend=backend)
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    f(torch.ones(2, 2))
    assert _enter_autocast in seen
    assert _exit_autocast in seen
