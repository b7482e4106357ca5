"""Caches of sliding windows that are rolled: they are moved in place, and hold the same bits."""

from __future__ import annotations

import expecttest
import pytest
import torch
from graphs import capture, listing
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from transformers import MistralConfig, MistralForCausalLM, StaticCache

import tatten
from tatten.integrations.transformers import cache_kwargs
from tatten.passes import cost, sliding
from tatten.passes.mutation import movers
from tatten.passes.sliding import apply_slide, find_slides

B, H, S, D = 2, 3, 8, 4


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sliding.LEAST_BYTES, "cpu", 1)


def tensors(dtype=torch.float32, slots=S):
    torch.manual_seed(0)
    return torch.randn(B, H, slots, D, dtype=dtype), torch.randn(B, 1, H, D, dtype=dtype).transpose(1, 2)


def roll(cache, new, index=(-1,), shift=-1, dims=-2):
    moved = cache.roll(shift, dims=dims)
    moved[:, :, torch.tensor([*index], device=cache.device)] = new
    return moved


def transformers_own(cache, new):
    cache.copy_(roll(cache, new))
    return cache.sum()


def what_it_returns(cache, new):
    return cache.copy_(roll(cache, new)) + 1


def a_positive_dim(cache, new):
    cache.copy_(roll(cache, new, shift=(-1,), dims=(2,)))
    return cache + 1


def by_keyword(cache, new):
    moved = torch.roll(input=cache, shifts=-1, dims=-2)
    moved[:, :, torch.tensor(data=[-1])] = new
    cache.copy_(moved)
    return cache + 1


def read_before(cache, new):
    """A read of the cache before it is written gets the old values."""
    moved = roll(cache, new)
    before = cache * 2
    cache.copy_(moved)
    return before + cache


def through_a_view(cache, new):
    view = cache[:, :, 2:5]
    cache.copy_(roll(cache, new))
    return view + 1


FORMS = [transformers_own, what_it_returns, a_positive_dim, by_keyword, read_before, through_a_view]


def run(fn, cache: Tensor, new: Tensor):
    """The number of caches that are moved in place, the graph, and what it returns and writes."""
    gm = capture(fn, cache.clone(), new)
    found = find_slides(gm.graph, movers(gm.graph))
    for slide in found:
        apply_slide(slide)
    gm.recompile()
    given = {"cache": cache.clone(), "new": new}
    out = gm(*(given[next(name for name in given if name in x.name)] for x in gm.graph.find_nodes(op="placeholder")))
    return len(found), gm, (out[0], given["cache"])


def expected(fn, cache: Tensor, new: Tensor):
    cache = cache.clone()
    return fn(cache, new), cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", FORMS)
def test_forms(fn, dtype: torch.dtype) -> None:
    args = tensors(dtype)
    want = expected(fn, *args)
    moved, gm, got = run(fn, *args)
    assert moved == 1
    assert "roll" not in listing(gm)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def twice(cache, new):
    """The second time through what `copy_` returned."""
    moved = cache.copy_(roll(cache, new))
    moved.copy_(roll(moved, new * 2))
    return moved + 1


def test_twice() -> None:
    args = tensors()
    want = expected(twice, *args)
    moved, _, got = run(twice, *args)
    assert moved == 2
    torch.testing.assert_close(got, want, rtol=0, atol=0)


class TestGraph(expecttest.TestCase):
    def test_of_transformers(self) -> None:
        _, gm, _ = run(transformers_own, *tensors())
        self.assertExpectedInline(
            listing(gm),
            """\
slide__default = slide_.default(l_cache_, l_new_)
sum_1 = sum(l_cache_)
return (sum_1)""",
        )


def another_slot(cache, new):
    cache.copy_(roll(cache, new, index=(0,)))
    return cache + 1


def two_slots(cache, new):
    cache.copy_(roll(cache, new, index=(-1, 0)))
    return cache + 1


def the_other_way(cache, new):
    cache.copy_(roll(cache, new, shift=1))
    return cache + 1


def by_two(cache, new):
    cache.copy_(roll(cache, new, shift=-2))
    return cache + 1


def along_heads(cache, new):
    cache.copy_(roll(cache, new, dims=1))
    return cache + 1


def used_elsewhere(cache, new):
    moved = roll(cache, new)
    cache.copy_(moved)
    return cache + moved


def nothing_new(cache, new):
    cache.copy_(cache.roll(-1, dims=-2))
    return cache + new


def written_between(cache, new):
    moved = roll(cache, new)
    cache.zero_()
    cache.copy_(moved)
    return cache + 1


def new_written_since(cache, new):
    new = new + 1
    moved = roll(cache, new)
    new.zero_()
    cache.copy_(moved)
    return cache + 1


def new_is_in_the_cache(cache, new):
    cache.copy_(roll(cache, cache[:, :, 3:4]))
    return cache + new


def new_is_broadcast(cache, new):
    cache.copy_(roll(cache, new[:, :1]))
    return cache + 1


def into_another(cache, new):
    other = cache * 2
    other.copy_(roll(cache, new))
    return other + cache


def not_dense(cache, new):
    cache = cache.transpose(0, 1)
    cache.copy_(roll(cache, new.transpose(0, 1)))
    return cache + 1


def turned_in_place(cache, new):
    """It is not dense where it is rolled, but in the end, which fake tensors show."""
    cache = cache[:, :, :3].clone()
    cache.transpose_(1, 2)
    cache.copy_(roll(cache, new))
    got = cache + 1
    cache.transpose_(1, 2)
    return got


NOT_MOVED = [
    *(another_slot, two_slots, the_other_way, by_two, along_heads, used_elsewhere, nothing_new, written_between),
    *(new_written_since, new_is_in_the_cache, new_is_broadcast, into_another, not_dense, turned_in_place),
]


@pytest.mark.parametrize("fn", NOT_MOVED)
def test_what_is_left(fn) -> None:
    args = tensors()
    want = expected(fn, *args)
    moved, _, got = run(fn, *args)
    assert moved == 0
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def step_of_mistral(device: str):
    """A step of two layers whose windows of 16 slots are full, by backend: the logits and the cache afterwards."""
    config = MistralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = MistralForCausalLM(config).to(device).eval()
    tokens = torch.randint(64, (2, 20), device=device)

    def run(backend: str | None = None):
        cache = StaticCache(config, max_cache_len=64)
        model(tokens, **cache_kwargs(cache))
        torch._dynamo.reset()
        step = torch.compile(model, backend=backend, dynamic=False) if backend else model
        for token in range(3):
            logits = step(tokens[:, token : token + 1], **cache_kwargs(cache)).logits
        return logits, [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]

    return run


def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor takes most of the time, and has its own tests of the op."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, inputs, **_: aot_eager(gm, inputs))


@pytest.mark.drawn(2, "models")
@pytest.mark.parametrize(
    "device, code",
    [
        ("cpu", False),
        pytest.param("cpu", True, marks=pytest.mark.slow),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
    ],
)
def test_a_step_of_a_model(device: str, code: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not code:
        without_code(monkeypatch)
    run = step_of_mistral(device)
    with torch.no_grad():
        want = run()
        with tatten.recording() as report:
            got = run("tatten")
    assert "4 full caches of sliding windows moved in place" in str(report)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.drawn(2, "models")
def test_small_caches_stay_inductors_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(bytes_per_us=1.0, segment_us=0.0))
    without_code(monkeypatch)
    with torch.no_grad(), tatten.recording() as report:
        step_of_mistral("cpu")("tatten")
    assert report.rewritten
    assert "in place" not in str(report)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float64])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 3, 5, 7), (1, 8, 4096, 256), (8, 8, 4096, 256), (3, 5, 1000, 80), (64, 8, 128, 64)]
)
def test_the_op_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Many times over: what one thread writes, others have to have read."""
    b, h, _, d = shape
    cache = torch.randn(shape, device="cuda").to(dtype)
    want = cache.clone().view(torch.uint8)
    for _ in range(10):
        new = torch.randn(b, 1, h, d, device="cuda").to(dtype).transpose(1, 2)
        torch.ops.tatten.slide_(cache, new)
        want = torch.cat((want[:, :, 1:], new.contiguous().view(torch.uint8)), 2)
    assert torch.equal(cache.view(torch.uint8), want)


@pytest.mark.drawn(2, "dynamic shapes")
@pytest.mark.parametrize("fixed", [True, False])
def test_dynamic_shapes(fixed: bool) -> None:
    """A cache is moved where something else in the graph fixes its sizes, and left where they may change."""
    weight = torch.nn.Parameter(torch.randn(B, H, S, D), requires_grad=False)

    def fn(cache, new):
        cache.copy_(roll(cache, new))
        return cache * weight if fixed else cache * 2

    cache, new = tensors()
    want = expected(fn, cache, new)
    gm = capture(fn, cache.clone(), new, dynamic=True)
    guards = len(shape_env(gm).guards)
    assert len(find_slides(gm.graph, movers(gm.graph))) == fixed
    assert len(shape_env(gm).guards) == guards
    torch._dynamo.reset()
    with torch.no_grad(), tatten.recording() as report:
        out = torch.compile(fn, backend="tatten", dynamic=True)(cache, new)
    assert bool(report.graphs[0].note) == fixed
    assert torch.equal(out, want[0])
    assert torch.equal(cache, want[1])


def shape_env(gm):
    return gm.graph.find_nodes(op="placeholder")[-1].meta["example_value"].fake_mode.shape_env
