"""Bad input: the error names the argument, the expected and the actual value; from the function and from the op."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import tatten

B, HQ, HKV, S, D = 2, 4, 2, 9, 8
F8, F8_E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = {"key": torch.randn(B, HKV, S, D).to(F8), "value": torch.randn(B, HKV, S, D).to(F8)}


def good() -> dict:
    return {
        "query": torch.randn(B, HQ, 1, D),
        "key": torch.randn(B, HKV, S, D),
        "value": torch.randn(B, HKV, S, D),
        "attn_mask": torch.ones(B, 1, 1, S, dtype=torch.bool),
        "kv_lens": torch.tensor([3, 4]),
    }


BAD = [
    ("query rank", {"query": torch.randn(HQ, 1, D)}, ValueError, ["`query`", "[batch, heads, length", "(4, 1, 8)"]),
    ("key rank", {"key": torch.randn(B, HKV, S)}, ValueError, ["`key`", "(2, 2, 9)"]),
    ("q_len 0", {"query": torch.randn(B, HQ, 0, D)}, ValueError, ["`query`", "size 0", "(2, 4, 0, 8)"]),
    ("empty batch", {"query": torch.randn(0, HQ, 1, D)}, ValueError, ["`query`", "size 0", "(0, 4, 1, 8)"]),
    ("batch", {"key": torch.randn(3, HKV, S, D)}, ValueError, ["`key`", "[2, kv_heads", "(3, 2, 9, 8)"]),
    ("head_dim", {"key": torch.randn(B, HKV, S, 16)}, ValueError, ["`key`", "8]", "(2, 2, 9, 16)"]),
    (
        "value length",
        {"value": torch.randn(B, HKV, 7, D)},
        ValueError,
        ["`value`", "[2, 2, 9, head_dim]", "(2, 2, 7, 8)"],
    ),
    ("value heads", {"value": torch.randn(B, 1, S, D)}, ValueError, ["`value`", "(2, 1, 9, 8)"]),
    (
        "heads",
        {"key": torch.randn(B, 3, S, D), "value": torch.randn(B, 3, S, D)},
        ValueError,
        ["`key`", "divides `query`'s 4", "got 3"],
    ),
    (
        "no kv heads",
        {"key": torch.randn(B, 0, S, D), "value": torch.randn(B, 0, S, D)},
        ValueError,
        ["`key`", "divides `query`'s 4", "got 0"],
    ),
    ("dtype", {"key": torch.randn(B, HKV, S, D).half()}, TypeError, ["`key`", "torch.float32", "torch.float16"]),
    ("int query", {"query": torch.ones(B, HQ, 1, D, dtype=torch.int64)}, TypeError, ["`query`", "torch.int64"]),
    (
        "mask shape",
        {"attn_mask": torch.ones(B, 1, 1, 7, dtype=torch.bool)},
        ValueError,
        ["`attn_mask`", "9]", "(2, 1, 1, 7)"],
    ),
    ("mask heads", {"attn_mask": torch.ones(B, 2, 1, S)}, ValueError, ["`attn_mask`", "[2, 4, 1, 9]", "(2, 2, 1, 9)"]),
    ("mask rank", {"attn_mask": torch.ones(1, B, 1, 1, S)}, ValueError, ["`attn_mask`", "(1, 2, 1, 1, 9)"]),
    ("mask dtype", {"attn_mask": torch.ones(B, 1, 1, S).long()}, TypeError, ["`attn_mask`", "bool", "torch.int64"]),
    ("lens shape", {"kv_lens": torch.tensor([3])}, ValueError, ["`kv_lens`", "(2,)", "(1,)"]),
    ("lens dtype", {"kv_lens": torch.tensor([3.0, 4.0])}, TypeError, ["`kv_lens`", "int32 or int64", "torch.float32"]),
    ("negative length", {"kv_lens": torch.tensor([3, -1])}, ValueError, ["`kv_lens`", "between 0", "9", "got -1"]),
    ("long length", {"kv_lens": torch.tensor([3, 10])}, ValueError, ["`kv_lens`", "9", "got 10"]),
    (
        "grad",
        {"query": torch.randn(B, HQ, 1, D, requires_grad=True)},
        NotImplementedError,
        ["`query`", "requires_grad=True"],
    ),
    ("grad of value", {"value": torch.randn(B, HKV, S, D, requires_grad=True)}, NotImplementedError, ["`value`"]),
    ("grad of mask", {"attn_mask": torch.zeros(B, 1, 1, S, requires_grad=True)}, NotImplementedError, ["`attn_mask`"]),
    ("empty window", {"window": 0}, ValueError, ["`window`", "at least 1", "got 0"]),
    ("negative window", {"window": -3}, ValueError, ["`window`", "at least 1", "got -3"]),
    *((f"softcap {x}", {"softcap": x}, ValueError, ["`softcap`", "above 0", f"got {x}"]) for x in (0.0, -1.0)),
    *((f"softcap {x}", {"softcap": float(x)}, ValueError, ["`softcap`", "finite", f"got {x}"]) for x in ("nan", "inf")),
    ("sinks shape", {"sinks": torch.randn(HKV)}, ValueError, ["`sinks`", "(4,)", "(2,)"]),
    ("sinks rank", {"sinks": torch.randn(1, HQ)}, ValueError, ["`sinks`", "(4,)", "(1, 4)"]),
    ("sinks dtype", {"sinks": torch.randn(HQ).half()}, TypeError, ["`sinks`", "torch.float32", "torch.float16"]),
    ("grad of sinks", {"sinks": torch.randn(HQ, requires_grad=True)}, NotImplementedError, ["`sinks`"]),
    ("float8 query", {"query": torch.randn(B, HQ, 1, D).to(F8)}, TypeError, ["`query`", "bfloat16", "float8_e4m3fn"]),
    ("float8 key", {"key": torch.randn(B, HKV, S, D).to(F8)}, TypeError, ["`value`", "dtype of `key`", "float32"]),
    ("other float8", FLOAT8 | {"key": torch.randn(B, HKV, S, D).to(F8_E5M2)}, TypeError, ["`key`", "e4m3fn", "e5m2"]),
    ("scale of no float8", {"key_scale": torch.ones(HKV)}, TypeError, ["`key_scale`", "float8_e4m3fn", "float32"]),
    ("scale dtype", FLOAT8 | {"value_scale": torch.ones(HKV).half()}, TypeError, ["`value_scale`", "float16"]),
    ("scale shape", FLOAT8 | {"key_scale": torch.ones(HQ)}, ValueError, ["`key_scale`", "(2,)", "(4,)"]),
    (
        "grad of a scale",
        FLOAT8 | {"key_scale": torch.ones(HKV, requires_grad=True)},
        NotImplementedError,
        ["`key_scale`", "requires_grad=True"],
    ),
    ("provider of CUDA", {"provider": "triton"}, ValueError, ["`provider`", "auto, cpu", "a cpu", "got 'triton'"]),
    ("unknown provider", {"provider": "fast"}, ValueError, ["`provider`", "auto, cpu", "got 'fast'"]),
]


@pytest.mark.parametrize("variant", ["masked", "plain"])
@pytest.mark.parametrize(("change", "error", "says"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_decode_attention(change: dict, error: type[Exception], says: list[str], variant: str) -> None:
    """The CPU attends at once if there is neither a mask nor a length."""
    inputs = good()
    if variant == "plain":
        del inputs["attn_mask"], inputs["kv_lens"]
    inputs |= change
    query, key, value = inputs.pop("query"), inputs.pop("key"), inputs.pop("value")
    for call in (
        lambda: tatten.decode_attention(query, key, value, **inputs),
        lambda: torch.ops.tatten.decode_attention(query, key, value, **inputs),
    ):
        with pytest.raises(error) as raised:
            call()
        for part in says:
            assert part in str(raised.value)


def segments() -> dict:
    """Four sequences, of which two share a prefix."""
    return {
        "keys": [torch.randn(2, HKV, S, D), torch.randn(4, HKV, 3, D)],
        "values": [torch.randn(2, HKV, S, D), torch.randn(4, HKV, 3, D)],
        "attn_masks": [torch.ones(2, 1, 1, S, dtype=torch.bool), None],
    }


BAD_SEGMENTS = [
    ("keys 0 batch", torch.randn(3, HKV, S, D), ValueError, ["`keys[0]`", "divides `query`'s 4", "got 3"]),
    ("keys 1 batch", torch.randn(8, HKV, 3, D), ValueError, ["`keys[1]`", "divides `query`'s 4", "got 8"]),
    ("keys 0 empty batch", torch.randn(0, HKV, S, D), ValueError, ["`keys[0]`", "divides `query`'s 4", "got 0"]),
    ("values 0 batch", torch.randn(4, HKV, S, D), ValueError, ["`values[0]`", "[2, 2, 9", "(4, 2, 9, 8)"]),
    ("values 1 length", torch.randn(4, HKV, 2, D), ValueError, ["`values[1]`", "[4, 2, 3", "(4, 2, 2, 8)"]),
    ("keys 1 heads", torch.randn(4, 3, 3, D), ValueError, ["`values[1]`", "[4, 3, 3", "(4, 2, 3, 8)"]),
    ("keys 1 head_dim", torch.randn(4, HKV, 3, 4), ValueError, ["`keys[1]`", "8]", "(4, 2, 3, 4)"]),
    ("values 1 head_dim", torch.randn(4, HKV, 3, 4), ValueError, ["`values[1]`", "`values[0]`, 8", "got 4"]),
    ("keys 1 rank", torch.randn(HKV, 3, D), ValueError, ["`keys[1]`", "[batch, heads", "(2, 3, 8)"]),
    ("keys 1 dtype", torch.randn(4, HKV, 3, D).half(), TypeError, ["`keys[1]`", "torch.float32", "torch.float16"]),
    ("values 0 grad", torch.randn(2, HKV, S, D, requires_grad=True), NotImplementedError, ["`values[0]`"]),
    ("masks 0 batch", torch.ones(3, 1, 1, S) > 0, ValueError, ["`attn_masks[0]`", "[4, 4, 1, 9]", "(3, 1, 1, 9)"]),
    ("masks 1 length", torch.ones(4, 1, 1, S) > 0, ValueError, ["`attn_masks[1]`", "[4, 4, 1, 3]", "(4, 1, 1, 9)"]),
    ("masks 1 dtype", torch.ones(3).long(), TypeError, ["`attn_masks[1]`", "bool", "torch.int64"]),
]


@pytest.mark.parametrize(("what", "bad", "error", "says"), BAD_SEGMENTS, ids=[bad[0] for bad in BAD_SEGMENTS])
def test_bifurcated_attention(what: str, bad: torch.Tensor, error: type[Exception], says: list[str]) -> None:
    name, i = what.split()[:2]
    inputs = segments()
    inputs["attn_masks" if name == "masks" else name][int(i)] = bad
    with pytest.raises(error) as raised:
        tatten.bifurcated_attention(torch.randn(4, HQ, 1, D), **inputs)
    for part in says:
        assert part in str(raised.value)


BAD_VARIANTS = [bad for bad in BAD if set(bad[1]) & {"window", "softcap", "sinks"}]


@pytest.mark.parametrize(("change", "error", "says"), [x[1:] for x in BAD_VARIANTS], ids=[x[0] for x in BAD_VARIANTS])
def test_variants_of_bifurcated_attention(change: dict, error: type[Exception], says: list[str]) -> None:
    query, inputs = torch.randn(4, HQ, 1, D), segments()
    masks = inputs.pop("attn_masks")
    for call in (
        lambda: tatten.bifurcated_attention(query, **inputs, attn_masks=masks, **change),
        lambda: torch.ops.tatten.bifurcated_attention(query, *inputs.values(), masks, [None] * 2, **change),
    ):
        with pytest.raises(error) as raised:
            call()
        for part in says:
            assert part in str(raised.value)


def test_bifurcated_attention_counts_its_segments() -> None:
    query, inputs = torch.randn(4, HQ, 1, D), segments()
    with pytest.raises(ValueError, match=r"`values` must have one entry for each of the 2 `keys`, got 1"):
        tatten.bifurcated_attention(query, inputs["keys"], inputs["values"][:1])
    with pytest.raises(ValueError, match=r"`attn_masks` must have one entry for each of the 2 `keys`, got 3"):
        tatten.bifurcated_attention(query, inputs["keys"], inputs["values"], attn_masks=[None] * 3)
    for block_mask in (torch.zeros(4, 3, dtype=torch.int64), torch.zeros(2, 3)):
        with pytest.raises(ValueError, match=r"`block_masks\[0\]` must be int64 of shape \(1, 3\) or \(2, 3\), got"):
            torch.ops.tatten.bifurcated_attention(query, *inputs.values(), [block_mask, None])
    with pytest.raises(ValueError, match="at least one segment"):
        tatten.bifurcated_attention(query, [], [])
    with pytest.raises(TypeError, match=r"`keys\[1\]` must be a Tensor, got NoneType"):
        tatten.bifurcated_attention(query, [inputs["keys"][0], None], inputs["values"])
    with pytest.raises(TypeError, match=r"`keys` must be a sequence of Tensors, got Tensor"):
        tatten.bifurcated_attention(query, inputs["keys"][0], inputs["values"])
    for name, keys in (("NoneType", None), ("generator", (key for key in inputs["keys"]))):
        with pytest.raises(TypeError, match=f"`keys` must be a sequence of Tensors, got {name}"):
            tatten.bifurcated_attention(query, keys, inputs["values"])


def test_masks_by_position() -> None:
    q, k, mask = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8), torch.ones(1, 5, dtype=torch.bool)
    calls = {
        "attn_mask": lambda q, k, mask: tatten.decode_attention(q, k, k, mask),
        "attn_masks": lambda q, k, mask: tatten.bifurcated_attention(q, [k], [k], [mask]),
    }
    for name, call in calls.items():
        message = f"`{name}` must be passed by keyword.*got 4 arguments"
        with pytest.raises(TypeError, match=message):
            call(q, k, mask)
        with pytest.raises(TypeError, match=message):
            torch.compile(call, backend="eager")(q, k, mask)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):  # Dynamo's, of whatever is raised
            torch.compile(call, backend="eager", fullgraph=True)(q, k, mask)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'value'"):
        tatten.decode_attention(q, k)


def test_masks_by_keyword_in_one_graph() -> None:
    q, k, mask = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8), torch.ones(1, 5, dtype=torch.bool)

    def both(q, k, mask):
        a = tatten.decode_attention(q, key=k, value=k, attn_mask=mask)
        return a + tatten.bifurcated_attention(q, [k], values=[k], attn_masks=[mask])

    torch.testing.assert_close(torch.compile(both, backend="eager", fullgraph=True)(q, k, mask), both(q, k, mask))
    for function in (tatten.decode_attention, tatten.bifurcated_attention):
        kinds = {x.kind.name for x in inspect.signature(function).parameters.values()}
        assert kinds == {"POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY"}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_gradients_are_refused_in_compiled_code_too(inner: str) -> None:
    q, k = torch.randn(1, 2, 1, 8, requires_grad=True), torch.randn(1, 2, 5, 8)
    state = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3)
    for fn, args in (
        (lambda q, k: tatten.decode_attention(q, k, k) + q, (q, k)),
        (lambda q, k: torch.ops.tatten.decode_attention(q, k, k)[0] + q, (q, k)),
        (tatten.merge_states, state),
    ):
        torch._dynamo.reset()
        with pytest.raises(NotImplementedError, match="requires_grad=True"):
            torch.compile(fn, backend=inner)(*args)


def test_compiled_merge_checks_its_states() -> None:
    with pytest.raises(ValueError, match="`lse`"):
        torch.compile(tatten.merge_states, backend="eager")(torch.randn(3, 4, 8), torch.randn(3, 1))


def test_gradients_are_fine_where_none_are_wanted() -> None:
    inputs = good()
    with torch.no_grad():
        tatten.decode_attention(inputs["query"].requires_grad_(), inputs["key"], inputs["value"])


def test_not_a_tensor() -> None:
    with pytest.raises(TypeError, match="`key` must be a Tensor, got list"):
        tatten.decode_attention(torch.randn(1, 1, 1, 8), [1], torch.randn(1, 1, 3, 8))


OTHER_TYPES = [
    ({"sinks": [0.0] * HQ}, "`sinks` must be a Tensor or None, got list", ["'sinks'", "Tensor", "list"]),
    ({"window": 2.5}, "`window` must be an int or None, got float", ["'window'", "int", "float"]),
    ({"window": (5, 0)}, "`window` must be an int or None, got tuple", ["'window'", "int", "tuple"]),
    ({"scale": "1"}, "`scale` must be a float or None, got str", ["'scale'", "float", "str"]),
    ({"batch_invariant": "yes"}, "`batch_invariant` must be a bool, got str", ["'batch_invariant'", "bool", "str"]),
]


@pytest.mark.parametrize(("change", "says", "op_says"), OTHER_TYPES)
def test_arguments_of_another_type(change: dict, says: str, op_says: list[str]) -> None:
    """The function names the argument; the error of the op is that of PyTorch's dispatcher."""
    inputs, shared = good(), segments()
    segment_arguments = torch.randn(4, HQ, 1, D), shared["keys"], shared["values"]
    masks = shared["attn_masks"]
    with pytest.raises(TypeError, match=re.escape(says)):
        tatten.decode_attention(**(inputs | change))
    with pytest.raises(TypeError, match=re.escape(says)):
        tatten.bifurcated_attention(*segment_arguments, attn_masks=masks, **change)
    for call in (
        lambda: torch.ops.tatten.decode_attention(**(inputs | change)),
        lambda: torch.ops.tatten.bifurcated_attention(*segment_arguments, masks, [None] * 2, **change),
    ):
        with pytest.raises(RuntimeError) as raised:
            call()
        for part in op_says:
            assert part in str(raised.value)


def test_lengths_of_another_type() -> None:
    with pytest.raises(TypeError, match="`kv_lens` must be a Tensor or None, got list"):
        tatten.decode_attention(**(good() | {"kv_lens": [3, 4]}))


PAGED = {
    "query": torch.randn(B, HQ, D), "key": torch.randn(3, 4, HKV, D), "value": torch.randn(3, 4, HKV, D),
    "block_table": torch.zeros(B, 2).int(), "cu_seqlens_q": torch.arange(B + 1).int(), "kv_lens": torch.tensor([3, 4]),
}  # fmt: skip
LATENTS = {"query": torch.randn(B, HQ, 1, D), "query_rope": None, "latent": torch.randn(B, 1, S, D), "key_rope": None}
CALLS = {
    "decode_attention": (tatten.decode_attention, good()),
    "paged_attention": (tatten.paged_attention, PAGED),
    "latent_attention": (tatten.latent_attention, {**LATENTS, "scale": 1.0, "kv_lens": torch.tensor([3, 4])}),
    "merge_states": (tatten.merge_states, {"out": torch.randn(3, 2, 8), "lse": torch.randn(3, 2)}),
}
TENSORS = [(op, name) for op, (_, inputs) in CALLS.items() for name, x in inputs.items() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_one_tensor_on_meta(op: str, name: str) -> None:
    """The dispatcher takes such a call for one on `meta`, whose result on a CPU would be uninitialised."""
    function, inputs = CALLS[op]
    with pytest.raises(ValueError, match="must be on the device of"):
        function(**(inputs | {name: inputs[name].to("meta")}))


@pytest.mark.parametrize(("op", "name"), [x for x in TENSORS if CALLS[x[0]][1][x[1]].is_floating_point()])
def test_derivatives_by_functions(op: str, name: str) -> None:
    """Transforms of functions unwrap the tensors of an op, so that the op sees no gradient. It would be zero."""
    function, inputs = CALLS[op]
    x = inputs[name]

    def result(x: torch.Tensor) -> torch.Tensor:
        out = function(**(inputs | {name: x}))
        return (out if isinstance(out, torch.Tensor) else out[0]).sum()

    with pytest.raises(NotImplementedError, match=f"`{name}` must not require grad"):
        torch.func.grad(result)(x)
    with pytest.raises(NotImplementedError, match=f"`{name}` must not require grad"):
        torch.func.vjp(result, x)
    with pytest.raises(NotImplementedError, match=f"`{name}` must have no tangent"):
        torch.func.jvp(result, (x,), (x,))
    assert torch.func.vmap(result)(x[None]).shape == (1,)


def test_derivatives_of_lists() -> None:
    query, key = torch.randn(B, HQ, 1, D), torch.randn(B, HKV, S, D)
    with pytest.raises(NotImplementedError, match=re.escape("`keys[0]` must not require grad")):
        torch.func.grad(lambda x: tatten.bifurcated_attention(query, [x], [key]).sum())(key)


@pytest.mark.parametrize(
    ("out", "lse", "error", "says"),
    [
        (torch.randn(3, 2, 8), torch.randn(3), ValueError, ["`lse`", "(3, 2)", "(3,)"]),
        (torch.randn(3, 2, 8), torch.randn(3, 2).double(), TypeError, ["`lse`", "torch.float32", "torch.float64"]),
        (torch.ones(3, 2, 8).long(), torch.randn(3, 2), TypeError, ["`out`", "torch.int64"]),
        (torch.randn(3, 2, 8, requires_grad=True), torch.randn(3, 2), NotImplementedError, ["`out`"]),
        (torch.randn(8), torch.randn(()), ValueError, ["`out`", "stacked", "(8,)"]),
        (torch.randn(0, 2, 8), torch.randn(0, 2), ValueError, ["`out`", "at least one", "(0, 2, 8)"]),
    ],
)
def test_merge_states(out, lse, error: type[Exception], says: list[str]) -> None:
    with pytest.raises(error) as raised:
        tatten.merge_states(out, lse)
    for part in says:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"out_b": torch.randn(3, 8)}, ValueError, ["`lse_b`", "(3,)", "(2,)"]),
        ({"out_b": torch.randn(3, 8), "lse_b": torch.randn(3)}, ValueError, ["`out_b`", "(2, 8)", "(3, 8)"]),
        ({"out_b": torch.randn(2, 8).half()}, TypeError, ["`out_b`", "torch.float32", "torch.float16"]),
    ],
)
def test_merge_state(change: dict, error: type[Exception], says: list[str]) -> None:
    states = {
        name: torch.randn(2, 8) if "out" in name else torch.randn(2) for name in ("out_a", "lse_a", "out_b", "lse_b")
    }
    with pytest.raises(error) as raised:
        tatten.merge_state(**(states | change))
    for part in says:
        assert part in str(raised.value)
