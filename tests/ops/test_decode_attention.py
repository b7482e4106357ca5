"""`tatten::decode_attention` in eager mode, on the CPU and, where there is one, on the GPU."""

from __future__ import annotations

import pytest
import torch
from attention_cases import NEG_INF, Case, assert_state, explicit, places_in_reach
from devices import DEVICES
from torch.library import opcheck

import tatten
from tatten.ops.cpu import flash, thresholds
from tatten.ops.reference import decode_attention_reference

MASKS = ["none", "causal", "broadcast", "2d", "keys", "holes", "per_head", "empty_rows", "all_false", "one_key"]
MASKS += ["additive", "additive_f32", "finfo_min", "alibi", "one_column"]
LOW = (torch.bfloat16, torch.float16)

SHAPES = [
    Case(q_heads=4, kv_heads=4),
    Case(q_heads=6, kv_heads=1, batch=1),
    Case(q_heads=71, kv_heads=1, head_dim=64, kv_len=130),
    Case(q_heads=14, kv_heads=2, q_len=5, kv_len=257, head_dim=80),
    Case(q_heads=8, kv_heads=2, q_len=16, kv_len=65, head_dim=96),
    Case(head_dim=256, kv_len=100),
    Case(head_dim=48, value_dim=32, kv_len=77),
    Case(head_dim=32, value_dim=64, q_heads=2),
    Case(head_dim=192, value_dim=128, q_heads=4, kv_heads=4, mask="causal", lens=True),
    Case(kv_len=1, batch=3),
    Case(kv_len=0),
    Case(kv_len=0, lens=True, mask="holes"),
    Case(scale=0.3, q_len=2),
    Case(scale=-1.0),
    Case(lens=True, batch=5, kv_len=70),
    Case(batch=1, q_heads=3, kv_heads=3, kv_len=9001, head_dim=64),
    Case(batch=1, q_heads=6, kv_heads=3, kv_len=9001, head_dim=64, q_len=2, mask="causal"),
    Case(batch=1, q_heads=1, kv_heads=1, kv_len=40001, mask="empty_rows"),
    Case(batch=3, q_heads=5, kv_heads=5, kv_len=5000, head_dim=128, mask="holes"),
    Case(batch=1, q_heads=1, kv_heads=1, kv_len=9001, head_dim=64, q_len=2, mask="one_column"),
    Case(batch=12, q_heads=2, kv_heads=2, kv_len=9001, head_dim=64, lens=True),
]

WINDOWS = (1, 5, 1000)
FLOAT8 = [
    *(
        Case(narrow=kind, mask=mask, dtype=dtype, kv_len=129, head_dim=64, q_len=n)
        for kind in ("plain", "scaled")
        for mask in ("none", "causal", "holes", "additive", "all_false")
        for dtype in (torch.float32, *LOW)
        for n in (1, 3)
    ),
    Case(narrow="scaled", dtype=torch.float64, mask="empty_rows", lens=True),
    Case(narrow="scaled", kv_len=0, sinks=True),
    Case(narrow="scaled", lens=True, window=5, softcap=3.0, sinks=True, q_len=2, dtype=torch.bfloat16),
    Case(narrow="scaled", scale=-0.2, q_heads=14, q_len=5, kv_len=257, head_dim=80, dtype=torch.float16),
    Case(narrow="plain", head_dim=48, value_dim=32, kv_len=77, sinks=True),
    Case(narrow="plain", int8=True, dtype=torch.bfloat16, head_dim=48, scale=1e-4),
    Case(narrow="scaled", int8=True, mask="causal", q_len=3, kv_len=129, head_dim=64, dtype=torch.float16),
    *(
        Case(narrow="per_key", int8=int8, dtype=dtype, **options)
        for int8, dtype in ((True, torch.bfloat16), (False, torch.float32))
        for options in (
            {"mask": "causal", "q_len": 3, "kv_len": 129},
            {"lens": True, "window": 5, "sinks": True, "batch": 3},
            {"mask": "additive_f32", "lens": True, "softcap": 3.0},
            {"batch": 3, "kv_heads": 4, "kv_len": 6000, "head_dim": 128},  # beyond what is upcast at once
        )
    ),
    Case(narrow="scaled", batch=1, q_heads=64, kv_heads=1, kv_len=1030, head_dim=128, dtype=torch.bfloat16),
]
EXTRAS = [
    *(
        Case(window=window, q_len=n, kv_len=67, lens=lens, mask=mask, batch=3)
        for window in WINDOWS
        for n in (1, 3)
        for lens in (False, True)
        for mask in ("none", "causal", "2d", "empty_rows", "additive_f32", "one_column")
    ),
    *(
        Case(window=window, softcap=softcap, sinks=sinks, q_len=n, lens=True, mask=mask, dtype=dtype)
        for window, softcap, sinks in ((5, None, True), (None, 5.0, False), (None, None, True), (5, 0.7, True))
        for n, mask in ((1, "none"), (1, "additive"), (3, "causal"), (3, "none"), (3, "per_head"))
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ),
    *(Case(mask=mask, softcap=2.0, sinks=True, q_len=3) for mask in ("all_false", "empty_rows", "holes", "alibi")),
    *(Case(kv_len=0, window=4, softcap=cap, sinks=sinks) for cap in (None, 2.0) for sinks in (False, True)),
    Case(window=4, kv_len=2, q_len=5),
    Case(softcap=3.0, dtype=torch.float16, q_heads=14, q_len=5, kv_len=257, head_dim=80),
    Case(softcap=3.0, head_dim=48, value_dim=32, scale=0.3),
    Case(softcap=3.0, head_dim=32, value_dim=64, scale=-1.0, sinks=True),
    Case(batch=1, q_heads=3, kv_heads=3, kv_len=9001, head_dim=64, window=5000, sinks=True),
    Case(batch=4, kv_len=5000, lens=True, window=700, q_len=2),
]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case",
    [
        *SHAPES,
        *(
            Case(mask=mask, q_len=n, q_heads=4, kv_len=67, lens=lens)
            for mask in MASKS
            for n in (1, 3)
            for lens in (0, 1)
        ),
        *(Case(mask=mask, dtype=dtype, kv_len=129, head_dim=64) for mask in ("none", *MASKS[9:13]) for dtype in LOW),
        *(Case(mask=mask, dtype=torch.float64) for mask in ("none", "causal", "holes", "additive", "additive_f32")),
        *EXTRAS,
        *FLOAT8,
    ],
    ids=str,
)
def test_equals_float64(case: Case, device: str) -> None:
    inputs = case.inputs(device, poison=case.mask != "finfo_min")
    out, lse = torch.ops.tatten.decode_attention(**inputs)
    assert_state(out, lse, inputs)
    assert out.is_contiguous()
    again, lse_again = torch.ops.tatten.decode_attention(**inputs)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


@pytest.mark.parametrize("case", EXTRAS, ids=str)
def test_the_reference_equals_attention_written_out(case: Case) -> None:
    inputs = case.inputs()
    got, want = decode_attention_reference(**inputs), explicit(**inputs, dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_reference_averages_beside_a_finite_floor(softcap: float | None) -> None:
    query, key, value = torch.randn(3, 1, 1, 7, 8).double().unbind()
    mask = torch.full((1, 1, 7, 7), torch.finfo(torch.float32).min)
    out, _ = decode_attention_reference(query, key, value, mask, softcap=softcap)
    torch.testing.assert_close(out, value.mean(dim=2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("device", DEVICES)
def test_float8_as_the_readme_makes_it(device: str) -> None:
    """Heads differ in size by far; e4m3 has three bits of mantissa."""
    inputs = Case(kv_len=200, q_len=2).inputs(device)
    want = torch.ops.tatten.decode_attention(**inputs)
    for name in ("key", "value"):
        x = inputs[name] * torch.tensor([1e-3, 50.0], device=device)[:, None, None]
        scale = x.float().abs().amax((0, 2, 3)).clamp(min=1e-12) / 448
        stored = (x / scale[:, None, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        back = torch.tensor([1e3, 1 / 50.0], device=device)
        inputs |= {name: stored, f"{name}_scale": scale * back}
    got = torch.ops.tatten.decode_attention(**inputs)
    assert not torch.equal(got[0], want[0])
    torch.testing.assert_close(got[0], want[0], atol=0.05, rtol=0)
    torch.testing.assert_close(got[1], want[1], atol=0.05, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lens", [False, True])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_is_a_mask(window: int, q_len: int, lens: bool, device: str) -> None:
    inputs = Case(window=window, q_len=q_len, lens=lens, kv_len=20).inputs(device, poison=False)
    got = torch.ops.tatten.decode_attention(**inputs)
    del inputs["window"]
    inputs["attn_mask"] = places_in_reach(inputs["kv_lens"], 2, q_len, 20, window, device)
    torch.testing.assert_close(got, torch.ops.tatten.decode_attention(**inputs))


@pytest.mark.parametrize("device", DEVICES)
def test_the_block_mask_of_a_mask_is_not_those_of_its_window(device: str) -> None:
    if device == "cuda":
        pytest.skip("it is found on the device")
    inputs = Case(window=5, q_len=2, mask="causal").inputs(device)
    want = torch.ops.tatten.decode_attention(**inputs)
    block_mask = torch.ops.tatten.block_mask(inputs["attn_mask"])
    assert torch.equal(torch.ops.tatten.decode_attention(**inputs, block_mask=block_mask)[0], want[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_sink_is_a_state_without_value(softcap: float | None, dtype: torch.dtype, device: str) -> None:
    inputs = Case(q_len=3, lens=True, mask="empty_rows", dtype=dtype, softcap=softcap).inputs(device)
    sinks = torch.tensor([NEG_INF, 3.0, -2.0, NEG_INF], device=device)  # float32 beside any dtype
    out, lse = torch.ops.tatten.decode_attention(**inputs)
    got_out, got_lse = torch.ops.tatten.decode_attention(**inputs, sinks=sinks)
    assert_state(got_out, got_lse, {**inputs, "sinks": sinks})
    sink = sinks.to(lse.dtype)[:, None].expand_as(lse)
    merged_out, merged_lse = tatten.merge_state(out, lse, torch.zeros_like(out), sink)
    budget = {}
    if device == "cuda" and dtype == torch.bfloat16:
        # There a sink joins before `out` is rounded, here after it, and what is small was rounded when it was large.
        budget = {"rtol": 0.0, "atol": 2 * torch.finfo(dtype).eps * out.abs().max().item()}
    torch.testing.assert_close(got_out, merged_out, **budget)
    torch.testing.assert_close(got_lse, merged_lse)
    none = sinks == NEG_INF
    assert torch.equal(got_out[:, none], out[:, none])
    assert torch.equal(got_lse[:, none], lse[:, none])
    empty = (lse == NEG_INF) & (sink > NEG_INF)
    assert empty.any()
    assert not got_out[empty].any()
    if device == "cpu":
        assert torch.equal(got_lse[empty], sink[empty])
    else:  # kernels count in powers of 2
        torch.testing.assert_close(got_lse[empty], sink[empty], rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_nan_comes_out_beside_sinks(softcap: float | None, device: str) -> None:
    inputs = Case(softcap=softcap, sinks=True).inputs(device)
    inputs["key"][0, 1, 7] = float("nan")
    inputs["sinks"][0] = float("nan")
    out, lse = torch.ops.tatten.decode_attention(**inputs)
    broken = torch.tensor([[True, False, True, True], [True, False, False, False]], device=device)
    assert torch.equal(out.isnan().all(dim=-1).squeeze(-1), broken)
    assert torch.equal(lse.isnan().squeeze(-1), broken)


def test_a_soft_cap_reads_no_key_that_is_masked_out() -> None:
    """Neither what lies outside the span nor, unlike the flash kernel, what lies in a hole of it."""
    inputs = Case(softcap=4.0, mask="2d", kv_len=50).inputs(poison=False)
    inputs["attn_mask"] = torch.arange(50) % 3 == 1
    for name in ("key", "value"):
        inputs[name] = inputs[name].masked_fill(~inputs["attn_mask"][:, None], float("nan"))
    assert_state(*torch.ops.tatten.decode_attention(**inputs), inputs)


def _strided(x: torch.Tensor, layout: str) -> torch.Tensor:
    match layout:
        case "bshd":  # [batch, length, heads, head_dim] in memory, as projections leave it
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "kt":  # keys stored transposed
            return x.transpose(2, 3).contiguous().transpose(2, 3)
        case "slice":  # part of a larger cache, which holds NaN
            big = x.new_full([n + 3 for n in x.shape], float("nan"))
            view = big[tuple(slice(1, n + 1) for n in x.shape)]
            return view.copy_(x)
        case "sbhd":
            return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        case "one_batch":  # stride 0 over the batch
            return x[:1].expand_as(x)
        case _:
            raise ValueError(layout)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_len", [40, 4099])
@pytest.mark.parametrize("layout", ["bshd", "kt", "slice", "sbhd", "one_batch"])
def test_takes_strides_as_they_come(layout: str, kv_len: int, device: str) -> None:
    inputs = Case(kv_len=kv_len, q_heads=6, kv_heads=3, batch=3, head_dim=64, q_len=2, mask="holes").inputs(device)
    for name in ("query", "key", "value"):
        inputs[name] = _strided(inputs[name], layout)
    inputs["attn_mask"] = inputs["attn_mask"].transpose(2, 3).contiguous().transpose(2, 3)
    assert_state(*torch.ops.tatten.decode_attention(**inputs), inputs)


@pytest.mark.parametrize("device", DEVICES)
def test_one_sequence_with_strided_heads(device: str) -> None:
    inputs = Case(batch=1, kv_len=6001, q_heads=3, kv_heads=3, head_dim=64, mask="causal").inputs(device)
    for name in ("query", "key", "value"):
        inputs[name] = _strided(inputs[name], "bshd")
    assert_state(*torch.ops.tatten.decode_attention(**inputs), inputs)


def test_reads_no_key_outside_the_span_of_each_row() -> None:
    """Rows with spans of their own; a row without any key; the poison lies right beside each span."""
    inputs = Case(batch=4, kv_len=50).inputs()
    spans = [(0, 50), (7, 9), (0, 0), (49, 50)]
    keys = torch.arange(50)
    mask = torch.stack([(keys >= a) & (keys < b) for a, b in spans])[:, None, None]
    for name in ("key", "value"):
        inputs[name] = inputs[name].masked_fill(~mask.transpose(2, 3), float("nan"))
    inputs["attn_mask"] = mask
    assert_state(*torch.ops.tatten.decode_attention(**inputs), inputs)


def test_ragged_spans_without_poison_are_one_call() -> None:
    """A little more reading that saves calls is accepted where it cannot hurt; the answer is the same."""
    inputs = Case(batch=6, kv_len=70, mask="causal").inputs(poison=False)
    assert_state(*torch.ops.tatten.decode_attention(**inputs), inputs)
    calls = []
    kernel = flash._flash
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "_flash", lambda *args: calls.append(1) or kernel(*args))
        torch.ops.tatten.decode_attention(**inputs)
    assert len(calls) == 1


@pytest.mark.parametrize(("spare", "calls"), [(0, 3), (1, 1)])
def test_spans_are_read_in_one_call_where_less_than_a_bound_is_wasted(
    spare: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = Case(batch=3, kv_len=50).inputs(poison=False)
    inputs["attn_mask"] = (torch.arange(50) < torch.tensor([[10], [30], [50]]))[:, None, None]
    wasted = (40 + 20 + 0) * 2 * (32 + 32) * 4  # keys, kv heads, K and V, bytes
    monkeypatch.setattr(thresholds.CPU, "run_bytes", wasted // 3 + spare)
    seen = []
    kernel = flash._flash
    monkeypatch.setattr(flash, "_flash", lambda *args: seen.append(1) or kernel(*args))
    assert_state(*torch.ops.tatten.decode_attention(**inputs), inputs)
    assert len(seen) == calls


@pytest.mark.parametrize(("threads", "pairs"), [(3, (1, 3)), (7, (3, 7))])
def test_keys_are_cut_into_pieces_where_cores_would_be_idle(
    threads: int, pairs: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three heads are no work for seven cores; 3 * 7 splits are."""
    inputs = Case(batch=1, q_heads=3, kv_heads=3, kv_len=70).inputs()
    monkeypatch.setattr(thresholds.CPU, "split_bytes", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    seen = []
    kernel = flash._flash
    monkeypatch.setattr(flash, "_flash", lambda *args: seen.append(args[0].shape[:2]) or kernel(*args))
    assert_state(*torch.ops.tatten.decode_attention(**inputs), inputs)
    assert seen == [pairs]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kv_len", [40, 9001])
def test_nan_in_keys_that_count_comes_out(kv_len: int, bad: float, device: str) -> None:
    """However the keys are split: a broken model must not look healthy."""
    inputs = Case(batch=1, q_heads=3, kv_heads=3, kv_len=kv_len, head_dim=64).inputs(device)
    inputs["key"][0, 1, 7] = bad
    inputs["query"].abs_()
    out, lse = torch.ops.tatten.decode_attention(**inputs)
    assert out[0, 1].isnan().all()
    assert not lse[0, 1].isfinite().any()
    assert out[0, [0, 2]].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_state_of_parts_merges_to_the_whole(device: str) -> None:
    inputs = Case(kv_len=100, mask="causal").inputs(device)
    inputs["key"], inputs["value"] = inputs["key"].nan_to_num(), inputs["value"].nan_to_num()
    parts = []
    for start, stop in ((0, 40), (40, 41), (41, 100)):
        keys = slice(start, stop)
        part = (inputs["query"], inputs["key"][:, :, keys], inputs["value"][:, :, keys], inputs["attn_mask"][..., keys])
        parts.append(torch.ops.tatten.decode_attention(*part))
    outs, lses = zip(*parts, strict=True)
    assert_state(*tatten.merge_states(torch.stack(outs), torch.stack(lses)), inputs)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(mask="causal", q_len=3, lens=True),
        Case(mask="alibi", dtype=torch.bfloat16),
        Case(window=5),
        Case(window=5, softcap=2.0, sinks=True, q_len=3, lens=True, mask="causal"),
        Case(sinks=True, dtype=torch.bfloat16),
        Case(softcap=2.0, dtype=torch.float64),
        Case(narrow="scaled", mask="causal", q_len=2),
        Case(narrow="per_key", int8=True, mask="causal", q_len=2),
    ],
    ids=str,
)
def test_opcheck(case: Case, device: str) -> None:
    inputs = case.inputs(device, poison=False)
    args = tuple(inputs.pop(name) for name in ("query", "key", "value", "attn_mask", "kv_lens", "scale"))
    utils = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if case.narrow and not case.int8:
        utils.remove("test_schema")  # PyTorch's own checker multiplies inputs, which float8 can't
    named = {**inputs, "provider": "auto"}
    opcheck(torch.ops.tatten.decode_attention.default, args, named, test_utils=utils)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "case",
    [
        Case(mask="causal", q_len=2),
        Case(window=5, softcap=2.0, sinks=True, q_len=2),
        Case(window=5, sinks=True),
        Case(narrow="scaled", sinks=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_public_function_compiles(inner: str, case: Case) -> None:
    inputs = case.inputs()
    query, key, value = inputs.pop("query"), inputs.pop("key"), inputs.pop("value")
    inputs["provider"] = "cpu"
    torch._dynamo.reset()
    compiled = torch.compile(tatten.decode_attention, backend=inner, fullgraph=True)
    out, lse = compiled(query, key, value, **inputs, return_lse=True)
    want_out, want_lse = tatten.decode_attention(query, key, value, **inputs, return_lse=True)
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)
    assert torch.equal(compiled(query, key, value, **inputs), want_out)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_more_than_2_to_the_31_elements(dtype: torch.dtype, device: str) -> None:
    """The keys that count lie behind the first 2^31 elements; the others are never touched, so they cost no memory."""
    head_dim = 256
    kv_len = (1 << 31) // head_dim + 300
    cache = torch.empty(1, 1, kv_len, head_dim, dtype=dtype, device=device)
    tail = slice(kv_len - 200, kv_len)
    cache[:, :, tail] = torch.randn(200, head_dim).to(dtype)
    query = torch.randn(1, 4, 1, head_dim, device=device).half()
    mask = torch.zeros(1, 1, 1, kv_len, dtype=torch.bool, device=device)
    mask[..., tail] = True
    # Stored transposed, a step in head_dim is as long as the cache.
    transposed = torch.empty(1, 1, 256, kv_len, dtype=dtype, device=device).transpose(2, 3)
    transposed[:, :, tail] = cache[:, :, tail]
    lens = torch.tensor([kv_len], device=device)
    for keys in (cache, transposed) if device == "cuda" else (cache,):
        again = torch.ops.tatten.decode_attention(query, keys, cache, mask, lens)
        torch.testing.assert_close(again, torch.ops.tatten.decode_attention(query, cache, cache, mask))
    state = torch.ops.tatten.decode_attention(query, cache, cache, mask)
    same = {"query": query, "key": cache[:, :, tail], "value": cache[:, :, tail]}
    assert_state(*state, {**same, "attn_mask": None, "kv_lens": None, "scale": None})
