"""The cost of a rewrite: which sizes are weighed, and what a mask and dynamic sizes change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, run_rewritten
from torch import Tensor
from torch.fx import Interpreter

import tatten
from tatten.passes import Declined, Rewritten, cost, rewrite
from tatten.passes.reasons import Reason

pytestmark = pytest.mark.drawn(5)

RATES = dict(cost.RATES)  # before the fixture of all tests makes calls free
sdpa = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def own_rates(extra_kernels_are_free: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "RATES", RATES)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def inputs(batch: int = 1, heads: int = 8, kv_heads: int = 2, length: int = 20, dim: int = 64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (batch, heads, 1, dim), (batch, kv_heads, length, dim), (batch, kv_heads, length, dim)
    return [torch.randn(shape) for shape in shapes]


def repeated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention as transformers writes it: heads are repeated in memory."""
    batch, heads, length, dim = k.shape
    wide, flat = (batch, heads, 4, length, dim), (batch, 4 * heads, length, dim)
    return sdpa(q, k[:, :, None].expand(wide).reshape(flat), v[:, :, None].expand(wide).reshape(flat), mask)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return sdpa(q, k, v, mask)


def all_keys(batch: int, length: int) -> Tensor:
    return torch.ones(batch, 1, 1, length, dtype=torch.bool)


def with_lengths(mark: Callable[[Tensor, int], None], args: list[Tensor]) -> list[Tensor]:
    for x in args[1:]:
        mark(x, x.dim() - 1 if x.dtype == torch.bool else 2)
    return args


def test_a_short_cache_of_a_fixed_length_is_left_alone() -> None:
    (finding,) = rewrite(capture(repeated, *inputs(), dynamic=False)).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.SMALL
    assert "dynamic" not in finding.decline.detail
    (finding,) = rewrite(capture(repeated, *inputs(length=4096), dynamic=False)).findings
    assert isinstance(finding, Rewritten)
    assert "dynamic" not in finding.note


@pytest.mark.drawn(2)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("example", "counted"), [(20, 4096), (5000, 5000)])
@pytest.mark.parametrize("how", ["dynamic", "marked"])
def test_a_dynamic_length_is_weighed_for_a_typical_one(how: str, example: int, counted: int, masked: bool) -> None:
    args = inputs(length=example) + [all_keys(1, example)] * masked
    if how == "marked":
        args, dynamic = with_lengths(torch._dynamo.mark_dynamic, args), None
    else:
        dynamic = True
    (finding,), _, out = run_rewritten(repeated, *args, dynamic=dynamic)
    assert isinstance(finding, Rewritten), finding
    assert f"weighed for {counted} keys, a dynamic number" in finding.note
    assert finding.cost.pays
    torch.testing.assert_close(out, repeated(*args))


def test_an_unbacked_length_is_weighed_for_a_typical_one() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
        length = n.item()
        torch._check(length >= 2)
        torch._check(length <= k.shape[2])
        return repeated(q, k[:, :, :length], v[:, :, :length])

    args = [*inputs(length=40), torch.tensor(20)]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        (finding,), _, out = run_rewritten(fn, *args)
    assert isinstance(finding, Rewritten), finding
    assert "weighed for 4096 keys, a dynamic number" in finding.note
    torch.testing.assert_close(out, fn(*args))


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_cache_that_grows_after_a_short_first_call(inner: str) -> None:
    """The second length makes it dynamic: that graph serves a long cache, too."""
    torch._dynamo.reset()
    step = torch.compile(repeated, backend="tatten", options={"inner": inner})
    with torch.no_grad(), tatten.recording() as report:
        for length in (20, 21, 3000):
            args = inputs(length=length)
            torch.testing.assert_close(step(*args), repeated(*args))
    first, second = (finding for graph in report.graphs for finding in graph.findings)
    assert isinstance(first, Declined)
    assert first.decline.reason is Reason.SMALL
    assert isinstance(second, Rewritten)
    assert "weighed for 4096 keys, a dynamic number" in str(report)


def test_a_dynamic_batch_is_weighed_for_a_few_sequences() -> None:
    def found(batch: int, length: int) -> Rewritten | Declined:
        args = inputs(batch=batch, length=length)
        for x in args:
            torch._dynamo.mark_dynamic(x, 0)
        (finding,) = rewrite(capture(repeated, *args)).findings
        return finding

    small = found(2, 16)  # for ever, whatever the batch is within reason
    assert isinstance(small, Declined)
    assert small.decline.reason is Reason.SMALL
    assert "weighed for 4 sequences, a dynamic number" in small.decline.detail
    assert isinstance(found(2, 1024), Rewritten)
    many = found(256, 16)
    assert isinstance(many, Rewritten)
    assert "weighed for 256 sequences, a dynamic number" in many.note


def test_sizes_that_are_all_dynamic() -> None:
    (finding,), _, _ = run_rewritten(repeated, *inputs(batch=2), dynamic=True)
    assert isinstance(finding, Rewritten)
    assert "weighed for 4096 keys of 4 sequences, a dynamic number" in finding.note


@pytest.mark.parametrize(("prefix", "suffix"), [(20, 5), (5000, 5)])
def test_a_dynamic_prefix_is_weighed_for_a_typical_one(prefix: int, suffix: int) -> None:
    def shared(q: Tensor, pk: Tensor, pv: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = (torch.cat((p.expand(8, -1, -1, -1), x), dim=2) for p, x in ((pk, k), (pv, v)))
        return sdpa(q, *whole, enable_gqa=True)

    q, k, v = inputs(batch=8, length=suffix)
    _, pk, pv = inputs(length=prefix)
    fixed, dynamic = (shared, q, pk, pv, k, v), {"dynamic": False}
    (finding,) = rewrite(capture(*fixed, **dynamic)).findings
    assert isinstance(finding, Rewritten if prefix > 1000 else Declined)
    with_lengths(torch._dynamo.mark_dynamic, [q, pk, pv])
    (finding,), _, out = run_rewritten(*fixed)
    assert isinstance(finding, Rewritten)
    assert finding.op == "tatten.bifurcated_attention.default"
    assert f"weighed for {max(prefix, 4096)} keys, a dynamic number" in finding.note
    torch.testing.assert_close(out, shared(*fixed[1:]))


@pytest.mark.parametrize(
    ("batch", "length", "taken"), [(1, 33, False), (1, 512, False), (8, 33, False), (8, 1024, True)]
)
def test_a_mask_over_few_keys_is_left_alone(batch: int, length: int, taken: bool) -> None:
    """A mask can leave out keys, which the op would not read; it must not cost much where it leaves out none."""
    args = [*inputs(batch=batch, kv_heads=8, length=length, dim=128), all_keys(batch, length)]
    (finding,), _, out = run_rewritten(plain, *args, dynamic=False)
    if taken:
        assert isinstance(finding, Rewritten)
        assert "the mask decides at run time how much is read; if that is all, about 0 us saved" in finding.note
    else:
        assert isinstance(finding, Declined)
        assert finding.decline.reason is Reason.SMALL
        assert finding.decline.detail.startswith("with all keys in use about 0 us saved")
    torch.testing.assert_close(out, plain(*args))


@pytest.mark.parametrize(("length", "own_masks", "taken"), [(64, True, False), (64, False, True), (256, True, True)])
def test_sequences_of_unequal_lengths_are_calls_of_their_own(length: int, own_masks: bool, taken: bool) -> None:
    """With repeated heads, short caches pay only where one mask serves all sequences."""
    args = [*inputs(batch=8, length=length), all_keys(8 if own_masks else 1, length)]
    (finding,) = rewrite(capture(repeated, *args, dynamic=False)).findings
    assert isinstance(finding, Rewritten if taken else Declined)
    if not taken:
        assert finding.decline.detail.endswith("and 210 for sequences of unequal lengths")


def test_threads_share_the_work_and_not_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    args = [*inputs(batch=8, kv_heads=8, length=1024, dim=128), all_keys(8, 1024)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    (finding,) = rewrite(capture(plain, *args)).findings
    assert finding.decline.reason is Reason.SMALL


class OnCuda(Interpreter):
    """Runs a graph on fake tensors of a GPU and leaves their like with its nodes."""

    def run_node(self, n: torch.fx.Node) -> object:
        # PyTorch for CPUs can't choose SDPA's kernel for a GPU.
        result = self.fetch_args_kwargs_from_env(n)[0][0] if n.target is sdpa else super().run_node(n)
        if isinstance(result, Tensor):
            n.meta["example_value"] = result
        return result


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_provider_of_dynamic_sizes_is_that_of_the_example(dynamic: bool) -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))

    args = [x.bfloat16() for x in inputs(batch=2, length=9000)]
    if dynamic:
        with_lengths(torch._dynamo.mark_dynamic, args)
    gm = capture(grouped, *args)
    values = [x.meta["example_value"] for x in gm.graph.find_nodes(op="placeholder")]
    mode = next(x for x in values if isinstance(x, Tensor)).fake_mode
    with mode:
        on_cuda = [torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x for x in values]
        OnCuda(gm).run(*on_cuda)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten)
    assert finding.provider
    assert ("each call chooses by its own" in finding.provider) is dynamic
