"""ExecuTorch's and torch-tensorrt's demands on a rewritten program's graph: core ATen, or ops to leave as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow import slow_but
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner

import tatten

pytestmark = pytest.mark.drawn(1)

Args = tuple[Tensor, ...]
SLOTS = 64


class Step(torch.nn.Module):
    """A decode step with its cache in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(16, 16)
        self.register_buffer("k", torch.zeros(2, 2, SLOTS, 16))
        self.register_buffer("v", torch.zeros(2, 2, SLOTS, 16))

    def forward(self, q, position):
        self.k.index_copy_(2, position, self.projection(q)[:, :2])
        self.v.index_copy_(2, position, q[:, 2:4])
        mask = (torch.arange(SLOTS) <= position)[None, None, None]
        return F.scaled_dot_product_attention(self.projection(q), self.k, self.v, mask, enable_gqa=True)


class Cache(torch.nn.Module):
    """A decode step that takes its cache and returns the new one, with a length for each sequence."""

    def forward(self, q, k, v, position, lens):
        k, v = k.index_copy(2, position, q[:, :2]), v.index_copy(2, position, q[:, 2:4])
        mask = torch.arange(SLOTS) < lens[:, None, None, None]
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), k, v


class SharedPrefix(torch.nn.Module):
    """Attention of several sequences over one prefix and keys of their own."""

    def forward(self, q, k, v, own_k, own_v, mask):
        k, v = (torch.cat([x.expand(4, -1, -1, -1), own], 2) for x, own in ((k, own_k), (v, own_v)))
        return F.scaled_dot_product_attention(q, k, v, mask)


def step_args(position: int) -> Args:
    return torch.randn(2, 8, 1, 16), torch.tensor([position])


def cache_args(position: int) -> Args:
    k, v = torch.randn(2, 2, 2, SLOTS, 16)
    return torch.randn(2, 8, 1, 16), k, v, torch.tensor([position]), torch.tensor([position, position // 2]) + 1


def prefix_args(position: int) -> Args:
    mask = torch.arange(SLOTS) < SLOTS // 2 + position
    prefix, own = torch.randn(2, 1, 8, 32, 16), torch.randn(2, 4, 8, 32, 16)
    return torch.randn(4, 8, 1, 16), *prefix, *own, mask.repeat(4, 1, 1, 1)


Example = tuple[Callable[[], torch.nn.Module], Callable[[int], Args], str]
EXAMPLES: dict[str, Example] = {
    "step": (Step, step_args, "tatten.decode_attention.default"),
    "cache": (Cache, cache_args, "tatten.decode_attention.default"),
    "prefix": (SharedPrefix, prefix_args, "tatten.bifurcated_attention.default"),
}
examples = pytest.mark.parametrize("name", EXAMPLES)


def exported_and_rewritten(name: str) -> tuple[ExportedProgram, ExportedProgram]:
    module, args, op = EXAMPLES[name]
    torch.manual_seed(0)
    with torch.no_grad():
        program = torch.export.export(module(), args(3))
    with tatten.recording() as report:
        rewritten = tatten.rewrite(program)
    assert [call.op for call in report.rewritten] == [op]
    return program, rewritten


def in_core_aten(program: ExportedProgram) -> ExportedProgram:
    table = torch.export.default_decompositions()
    table.update(tatten.decompositions(core_aten=True))
    return program.run_decompositions(table)


def overloads(program: ExportedProgram) -> set[OpOverload]:
    return {node.target for node in program.graph.nodes if isinstance(node.target, OpOverload)}


def assert_equal_steps(name: str, program: ExportedProgram, run: Callable[..., Any]) -> None:
    """`run` gives what the exported program gives, for other inputs and step after step."""
    expected = copy.deepcopy(program).module()
    with torch.no_grad():
        for position in range(4):
            args = EXAMPLES[name][1](position)
            torch.testing.assert_close(run(*copy.deepcopy(args)), expected(*args))


@examples
def test_core_aten(name: str) -> None:
    """The table of PyTorch and that of tatten together leave what ExecuTorch takes."""
    program, rewritten = exported_and_rewritten(name)
    core = in_core_aten(rewritten)
    assert [*core.graph_signature.buffers_to_mutate.values()] == (["k", "v"] if name == "step" else [])
    # The checks of the span that is read, which have no tensor.
    assert {op for op in overloads(core) if torch.Tag.core not in op.tags} == {torch.ops.aten._assert_scalar.default}
    assert_equal_steps(name, program, core.module())


@examples
def test_ops_are_kept_by_decompositions_and_partitioned_around(name: str) -> None:
    """As torch_tensorrt does it: decompose what it knows, and run in PyTorch what it does not."""
    program, rewritten = exported_and_rewritten(name)
    with torch.no_grad():
        kept = rewritten.run_decompositions()
    ours = {op for op in overloads(kept) if torch.Tag.core not in op.tags}
    assert {op.namespace for op in ours} == {"tatten"}
    for op in ours:
        assert not op._schema.is_mutable, op
        assert all(returned.alias_info is None for returned in op._schema.returns), op

    class Aten:
        def is_node_supported(self, submodules: object, node: torch.fx.Node) -> bool:
            return isinstance(node.target, OpOverload) and node.target.namespace == "aten"

    module = kept.module()
    partitioned = CapabilityBasedPartitioner(module, Aten(), allows_single_node_partition=True).partition_and_fuse()
    outside = {node.target for node in partitioned.graph.nodes if node.op == "call_function"}
    assert ours < outside
    assert {op for op in outside if isinstance(op, OpOverload)} == ours
    assert_equal_steps(name, program, partitioned)


@pytest.mark.parametrize("name", slow_but(["step"], EXAMPLES))
def test_executorch_runs_what_is_in_core_aten(name: str) -> None:
    exir = pytest.importorskip("executorch.exir", reason="ExecuTorch is not installed")
    from executorch.runtime import Runtime

    program, rewritten = exported_and_rewritten(name)
    buffer = exir.to_edge(in_core_aten(rewritten)).to_executorch().buffer
    forward = Runtime.get().load_program(buffer).load_method("forward")

    def run(*args: Tensor) -> Any:
        out = forward.execute(args)
        return out[0] if len(out) == 1 else tuple(out)

    assert_equal_steps(name, program, run)


def test_executorch_names_the_op_that_it_has_no_kernel_for() -> None:
    exir = pytest.importorskip("executorch.exir", reason="ExecuTorch is not installed")
    _, rewritten = exported_and_rewritten("step")
    with torch.no_grad():
        edge = exir.to_edge(rewritten)
        with pytest.raises(RuntimeError, match=r"Missing out variants: \{'tatten::decode_attention'\}"):
            edge.to_executorch()
