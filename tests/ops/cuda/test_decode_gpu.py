"""The kernels on a GPU: in CUDA graphs, on several streams, bit by bit, and on what is too large for an interpreter."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from attention_cases import Case, assert_state
from torch import Tensor
from torch._dynamo.utils import counters

from tatten.ops.cuda.flash_attn import PACKAGES
from tatten.ops.cuda.gpu_rates import GpuRates
from tatten.ops.cuda.providers import unsupported_reason
from tatten.ops.cuda.workload import Workload
from tatten.ops.kernel_signatures import decode_call
from tatten.ops.reference import bifurcated_attention_reference, decode_attention_reference
from tatten.ops.states import merge

pytestmark = pytest.mark.gpu

State = tuple[Tensor, Tensor]
Job = Callable[[], State]

decode = partial(torch.ops.tatten.decode_attention, provider="triton")
REPLAYS = 100_000 if os.environ.get("TATTEN_STRESS") else 2000
JOBS = ["uniform", "ragged", "masked", "shared"]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _tma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read small keys and values as large ones are read."""
    monkeypatch.setattr("tatten.ops.cuda.decode.gpu_rates", lambda device: GpuRates(tma_least_bytes=0))


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def cache(batch: int, kv_len: int, q_heads: int = 32, kv_heads: int = 8, dim: int = 128) -> tuple[Tensor, ...]:
    return randn(batch, q_heads, 1, dim), randn(batch, kv_heads, kv_len, dim), randn(batch, kv_heads, kv_len, dim)


def make_job(kind: str) -> tuple[Job, Job]:
    """A call of an op, and the same in float64."""
    match kind:
        case "uniform":
            given = cache(1, 20001)
            return lambda: decode(*given), lambda: decode_attention_reference(*given)
        case "ragged":
            given = (*cache(5, 9001), None, torch.tensor([1, 9001, 0, 64, 5000], device="cuda"))
            return lambda: decode(*given), lambda: decode_attention_reference(*given)
        case "masked":
            mask = torch.rand(4, 1, 1, 5000, device="cuda") > 0.5
            mask[..., :900] = True
            mask[..., 1000:3000] = False
            given = (*cache(4, 5000), mask)
            return lambda: decode(*given), lambda: decode_attention_reference(*given)
        case "shared":  # 128 packed queries to the prefix
            query, *suffix = cache(32, 300)
            _, *prefix = cache(1, 3001)
            keys, values = zip(prefix, suffix, strict=True)
            none = [None, None]
            op = torch.ops.tatten.bifurcated_attention
            return (
                lambda: op(query, list(keys), list(values), none, none),
                lambda: bifurcated_attention_reference(query, keys, values),
            )
    raise ValueError(kind)


def assert_near(got: State, want: State) -> None:
    """To float64: weights are rounded to the dtype, and so is the result."""
    eps = torch.finfo(got[0].dtype).eps
    assert got[0].isfinite().all()
    error, largest = (got[0].double() - want[0]).abs().max().item(), want[0].abs().max().item()
    assert error <= 2 * eps * largest, f"out is off by {error:.3e} of {largest:.3e}"
    torch.testing.assert_close(got[1].double(), want[1], atol=1e-4, rtol=1e-5)


def assert_equal(got: State, want: State) -> None:
    """To the bit."""
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def copy(state: State) -> State:
    return state[0].clone(), state[1].clone()


def capture(job: Job) -> tuple[torch.cuda.CUDAGraph, State]:
    """A graph of the job, and the state that each replay overwrites."""
    job()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = job()
    return graph, state


def each_sequence(query: Tensor, key: Tensor, value: Tensor, lens: list[int]) -> State:
    """Float64, of no more keys at once than a sequence has."""
    states = [
        decode_attention_reference(query[b : b + 1], key[b : b + 1, :, :n], value[b : b + 1, :, :n])
        for b, n in enumerate(lens)
    ]
    outs, lses = zip(*states, strict=True)
    return torch.cat(outs), torch.cat(lses)


def test_captured_at_length_1_and_replayed_up_to_131072() -> None:
    """Keys and values beyond the lengths are NaN at each replay."""
    query, key, value = cache(3, 131072)
    whole_key, whole_value = key.clone(), value.clone()
    lens = torch.ones(3, dtype=torch.int64, device="cuda")
    graph, state = capture(lambda: decode(query, key, value, None, lens))
    for new in ((1, 1, 1), (131072, 1, 0), (70000, 131072, 131071), (64, 65, 127), (0, 0, 0), (3, 100000, 8192)):
        lens.copy_(torch.tensor(new))
        for b, n in enumerate(new):
            for x, whole in ((key, whole_key), (value, whole_value)):
                x[b, :, :n] = whole[b, :, :n]
                x[b, :, n:] = float("nan")
        graph.replay()
        assert_near(state, each_sequence(query, key, value, list(new)))
        again = copy(state)
        graph.replay()
        assert_equal(state, again)


def test_replays_with_random_lengths() -> None:
    query, key, value = cache(4, 8192)
    choose = random.Random(0)
    drawn = [[int(2 ** choose.uniform(0, 13)) - choose.randint(0, 1) for _ in range(4)] for _ in range(REPLAYS)]
    table = torch.tensor(drawn, device="cuda")
    lens = torch.ones(4, dtype=torch.int64, device="cuda")
    graph, state = capture(lambda: decode(query, key, value, None, lens))
    for i, new in enumerate(drawn):
        lens.copy_(table[i])
        graph.replay()
        if i % (REPLAYS // 50) == 0:
            assert_near(state, each_sequence(query, key, value, new))


@pytest.mark.parametrize("kind", JOBS)
def test_the_same_to_the_bit(kind: str) -> None:
    """The same buffers again and again, in eager mode and in a graph."""
    job, reference = make_job(kind)
    want = job()
    assert_near(want, reference())
    for _ in range(50):
        assert_equal(job(), want)
    graph, state = capture(job)
    for _ in range(50):
        state[0].fill_(float("nan"))
        graph.replay()
        assert_equal(state, want)


@pytest.mark.parametrize(
    "kinds", [("uniform", "ragged"), ("masked", "shared"), *((kind, kind) for kind in JOBS)], ids="-".join
)
def test_graphs_on_two_streams_at_once(kinds: tuple[str, str]) -> None:
    jobs = [make_job(kind) for kind in kinds]
    graphs = [capture(job) for job, _ in jobs]
    wanted = []
    for (graph, state), (_, reference) in zip(graphs, jobs, strict=True):
        graph.replay()
        assert_near(state, reference())
        wanted.append(copy(state))
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for _, (out, _) in graphs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for _ in range(5):
            for stream, (graph, _) in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for (_, state), want in zip(graphs, wanted, strict=True):
            assert_equal(state, want)


def test_eager_on_two_streams_at_once() -> None:
    jobs = [make_job(kind)[0] for kind in JOBS]
    wanted = [job() for job in jobs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(20):
        got = []
        for i in range(len(jobs)):
            for offset, stream in enumerate(streams):
                which = (i + offset) % len(jobs)
                with torch.cuda.stream(stream):
                    got.append((jobs[which](), wanted[which]))
        torch.cuda.synchronize()
        for state, want in got:
            assert_equal(state, want)


def test_kernels_that_overlap_wait_for_each_other() -> None:
    """Each call reads what the one before wrote, in memory that was just given back."""
    jobs = [make_job(kind)[0] for kind in JOBS]
    query, key, value = cache(2, 3000)
    lens = torch.tensor([3000, 70], device="cuda")

    def chain(synchronize: bool) -> Tensor:
        x = query
        for i in range(60):
            x = decode(x, key, value, None, lens if i % 2 else None)[0] + x
            jobs[i % len(jobs)]()
            if synchronize:
                torch.cuda.synchronize()
        return x

    want = chain(True)
    assert want.isfinite().all()
    for _ in range(5):
        assert torch.equal(chain(False), want)


@pytest.mark.parametrize("given", ["nothing", "lens", "mask"])
def test_more_than_2_to_the_31_elements(given: str) -> None:
    n = (1 << 21) + 3
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB")
    query, key, value = cache(1, n)
    assert key.numel() > 1 << 31
    mask = lens = None
    if given == "mask":
        mask = torch.ones(1, 1, 1, n, dtype=torch.bool, device="cuda")
        mask[..., 1000 : 1 << 20] = False
        for x in (key, value):
            x[:, :, 1000 : 1 << 20] = float("nan")
    if given == "lens":
        lens = torch.tensor([n - 1], device="cuda")
    got = decode(query, key, value, mask, lens)
    states = []
    for start in range(0, n if lens is None else n - 1, 1 << 17):
        part = slice(start, min(start + (1 << 17), n if lens is None else n - 1))
        masked = None if mask is None else mask[..., part]
        states.append(decode_attention_reference(query, key[:, :, part], value[:, :, part], masked))
    outs, lses = zip(*states, strict=True)
    assert_near(got, merge(torch.stack(outs), torch.stack(lses)))


WIDE = {"batch": 2, "q_heads": 8, "kv_heads": 2, "kv_len": 700}


@pytest.mark.parametrize(
    "case",
    [
        *(Case(**WIDE, dtype=BF16, head_dim=dim) for dim in (64, 128, 256, 512)),
        *(Case(**WIDE, dtype=BF16, head_dim=dim, lens=True) for dim in (80, 192)),
        *(Case(**WIDE, dtype=BF16, head_dim=dim, mask="holes") for dim in (96, 128, 512)),
        Case(**WIDE, dtype=BF16, head_dim=128, window=100),
        Case(**WIDE, dtype=BF16, head_dim=128, mask="alibi", softcap=20.0, sinks=True, window=300, lens=True, q_len=3),
        Case(**WIDE, dtype=BF16, head_dim=192, value_dim=128, mask="causal", q_len=16),
        Case(batch=1, q_heads=64, kv_heads=1, kv_len=3000, dtype=BF16, head_dim=128, mask="additive", q_len=2),
        Case(**WIDE, dtype=torch.float16, head_dim=128, lens=True, q_len=5),
        Case(**WIDE, dtype=torch.float16, head_dim=64, mask="empty_rows"),
        Case(**WIDE, dtype=torch.float32, head_dim=64),
        Case(**WIDE, dtype=torch.float32, head_dim=128, mask="holes", lens=True),
        Case(**WIDE, dtype=torch.float32, head_dim=256),
        Case(**WIDE, dtype=torch.float32, head_dim=256, mask="per_head"),
        Case(batch=3, q_heads=7, kv_heads=7, kv_len=100, dtype=torch.float32, head_dim=23, value_dim=9),
    ],
    ids=str,
)
def test_equals_float64(case: Case) -> None:
    """Keys that no query attends to are NaN."""
    inputs = case.inputs("cuda")
    out, lse = decode(**inputs)
    assert_state(out, lse, inputs)
    assert_equal(decode(**inputs), (out, lse))


@pytest.mark.parametrize("per", ["keys", "sequence", "head", "query"])
def test_holes_may_hold_nan(per: str) -> None:
    shape = {"keys": (900,), "sequence": (2, 1, 1, 900), "head": (2, 8, 1, 900), "query": (2, 1, 3, 900)}[per]
    mask = torch.rand(shape, device="cuda") > 0.7
    inputs = Case(**WIDE, dtype=BF16, head_dim=128, q_len=3).inputs("cuda", poison=False)
    inputs |= {"key": randn(2, 2, 900, 128), "value": randn(2, 2, 900, 128), "attn_mask": mask}
    used = mask.expand(2, 8, 3, 900).flatten(1, 2).any(dim=1)[:, None, :, None]
    for name in ("key", "value"):
        inputs[name] = inputs[name].masked_fill(~used, float("nan"))
    assert_state(*decode(**inputs), inputs)


@pytest.mark.parametrize("kind", ["causal", "holes", "2d", "additive", "nearly_full", "nearly_zero"])
def test_blocks_found_once_for_all_layers(kind: str) -> None:
    inputs = Case(**WIDE, dtype=BF16, head_dim=128, mask=kind, q_len=2).inputs("cuda")
    blocks = torch.ops.tatten.block_mask(inputs["attn_mask"])
    assert_equal(decode(**inputs, block_mask=blocks), decode(**inputs))


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("start", [0, 65, 640])
@pytest.mark.parametrize("batch", [1, 3, 8, 16, 40])
def test_a_run_of_full_blocks(batch: int, start: int, additive: bool) -> None:
    """Shared keys, 4 to 160 packed queries, a mask for each sequence: all attend to a run, then each as it likes."""
    from tatten.ops.cuda import combine, decode

    rng = torch.Generator("cuda").manual_seed(batch)
    mask = torch.rand(batch, 1, 1, 1999, device="cuda", generator=rng) > 0.5
    mask[..., :start] = mask[..., 1500:] = False
    mask[..., start:1200] = True
    query, (key, value) = randn(batch, 8, 1, 128), (randn(1, 2, 1999, 128) for _ in range(2))
    unused = ~mask.any(dim=0, keepdim=True).mT
    key, value = (x.masked_fill(unused, float("nan")) for x in (key, value))
    bias = torch.where(mask, torch.where(torch.rand(mask.shape, device="cuda") > 0.9, 0.7, 0.0), float("-inf"))
    bias[..., start:1100] = 0
    given = bias.to(BF16) if additive else mask
    call = decode_call(query, key, value, given, scale=0.1)
    segment = decode.plan_segment(call, call.segments[0])
    got = combine.plan_combine(query, 128, segment.tile_space)(segment(call, call.segments[0]))[:2]
    whole = (x.expand(batch, -1, -1, -1) for x in (key, value))
    assert_near(got, decode_attention_reference(query, *whole, given, scale=0.1))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_every_float8_is_upcast_exactly(dtype: torch.dtype) -> None:
    import triton
    import triton.language as tl

    from tatten.ops.cuda.kernels.online_softmax import upcast

    @triton.jit
    def copy(narrow, wide, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(wide + at, upcast(tl.load(narrow + at), wide.dtype.element_ty))

    codes = torch.randperm(1024, device="cuda").to(torch.uint8).view(torch.float8_e4m3fn)  # each four times
    got = torch.empty(1024, dtype=dtype, device="cuda")
    copy[(1,)](codes, got, SIZE=1024)
    want = codes.to(dtype)
    assert want.isnan().sum() == 8
    assert torch.equal(got.isnan(), want.isnan())
    number = ~want.isnan()
    assert torch.equal(got[number].view(torch.uint8), want[number].view(torch.uint8))  # signs of zeros too


@pytest.mark.parametrize("provider", ["cudnn", "flash", "fa2", "fa3", "fa4"])
def test_named_providers(provider: str) -> None:
    reason = unsupported_reason(provider, Workload.of(*cache(2, 900)))
    if provider in PACKAGES and reason is not None:
        pytest.skip(reason)
    for q_heads, kv_heads, q_len in ((32, 8, 1), (8, 8, 1), (8, 2, 3)):
        query, key, value = randn(2, q_heads, q_len, 128), randn(2, kv_heads, 900, 128), randn(2, kv_heads, 900, 128)
        got = decode(query, key, value, provider=provider)
        assert got[0].is_contiguous()
        assert_near(got, decode_attention_reference(query, key, value))
    mask = torch.ones(900, dtype=torch.bool, device="cuda")
    with pytest.raises(NotImplementedError, match=f"'{provider}' can't compute this"):
        decode(query, key, value, mask, provider=provider)
    with pytest.raises(NotImplementedError, match=r"not torch\.float32"):
        decode(query.float(), key.float(), value.float(), provider=provider)


def test_reduce_overhead_keeps_its_graphs() -> None:
    """Two layers with one static cache and a mask that grows, its tail NaN until it is filled."""

    def step(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        for _ in range(2):
            query = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return query

    query, whole_key, whole_value = cache(2, 1000)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(step, backend="tatten", mode="reduce-overhead")
    with torch.no_grad():
        for n in (1, 64, 65, 500, 999, 1000):
            mask = (torch.arange(1000, device="cuda") < n).expand(2, 1, 1, 1000)
            key, value = (x.masked_fill(~mask.mT, float("nan")) for x in (whole_key, whole_value))
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(query, key, value, mask)
            want = query
            for _ in range(2):
                want = decode_attention_reference(want.to(BF16), key, value, mask)[0]
            torch.testing.assert_close(got.double(), want, atol=4e-3, rtol=2e-2)
    assert counters["tatten"]["rewritten"] == 2
    assert counters["inductor"]["cudagraph_skips"] == 0
    torch._dynamo.reset()
