"""Index keys that a program dequantises before it scores them: read in 8 bits, or from its copy for a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import capture, listing, run_rewritten
from index_forms import B, C, D, S, deepseek_v4, deepseek_v32, exact, inputs
from index_graphs import assert_scores, ops, tensor_of
from torch import Tensor

import tatten
from tatten.passes import Declined, Rewritten, cost, rewrite
from tatten.passes.byte_sizes import shown_bytes

Dequantise = Callable[[Tensor, Tensor], Tensor]  # keys in 8 bits and their scale to keys
NARROW = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
bf16, f32 = torch.bfloat16, torch.float32


def narrow(dtype: torch.dtype) -> Tensor:
    x = (40 * torch.randn(B, S, D, generator=torch.Generator().manual_seed(3))).round().clamp(-127, 127)
    return x.to(torch.int8) if dtype == torch.int8 else (x / 20).to(dtype)


def scale(shape: tuple[int, ...] = (B, S, 1), dtype: torch.dtype = f32) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(4)) / 20 + 0.01).to(dtype)


def wide(k: Tensor, s: Tensor) -> Tensor:
    return k.float() * s


# Functions that dequantise keys of 8 bits by a scale, each with its scale.
TAKEN: dict[str, tuple[Dequantise, Tensor]] = {
    "each key": (wide, scale()),
    "each key, rounded": (lambda k, s: (k.float() * s).to(bf16), scale()),
    "each key, in 16 bits": (lambda k, s: k.to(bf16) * s, scale(dtype=bf16)),
    "without dims": (lambda k, s: k.to(f32) * s[..., None], scale((B, S))),
    "scale first": (lambda k, s: torch.mul(s, k.float()), scale()),
    "float16": (wide, scale(dtype=torch.float16)),
    "all sequences": (wide, scale((S, 1))),
    "each sequence": (wide, scale((B, 1, 1))),
    "all keys": (wide, scale((1,))),
    "a tensor without dims": (wide, scale(())),
    "a number": (lambda k, s: k.float() * 0.05, scale()),
    "a negative number": (lambda k, s: k.float() * -0.05, scale()),
    "a cast alone": (lambda k, s: k.float(), scale()),
    "transposed before": (lambda k, s: (k.mT.float() * s.mT).mT, scale()),
    "copied after": (lambda k, s: (k.float() * s).clone().contiguous(), scale()),
}


def scored(dequantise: Dequantise) -> Callable[..., Tensor]:
    return lambda q, k, s, w, m: deepseek_v32(q, dequantise(k, s), w, m)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("name", TAKEN)
def test_is_read_in_8_bits(name: str, dtype: torch.dtype) -> None:
    """The scores of the exact product, to which the program's are no nearer."""
    dequantise, factor = TAKEN[name]
    query, _, weights, mask = inputs()
    args = query, narrow(dtype), factor, weights, mask
    (finding,), gm, out = run_rewritten(scored(dequantise), *args)
    assert isinstance(finding, Rewritten), finding
    assert "not read in 8 bits" not in finding.note
    (op,) = ops(gm)
    assert [tensor_of(x).dtype for x in op.args[:2]] == [bf16, dtype]
    assert ("key_scale" in op.kwargs) == (name not in ("a number", "a negative number", "a cast alone"))
    assert not any(x.target in ("float", "to", "clone") for x in gm.graph.nodes if x.users and _of_keys(x)), listing(gm)
    if "rounded" in name or "16 bits" in name:
        keys = args[1].double() * factor.double()
    else:
        keys = dequantise(args[1], factor).double()
    assert_scores(out, exact(query, keys, weights, mask))


def _of_keys(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.numel() == B * S * D


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_dynamic_lengths(dtype: torch.dtype) -> None:
    query, _, weights, mask = inputs()
    for name in ("each key", "each sequence", "a tensor without dims"):
        dequantise, factor = TAKEN[name]
        key, mask = narrow(dtype), mask.clone()
        torch._dynamo.mark_dynamic(key, 1)
        torch._dynamo.mark_dynamic(mask, 2)
        if name == "each key":
            factor = factor.clone()
            torch._dynamo.mark_dynamic(factor, 1)
        (finding,), gm, out = run_rewritten(scored(dequantise), query, key, factor, weights, mask)
        assert isinstance(finding, Rewritten), finding
        assert tensor_of(ops(gm)[0].args[1]).dtype == dtype
        assert_scores(out, exact(query, dequantise(key, factor), weights, mask))


def test_queries_in_float32() -> None:
    query, _, weights, mask = inputs(f32)
    _, gm, out = run_rewritten(scored(wide), query, narrow(torch.int8), scale(), weights, mask)
    (op,) = ops(gm)
    assert [tensor_of(x).dtype for x in op.args[:2]] == [f32, torch.int8]
    assert_scores(out, exact(query, wide(narrow(torch.int8), scale()), weights, mask))


def test_a_scale_that_is_an_input() -> None:
    """Under `dynamic=True` a number of a module is an input; it multiplies products before relu, whatever its sign."""

    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of_keys = 0.25

        def forward(self, q: Tensor, k: Tensor, w: Tensor, m: Tensor) -> Tensor:
            return deepseek_v4(q, k.float() * self.of_keys, w, m)

    query, _, weights, mask = inputs(length=1)
    args, graphs = (query, narrow(torch.int8), weights, mask), []

    def backend(gm, _):
        graphs.append((gm, rewrite(gm).findings))
        return gm.forward

    torch._dynamo.reset()
    module = Scores()
    compiled = torch.compile(module, backend=backend, dynamic=True)
    for number in (0.25, 0.5, -1.0):
        module.of_keys = number
        torch.testing.assert_close(compiled(*args), module(*args), rtol=1e-5, atol=1e-4)
    assert all(tensor_of(ops(gm)[0].args[1]).dtype == torch.int8 for gm, _ in graphs)


# Functions whose keys are not read in 8 bits, each with its scale and the reason.
LEFT: dict[str, tuple[Dequantise, Tensor, str]] = {
    "zero point": (lambda k, s: (k.float() - 3) * s, scale(), "changed by `sub` (sub)"),
    "two scales": (lambda k, s: k.float() * s * 0.5, scale(), "times 2 factors"),
    "scale of each dim": (wide, scale((D,)), "times a scale of shape [16], which differs along the dims of a key"),
    "groups": (wide, scale((B, S, D)), "times a scale of shape [2, 128, 16], which differs along the dims of a key"),
    "written": (lambda k, s: (k.float() * s).mul_(2), scale(), "written in place by `mul_`"),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_forms_are_read_from_the_copy_of_the_program(name: str) -> None:
    dequantise, factor, reason = LEFT[name]
    query, _, weights, mask = inputs()
    args = query, narrow(torch.int8), factor, weights, mask
    (finding,), gm, out = run_rewritten(scored(dequantise), *args)
    assert isinstance(finding, Rewritten), finding
    assert "not read in 8 bits: " in finding.note
    assert reason in finding.note
    (op,) = ops(gm)
    assert tensor_of(op.args[1]).dtype == f32
    assert "key_scale" not in op.kwargs
    assert_scores(out, exact(query, dequantise(args[1], factor), weights, mask))


def test_other_dtypes_are_read_from_the_copy_of_the_program() -> None:
    query, _, weights, mask = inputs()
    for dtype, named in ((torch.float8_e5m2, "float8_e5m2"), (torch.uint8, "uint8")):
        key = narrow(torch.int8).abs().to(dtype)
        (finding,), gm, out = run_rewritten(scored(wide), query, key, scale(), weights, mask)
        assert f"`l_k_` in {named}, where the op takes float8_e4m3fn and int8" in finding.note
        assert tensor_of(ops(gm)[0].args[1]).dtype == f32
        assert_scores(out, exact(query, wide(key, scale()), weights, mask))


@pytest.mark.parametrize("written", ["keys", "scale"])
def test_a_write_before_the_scores_are_used(written: str) -> None:
    def fn(q, k, s, w, m):
        k, s = k.clone(), s.clone()
        keys = k.float() * s
        (k if written == "keys" else s)[:, 0] = 1
        return deepseek_v32(q, keys, w, m)

    query, _, weights, mask = inputs()
    args = query, narrow(torch.int8), scale(), weights, mask
    gm = capture(fn, *args)
    before = listing(gm)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason.value == "written_between"
    assert listing(gm) == before


def test_cost_and_report(monkeypatch: pytest.MonkeyPatch) -> None:
    query, _, weights, mask = inputs()
    args = query, narrow(torch.int8), scale(), weights, mask
    with torch.no_grad():
        text = str(tatten.explain(scored(wide), *args))
    assert "k int8[2, 128, 16] w float32[2, 3, 4] mask bool[2, 3, 128] scale float32[2, 128, 1]" in text
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(bytes_per_us=1e3, segment_us=200.0))
    (finding,), _, _ = run_rewritten(scored(wide), *args)
    keys, scores = B * S * D, mask.numel()
    moved, read = keys * (1 + 2 * 4) + scores * 4 * (2 * 4 + 1), keys + scores * 4
    assert f"by moving {shown_bytes(read)} instead of {shown_bytes(moved)}" in finding.decline.detail


def test_exported() -> None:
    class Scores(torch.nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            return scored(wide)(*args)

    query, _, weights, mask = inputs()
    args = query, narrow(torch.int8), scale(), weights, mask
    with torch.no_grad():
        program = torch.export.export(Scores(), args)
        rewritten = tatten.rewrite(program)
    (op,) = ops(rewritten.graph_module)
    assert op.args[1].meta["val"].dtype == torch.int8
    assert_scores(rewritten.module()(*args), exact(query, wide(*args[1:3]), weights, mask, C))
