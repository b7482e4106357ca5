"""Compilation by Inductor with lowered ops, and again with opaque ones where that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

import tatten
from tatten.lowered import compile_lowered


class FailsOnce:
    """Compiles a graph by Inductor; the first time it spoils the graph and raises, as an error in code generation."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {"combo_kernels": True, "triton.enable_pdl": True}
        self.times = 0
        self.configs: list[dict[str, Any]] = []

    def __call__(self, gm: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.times += 1
        self.configs.append(self.config)
        if self.times == 1:
            gm.graph.output_node().args = ((),)
            raise RuntimeError("code generation failed")
        return torch._TorchCompileInductorWrapper("default", None, False)(gm, inputs)


def test_a_graph_is_compiled_again_after_an_error() -> None:
    wrapper = FailsOnce()
    torch._dynamo.reset()
    model = torch.nn.Linear(16, 16)  # its parameters are inputs whose sources AOTAutograd asks for

    def attend(x: Tensor) -> Tensor:
        return tatten.decode_attention(model(x), x.repeat(1, 1, 8, 1), x.repeat(1, 1, 8, 1))

    x = torch.randn(2, 3, 1, 16)
    with torch.no_grad():
        got = torch.compile(attend, backend=lambda gm, inputs: compile_lowered(wrapper, gm, inputs), fullgraph=True)(x)
        torch.testing.assert_close(got, attend(x))
    assert wrapper.times == 2
    assert wrapper.configs[0]["combo_kernels"]
    assert wrapper.configs[1] == {"combo_kernels": False, "triton.enable_pdl": False}  # the error may be theirs
    assert wrapper.config == {"combo_kernels": True, "triton.enable_pdl": True}
