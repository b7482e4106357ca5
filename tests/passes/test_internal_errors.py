"""An error inside a pass reaches no user: the graph stays as it was, and the report says `internal`."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from faults import captured, copy_of, reached, state_of, with_fault
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tatten
from tatten.passes import Declined, Rewritten, apply_match, internal, match_call, rewrite, sliding
from tatten.passes.reasons import Reason

rewriting, reporting = (importlib.import_module(f"tatten.{name}") for name in ("passes.rewrite", "report"))
B, HQ, HKV, S, D = 2, 4, 2, 16, 8
sdpa = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internal, "RAISES", False)
    monkeypatch.setitem(sliding.LEAST_BYTES, "cpu", 1)


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    mask = torch.rand(B, 1, 1, S) < 0.7
    mask[..., 0] = True
    return {
        "q": torch.randn(B, HQ, 1, D),
        "k": torch.randn(B, HKV, S, D),
        "v": torch.randn(B, HKV, S, D),
        "new": torch.randn(B, HKV, 1, D),
        "prefix": torch.randn(1, HKV, S, D),
        "mask": mask,
        "bias": torch.randn(HQ, 1, S),
        "sinks": torch.randn(HQ),
        "rows": torch.tensor([0, 0]),
        "narrow": torch.randint(-100, 100, (B, HKV, S, D), dtype=torch.int8),
        "scale": torch.rand(B, HKV, S, 1) / 20,
        "latent": torch.randn(B, 1, S, 24),
        "rope": torch.randn(B, 1, S, D),
        "weight": torch.randn(HQ * 24, 24) / 5,
    }


def repeat_kv(x: Tensor) -> Tensor:
    return x[:, :, None].expand(-1, -1, HQ // HKV, -1, -1).reshape(x.size(0), HQ, x.size(2), D)


def static_cache(q, k, v, new, mask):
    """Layers that write to their caches, repeat heads, and compute the mask anew."""
    for layer in range(3):
        k.index_copy_(2, torch.tensor([layer]), new)
        q = sdpa(q * 0.5, repeat_kv(k), repeat_kv(v), torch.where(mask, 0.0, -torch.inf)) + 1
        q = q.transpose(1, 2).contiguous().view(B, 1, HQ, D).transpose(1, 2)
    return q


def written_out(q, k, v, mask, bias, sinks):
    for layer in range(3):
        scores = q @ repeat_kv(k).transpose(-1, -2) * 0.3 + bias
        if layer == 1:
            scores = torch.tanh(scores / 5) * 5
        scores = torch.where(mask, scores, torch.finfo(torch.float32).min)
        if layer == 2:
            joined = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(B, -1, 1, 1)), dim=-1)
            weights = joined.softmax(-1)[..., :-1]
        else:
            weights = F.dropout((scores - scores.amax(-1, keepdim=True)).softmax(-1), 0.0)
        q = weights @ repeat_kv(v)
    return q


def merged_heads(q, k, v, mask, bias):
    """Products of rank 3 and 5, by einsum, and a logsumexp."""
    keys, values = repeat_kv(k).flatten(0, 1), repeat_kv(v).flatten(0, 1)
    scores = torch.bmm(q.flatten(0, 1), keys.transpose(1, 2)).view(B, HQ, 1, S) + bias
    scores = scores.masked_fill(~mask, -torch.inf).view(B * HQ, 1, S)
    first = torch.bmm(scores.softmax(-1), values).view(B, HQ, 1, D)
    grouped = torch.einsum("bgrqd,bgkd->bgrqk", first.unflatten(1, (HKV, -1)), k) * 0.3
    second = torch.einsum("bgrqk,bgkd->bgrqd", grouped.softmax(-1), v).flatten(1, 2)
    third = second @ repeat_kv(k).transpose(-1, -2)
    return third.softmax(-1) @ repeat_kv(v), third.logsumexp(-1)


BLOCKS = create_block_mask(lambda b, h, i, j: (j % 3 != 1) | (i == j), None, None, 1, S, "cpu", BLOCK_SIZE=(1, 4))


def flex(q, k, v):
    for _ in range(2):
        q = flex_attention(q, k, v, block_mask=BLOCKS, enable_gqa=True)
    return flex_attention(q, k, v, lambda s, b, h, i, j: 5 * torch.tanh(s / 5), enable_gqa=True)


def shared_prefix(q, k, v, prefix, mask, rows):
    both = torch.cat((mask, mask), dim=-1)
    for layer in range(2):
        keys = torch.cat((prefix.expand(B, -1, -1, -1) if layer else prefix[rows], k), dim=2)
        values = torch.cat((prefix.expand(B, -1, -1, -1) if layer else prefix[rows], v), dim=2)
        q = sdpa(q, keys, values, both, enable_gqa=True)
    return q


def dequantised(q, narrow, scale, mask):
    for _ in range(2):
        q = sdpa(q, narrow.float() * scale, narrow.float() * scale, mask, enable_gqa=True)
    return q


def latents(q, latent, rope, weight, mask):
    for layer in range(2):
        own, values = F.linear(latent, weight).view(B, S, HQ, 24).transpose(1, 2).split((16, D), dim=-1)
        if layer:
            keys = torch.cat((own, rope.expand(-1, HQ, -1, -1)), dim=-1)
        else:
            keys = own.new_empty(B, HQ, S, 16 + D)
            keys[..., :16] = own
            keys[..., 16:] = rope
        q = sdpa(torch.cat((q, q, q), dim=-1), keys, values, mask)
    return q


def sliding_windows(q, k, v, new, mask):
    for x in (k, v):
        moved = x.roll(-1, dims=-2)
        moved[:, :, torch.tensor([-1])] = new
        x.copy_(moved)
    return sdpa(q, k, v, mask, enable_gqa=True)


def not_ours(q, k, v, mask, weight):
    """Attention inside a higher-order operator and by another op, beside a call of SDPA."""
    x = torch.utils.checkpoint.checkpoint(lambda x: (x @ x.mT).softmax(-1) @ x, q, use_reentrant=False)
    y = torch.cat((torch.tanh(q @ repeat_kv(k).mT), q.sum(-1, keepdim=True)), dim=-1)
    z = (y.exp() / y.exp().sum(-1, keepdim=True))[..., :-1] @ repeat_kv(v)
    return sdpa(x + z, k, v, mask, enable_gqa=True)


PROGRAMS = [
    static_cache,
    written_out,
    merged_heads,
    flex,
    shared_prefix,
    dequantised,
    latents,
    sliding_windows,
    not_ours,
]
# Functions whose errors are caught where a pass runs a program's code on meta tensors, to learn what it writes.
ON_META = {"_written_in_trial.<locals>.called", "_written", "_written_by_schema", "_overloads"}


def of(program: Callable[..., Any], **options: Any) -> tuple[GraphModule, Callable[[GraphModule], Any]]:
    given = tensors()
    names = inspect.signature(program).parameters
    if program is latents:
        given["q"] = torch.randn(B, HQ, 1, D)
    return captured(program, *(given[name] for name in names), **options)


def passed(program: Callable[..., Any], gm: GraphModule) -> Any:
    """Inductor, which fuses attention that is written out, is asked for nothing but caches of sliding windows."""
    return rewrite(gm, fuses=program is sliding_windows)


def changes(report: Any) -> int:
    """How many calls and caches were rewritten."""
    return sum(isinstance(x, Rewritten) for x in report.findings) + int((report.note or "0").split()[0])


def errors_in(report: Any) -> list[Declined]:
    return [x for x in report.findings if isinstance(x, Declined) and x.decline.reason is Reason.INTERNAL]


def check_errors(program: Callable[..., Any], first: int, step: int) -> None:
    """Raise an error from one function after the other, as it is first entered and as it is last left."""
    gm, run = of(program)
    want, usual = run(gm), changes(passed(program, copy_of(gm)))
    points = reached(lambda: passed(program, copy_of(gm)))
    of_a_call = []
    assert usual
    assert len(points) > 100
    for (code, event), times in [*points.items()][first::step]:
        here, example = copy_of(gm), f"{event} of {code.co_qualname}"
        before = state_of(here)
        last = event == "return" and not code.co_flags & inspect.CO_GENERATOR  # those end when they are collected
        report = with_fault(code, event, times if last else 1, functools.partial(passed, program, here))
        here.graph.lint()
        if not changes(report):
            assert state_of(here) == before, example
        torch.testing.assert_close(run(here), want, msg=example)
        found = errors_in(report)
        if code.co_qualname in ON_META and not found:
            continue
        assert f"Fault: at the {example}" in found[0].decline.detail
        if found[0].location.file:
            of_a_call.append(example)
            assert changes(report) >= usual - 1, example
    assert len(of_a_call) > len(points) // step // 2


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda x: x.__name__)
def test_an_error_anywhere(program: Callable[..., Any]) -> None:
    check_errors(program, 0, 1)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda x: x.__name__)
def test_an_error_here_and_there(program: Callable[..., Any]) -> None:
    """From a twentieth of the functions, others for each program."""
    check_errors(program, PROGRAMS.index(program), 20)


def test_an_interrupt_passes_and_leaves_the_graph() -> None:
    gm, _ = of(static_cache)
    code = next(code for code, _ in reached(lambda: rewrite(copy_of(gm))) if code.co_name == "restore_query")
    here = copy_of(gm)
    before = state_of(here)
    with pytest.raises(KeyboardInterrupt):
        with_fault(code, "return", 2, lambda: rewrite(here), KeyboardInterrupt)
    assert state_of(here) == before


def test_too_many_errors_leave_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs another run of the passes. An error that every call meets ends at a limit."""
    gm, _ = of(static_cache)
    before = state_of(gm)
    monkeypatch.setattr(rewriting, "MOST_FAILED", 1)
    monkeypatch.setattr(apply_match, "replace_call", lambda *_: 1 / 0)
    report = rewrite(gm)
    assert state_of(gm) == before
    assert [x.decline.reason for x in errors_in(report)] == [Reason.INTERNAL] * 2
    assert "ZeroDivisionError: division by zero" in errors_in(report)[0].decline.detail


def two_calls(q, k, v, mask):
    return sdpa(sdpa(q, q, q), k, v, mask, enable_gqa=True)


def test_an_error_in_the_finding_of_a_decline_leaves_the_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, run = of(two_calls)
    want = run(gm)
    monkeypatch.setattr(rewriting, "declined", lambda *_: 1 / 0)
    report = rewrite(gm)
    assert [type(x) for x in report.findings] == [Declined, Rewritten]
    assert "ZeroDivisionError" in errors_in(report)[0].decline.detail
    torch.testing.assert_close(run(gm), want)


def test_the_report_asks_for_an_issue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match_call, "check_call", lambda *_: [][0])
    given = tensors()
    report = tatten.explain(sdpa, *(given[x] for x in ("q", "q", "q")))
    assert "left as it is [internal]" in str(report)
    assert re.search(r"why +IndexError: list index out of range", str(report))
    assert "please open an issue" in str(report)


def test_an_error_in_the_report_is_no_users() -> None:
    """`publish` meets an error: the program is compiled and right, and the log has a line."""
    given = [tensors()[x] for x in ("q", "k", "v", "mask")]

    def attend(q, k, v, mask):
        return sdpa(q, k, v, mask, enable_gqa=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporting, "count", lambda name: {}[name])
        torch._dynamo.reset()
        with tatten.recording() as report:
            out = torch.compile(attend, backend="tatten", options={"inner": "eager"})(*given)
    torch.testing.assert_close(out, attend(*given))
    assert len(report.rewritten) == 1


def test_tests_fail_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture of all other tests."""
    gm, _ = of(static_cache)
    monkeypatch.setattr(internal, "RAISES", True)
    monkeypatch.setattr(apply_match, "replace_call", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rewrite(gm)
