"""The algebra of states: associative, commutative, with the empty state as identity."""

from __future__ import annotations

import itertools

import pytest
import torch
from devices import DEVICES
from slow import slow_but
from torch.library import opcheck

import tatten

INF = float("inf")


def states(n: int = 3, dtype: torch.dtype = torch.float32, device: str = "cpu", dim: int = 16):
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(n, 2, 4, 3, dim, generator=generator, dtype=torch.float64)
    lse = torch.randn(n, 2, 4, 3, generator=generator, dtype=torch.float64) * 5
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return out.to(dtype).to(device), lse.to(lse_dtype).to(device)


def exact(out, lse):
    """The definition, in float64."""
    out, lse = out.double(), lse.double()
    weights = lse.softmax(dim=0).unsqueeze(-1)
    return (weights * out).sum(0), lse.logsumexp(0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 17])
def test_equals_the_definition(n: int, dtype: torch.dtype, device: str) -> None:
    out, lse = states(n, dtype, device)
    got_out, got_lse = tatten.merge_states(out, lse)
    want_out, want_lse = exact(out, lse)
    assert got_out.dtype == dtype
    assert got_lse.dtype == lse.dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got_out.double(), want_out, atol=4 * eps, rtol=4 * eps)
    eps = torch.finfo(lse.dtype).eps
    torch.testing.assert_close(got_lse.double(), want_lse, atol=8 * eps, rtol=8 * eps)


@pytest.mark.parametrize("device", DEVICES)
def test_algebra(device: str) -> None:
    (a, b, c), (la, lb, lc) = states(device=device)
    ab = tatten.merge_state(a, la, b, lb)
    ba = tatten.merge_state(b, lb, a, la)
    assert torch.equal(ab[0], ba[0])
    assert torch.equal(ab[1], ba[1])
    left, right = tatten.merge_state(*ab, c, lc), tatten.merge_state(a, la, *tatten.merge_state(b, lb, c, lc))
    torch.testing.assert_close(left, right)
    torch.testing.assert_close(left, tatten.merge_states(torch.stack((a, b, c)), torch.stack((la, lb, lc))))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mark", [-INF, INF, float("nan")])
def test_the_empty_state_is_the_identity(mark: float, device: str) -> None:
    (a, *_), (la, *_) = states(device=device)
    junk, empty = torch.full_like(a, float("nan")), torch.full_like(la, mark)
    for pair in ((a, la, junk, empty), (junk, empty, a, la)):
        out, lse = tatten.merge_state(*pair)
        assert torch.equal(out, a)
        assert torch.equal(lse, la)
    out, lse = tatten.merge_state(junk, empty, junk, empty)
    assert torch.equal(out, torch.zeros_like(a))
    assert torch.equal(lse, torch.full_like(la, -INF))


@pytest.mark.parametrize("device", DEVICES)
def test_far_apart(device: str) -> None:
    """Nothing overflows, and what weighs nothing leaves no trace."""
    (a, b, _), (la, _, _) = states(device=device)
    out, lse = tatten.merge_state(a, la + 1e30, b, la - 1e30)
    assert torch.equal(out, a)
    assert lse.isfinite().all()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_strides_as_they_come(order: tuple[int, ...]) -> None:
    out, lse = states()
    want = tatten.merge_states(out, lse)
    dims = [1 + d for d in order]
    back = [0, *(1 + dims.index(1 + d) for d in range(3))]
    out = out.permute(0, *dims, 4).contiguous().permute(*back, 4)
    torch.testing.assert_close(tatten.merge_states(out, lse.permute(0, *dims).contiguous().permute(back)), want)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    out, lse = states(device=device)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(torch.ops.tatten.merge_states.default, (out, lse), test_utils=utils)


@pytest.mark.parametrize("inner", slow_but(["aot_eager"], ["aot_eager", "inductor"]))
def test_compiles_to_plain_pytorch(inner: str) -> None:
    out, lse = states()
    targets = []

    def backend(gm, example_inputs):
        targets.extend(str(node.target) for node in gm.graph.nodes)
        return torch._dynamo.lookup_backend(inner)(gm, example_inputs)

    def fn(out, lse):
        return tatten.merge_state(*tatten.merge_states(out, lse), out[0], lse[0])

    torch.testing.assert_close(torch.compile(fn, backend=backend, fullgraph=True)(out, lse), fn(out, lse))
    assert not any("tatten" in target for target in targets)
