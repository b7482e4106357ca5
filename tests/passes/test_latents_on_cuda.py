"""Latents on a GPU: the products around attention, and the widths that kernels take."""

from __future__ import annotations

import re

import pytest
import torch
from graphs import capture
from latent_forms import LATENT, ROPE, B, attend, inputs, joined, parts_of_query
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from tatten.ops.cuda.gpu_rates import GpuRates
from tatten.ops.validation import widest_on_cuda
from tatten.passes import Rewritten, absorb, rewrite


class OnCuda(torch.fx.Interpreter):
    """Runs a graph on fake tensors of a GPU and leaves their like with its nodes."""

    def run_node(self, n):
        result = super().run_node(n)
        n.meta["example_value"] = result
        return result


def as_on_cuda(gm: GraphModule) -> GraphModule:
    values = [x.meta["example_value"] for x in gm.graph.find_nodes(op="placeholder")]
    with FakeTensorMode():
        OnCuda(gm).run(*(torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in values))
    return gm


def on_cuda(rank: int, dtype: torch.dtype, width: int = ROPE) -> GraphModule:
    q, c, rope, w, mask = inputs(rope=width, dtype=dtype)
    c, w = (x[..., :1].repeat_interleave(rank, -1) for x in (c, w))
    return as_on_cuda(capture(lambda *x: attend(*x, join=joined), q, c, rope, w, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_reads_the_weight_once_and_as_it_is(dtype: torch.dtype) -> None:
    gm = on_cuda(widest_on_cuda(dtype), dtype, width=64)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten)
    assert finding.op == LATENT
    project = torch.ops.tatten.project_heads.default
    by = torch.bmm if dtype == torch.float32 else project
    products = [node for node in gm.graph.nodes if node.target is by]
    assert len(products) == 2
    weights = [product.args[1].target for product in products]  # the keys' and the values', both views
    assert weights == (["narrow", "transpose"] if dtype == torch.float32 else ["transpose", "narrow"])


@pytest.mark.parametrize("q_len, capability, unrounded", [(1, 9, True), (4, 9, True), (5, 9, False), (1, 8, False)])
def test_few_queries_reach_attention_unrounded_on_hopper(
    q_len: int, capability: int, unrounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 up to 16 of them, of all heads. The graph, run on a CPU, rounds less then than SDPA does."""
    monkeypatch.setattr(absorb, "has_wgmma", lambda device: capability == 9)
    args = inputs(q_len, dtype=torch.bfloat16)
    gm = as_on_cuda(capture(lambda *x: attend(*x, join=joined), *args))
    rewrite(gm)
    (op,) = (x for x in gm.graph.nodes if x.target is torch.ops.tatten.latent_attention.default)
    assert op.args[0].args[2] == (torch.float32 if unrounded else torch.bfloat16)
    want, by_sdpa = attend(*(x.double() for x in args[:4]), args[4]), attend(*args)
    (got,) = gm(*(args[int(x.name.split("_")[2])] for x in gm.graph.find_nodes(op="placeholder")))
    assert (got - want).norm() <= (1.0 if unrounded else 1.2) * (by_sdpa - want).norm()


@pytest.mark.parametrize("most", [B * 5, B * 5 - 1])
def test_many_queries_are_multiplied_by_bmm_on_a_gpu(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorb, "gpu_rates", lambda device: GpuRates(project_most_rows=most))
    gm = as_on_cuda(capture(lambda *x: attend(*x, join=joined), *inputs(5, dtype=torch.bfloat16)))
    rewrite(gm)
    project = torch.ops.tatten.project_heads.default
    products = [node.target for node in gm.graph.nodes if node.target in (torch.bmm, project)]
    assert products == [project if most == B * 5 else torch.bmm, project]


@pytest.mark.parametrize(
    ("rank", "width", "dtype"), [(513, 8, torch.bfloat16), (257, 8, torch.float32), (512, 65, torch.bfloat16)]
)
def test_widths_that_no_kernel_takes(rank: int, width: int, dtype: torch.dtype) -> None:
    (finding,) = rewrite(on_cuda(rank, dtype, width)).findings
    assert isinstance(finding, Rewritten)
    assert f"not absorbed [head_dim]: latents have rank {rank}, their rope {width} columns" in finding.note


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"cpp_wrapper": True}], ids=["python", "cpp"])
def test_on_a_gpu_sums_are_multiplied_by_one_kernel_unrounded(options: dict[str, bool]) -> None:
    fn, args = parts_of_query, [x.to("cuda") for x in inputs(dtype=torch.bfloat16)]
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(fn, backend="tatten", fullgraph=True, options=options)
        got, code = run_and_get_code(compiled, *args)
        want, by_sdpa = fn(*(x.double() if x.is_floating_point() else x for x in args)), fn(*args)
    without_comments = re.sub(r"^\s*(#|//).*$", "", code[0], flags=re.M)
    assert "project_heads_kernel" in without_comments
    assert "torch.ops.tatten" not in without_comments
    assert "tatten::" not in without_comments
    assert (got - want).norm() <= 1.2 * (by_sdpa - want).norm()
