"""Products of one row that a graph leaves to PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import capture
from one_row_layers import take_any_size
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from tatten.integrations.transformers import cache_kwargs
from tatten.passes import rewrite
from tatten.passes.one_row_products import has_one_row_products

ONE, FEW = torch.ones(1, 1, 8), torch.ones(2, 3, 8)
FIRST = torch.ones(2, 1, 8)
WEIGHT, MATRICES = torch.ones(8, 5), torch.ones(2, 8, 5)


def operators(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def named(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, other=b)


def linear(a: Tensor, b: Tensor) -> Tensor:
    return F.linear(a, weight=b.T)


def with_bias(a: Tensor, b: Tensor) -> Tensor:
    return F.linear(a, b.T, b[0])


def matrices(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, mat2=b)


def batches(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, mat2=b)


def added(a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(a.new_ones(5), a.flatten(0, -2), b)


def batches_added(a: Tensor, b: Tensor) -> Tensor:
    return torch.baddbmm(a.new_ones(2, 1, 5), a, b)


def pointwise(a: Tensor, b: Tensor) -> Tensor:
    return a * b.T


CASES: list[tuple[Callable[..., Any], Tensor, Tensor, bool]] = [
    (operators, ONE, WEIGHT, True),
    (operators, ONE[0], WEIGHT, True),
    (operators, ONE[0, 0], WEIGHT, True),
    (operators, FEW, WEIGHT, False),
    (operators, FIRST[:1], WEIGHT, True),
    (operators, FIRST, WEIGHT, False),  # the rows of all matrices count
    (operators, FIRST, MATRICES, True),
    (operators, FEW, MATRICES, False),
    (operators, FEW, MATRICES[..., :1], True),
    (operators, FEW, WEIGHT[:, 0], False),
    (operators, ONE[0, 0], WEIGHT[:, 0], False),
    (named, ONE, WEIGHT, True),
    (named, FEW, WEIGHT, False),
    (batches, FIRST, MATRICES, True),
    (batches, FEW, MATRICES, False),
    (matrices, FEW[0], WEIGHT, False),
    (matrices, FEW[0], WEIGHT[:, :1], True),
    (torch.mv, WEIGHT, torch.ones(5), False),
    (linear, ONE, WEIGHT, True),
    (linear, ONE[0, 0], WEIGHT, True),
    (linear, FEW, WEIGHT, False),
    (linear, FEW, WEIGHT[:, :1], True),
    (with_bias, ONE, WEIGHT, False),
    (added, ONE, WEIGHT, False),
    (batches_added, FIRST, MATRICES, False),
    (pointwise, ONE, WEIGHT, False),
]


@pytest.mark.parametrize("fn, a, b, expected", CASES, ids=lambda x: getattr(x, "__name__", None))
def test_products(fn: Callable[..., Any], a: Tensor, b: Tensor, expected: bool) -> None:
    assert has_one_row_products(capture(fn, a, b)) == expected


@pytest.mark.parametrize("fn, a, b, expected", CASES, ids=lambda x: getattr(x, "__name__", None))
def test_tuning_decomposes_these_products(fn: Callable[..., Any], a: Tensor, b: Tensor, expected: bool) -> None:
    """Inductor's own decompositions of 16-bit products differ with tuning for these alone, except on a CPU."""
    targets = []
    for tunes in (False, True):
        with inductor_config.patch(coordinate_descent_tuning=tunes), torch.no_grad():
            inputs = [torch.empty(x.shape, device="meta", dtype=torch.bfloat16) for x in (a, b)]
            graph = make_fx(fn, select_decomp_table())(*inputs).graph
            targets.append({str(node.target) for node in graph.nodes})
    assert (targets[0] != targets[1]) == expected


def test_unknown_operands_and_einsum_count() -> None:
    def indices(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("...k,kn->...n", a, b)

    assert has_one_row_products(capture(indices, FEW, WEIGHT))
    gm = capture(operators, FEW, WEIGHT)
    assert not has_one_row_products(gm)
    del gm.graph.find_nodes(op="placeholder")[0].meta["example_value"]
    assert has_one_row_products(gm)


def test_a_third_operand_is_a_bias_of_linear_layers_alone() -> None:
    """That of `mm` and `bmm` is the dtype of the result, which only GPUs take."""
    gm = capture(torch.mm, ONE[0], WEIGHT)
    (product,) = gm.graph.find_nodes(op="call_function", target=torch.mm)
    product.args = (*product.args, torch.float32)
    assert has_one_row_products(gm)


def test_an_outer_product_does_not_count() -> None:
    """As in a rotary embedding: tuning a graph for it costs more than it gains."""
    assert not has_one_row_products(capture(operators, FEW[..., :1], torch.ones(2, 1, 1)))


def test_a_dynamic_number_of_rows_does_not_count() -> None:
    """Inductor decomposes only rows that are known to be one."""
    for mark, expected in ((torch._dynamo.mark_static, True), (torch._dynamo.decorators.mark_unbacked, False)):
        x = torch.ones(1, 8)
        mark(x, 0)
        assert has_one_row_products(capture(operators, x, WEIGHT)) == expected


def test_the_body_of_an_operator_counts() -> None:
    def branches(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda a, b: a @ b, lambda a, b: a @ b + 1, (a, b))

    assert has_one_row_products(capture(branches, ONE, ONE[0], WEIGHT))
    assert not has_one_row_products(capture(branches, ONE, FEW[0], WEIGHT))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_decode_step_has_none_once_its_linear_layers_are_replaced(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotary embedding multiplies an outer product."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    model = LlamaForCausalLM(config).eval().bfloat16()
    cache = StaticCache(config, max_cache_len=32)
    ids = torch.ones(batch, 1, dtype=torch.long)

    def step(ids: Tensor) -> Tensor:
        return model(ids, position_ids=torch.zeros_like(ids), **cache_kwargs(cache), use_cache=True).logits

    with torch.no_grad():
        step(ids)  # makes the cache
        gm = capture(step, ids)
    assert has_one_row_products(gm) == (batch == 1)
    take_any_size(monkeypatch)
    assert rewrite(gm, linears=True).note
    assert not has_one_row_products(gm)
