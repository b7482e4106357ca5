"""Inductor's generated code for the ops: launches of their kernels, with memory of its own. For a made-up H200."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled import compile_in_subprocess

from tatten.ops.cuda.prepared import Bytes, PreparedCall, PreparedLaunch, TmaTiles

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the made-up GPU is for machines without one")

SCRIPT = """
import json, logging, sys
import fake_h200
fake_h200.install()
import torch
from tatten.ops.inductor import lowering
from tatten.ops.inductor.lowering import register_lowerings
from tatten.ops.inductor.custom_pass import with_lowerings
counted = []
ops, bf16 = torch.ops.tatten, torch.bfloat16
Q, KV, MASK = ((2, 32, 1, 128), bf16), ((2, 8, 4096, 128), bf16), ((2, 1, 1, 4096), torch.bool)

def two_layers(q, k, v, mask):
    blocks = ops.block_mask.default(mask)
    a, _ = ops.decode_attention.default(q, k, v, mask, None, 0.1, blocks)
    b, _ = ops.decode_attention.default(a * 2, k, v, mask, None, 0.1, blocks)
    return b + 1

def views(x, packed, k, v):
    a, _ = ops.decode_attention.default(x.view(2, 1, 32, 128).transpose(1, 2), k, v)
    own = packed.narrow(2, 0, 4096).view(2, 1, 32, 128).transpose(1, 2)
    b, _ = ops.decode_attention.default(own, k, v)
    return a, b, ops.decode_attention.default(packed.narrow(2, 2048, 4096).view(2, 1, 32, 128).transpose(1, 2), k, v)[0]

def invariant(q, k, v, mask):
    return ops.decode_attention.default(q, k, v, mask, batch_invariant=True)[0]

def segments(q, k, v, k2, v2):
    # Tensors that only one of the launches reads, and that nothing needs afterwards.
    out, _ = ops.bifurcated_attention.default(q, [k + 1, k2 + 1], [v + 1, v2 + 1], [None, None], [None, None], 0.1)
    return out * 3

def capped_segments(q, sinks, k, v, k2, v2):
    given = {"softcap": 30.0, "sinks": sinks}
    return ops.bifurcated_attention.default(q, [k, k2], [v, v2], [None] * 2, [None] * 2, 0.1, **given)[0]

def windowed_segments(q, k, v, k2, v2):
    return ops.bifurcated_attention.default(q, [k, k2], [v, v2], [None] * 2, [None] * 2, 0.1, window=400)[0]

def masked_segments(q, mask, *kv):
    # Only the first launch after it reads the block list.
    return ops.bifurcated_attention.default(q, kv[::2], kv[1::2], [mask, None, None], [None] * 3, 0.1)[0]

def merge(out, lse):
    return ops.merge_states.default(out, lse)

def plain(q, k, v):
    return ops.decode_attention.default(q, k, v)[0]

def rows(index, q, k, v, k2, v2):
    groups = ops.row_groups.default(index, 3, 1)
    return ops.bifurcated_attention.default(q, [k, k2], [v, v2], [None] * 2, [None] * 2, 0.1, [groups, None])[0]

def shared(q, k, v, k2, v2):
    return ops.bifurcated_attention.default(q, [k, k2], [v, v2], [None] * 2, [None] * 2, 0.1)[0]

def cudnn(q, k, v):
    return ops.decode_attention.default(q, k, v, provider="cudnn")[0]

def latents(q, q_rope, c, k_rope):
    return ops.latent_attention.default(q, q_rope, c, k_rope, scale=0.1)[0]

def views_of_latents(q, q_rope, packed):
    # The second one begins at an odd number: whether it is aligned depends on where memory is.
    def attend(q, latent, k_rope):
        return ops.latent_attention.default(q, q_rope, latent, k_rope, scale=0.1)[0]

    latent, k_rope = packed.narrow(3, 0, 512), packed.narrow(3, 512, 64)
    return attend(q.narrow(3, 64, 512), latent, k_rope), attend(q.narrow(3, 1, 512), latent, k_rope)

def latent_layers(q, q_rope, c, k_rope, mask):
    blocks = ops.block_mask.default(mask)
    for _ in range(2):
        q = ops.latent_attention.default(q, q_rope, c, k_rope, mask, None, scale=0.1, block_mask=blocks)[0] * 2
    return q

def keys_as_values(q, k, k2):
    return ops.bifurcated_attention.default(q, [k, k2], [k, k2], [None] * 2, [None] * 2, 0.1)[0]

def latents_within(first, keys, last, q, q_rope, k_rope):
    # Inductor has the latents where the concatenation has them, 8 bytes behind a multiple of 16.
    latent = keys.sum(1, dtype=bf16)
    everything = torch.cat([first * 1, latent, last + 1])
    q = q + everything.sum()
    return ops.latent_attention.default(q, q_rope, latent.view(1, 1, 512, 512), k_rope, scale=0.1)[0], everything

def masked_latents(q, q_rope, c, k_rope, mask):
    return ops.latent_attention.default(q, q_rope, c, k_rope, mask, scale=0.1)[0]

def project(sums, weight):
    return ops.project_heads.default(sums * 2, weight.narrow(1, 128, 128))

def find_rows(n, index):
    return ops.row_groups.default(index, n, 1)

cases = {
    "two layers": (two_layers, [Q, KV, KV, MASK]),
    "views": (views, [((2, 1, 4096), bf16), ((2, 1, 6144), bf16), KV, KV]),
    "invariant": (invariant, [Q, KV, KV, MASK]),
    "segments": (segments, [
        ((8, 8, 1, 64), bf16), *[((2, 8, 500, 64), bf16)] * 2, *[((8, 8, 300, 64), bf16)] * 2
    ]),
    "capped segments": (capped_segments, [
        ((8, 8, 1, 64), bf16), ((8,), bf16), *[((2, 8, 500, 64), bf16)] * 2, *[((8, 8, 300, 64), bf16)] * 2
    ]),
    "windowed segments": (windowed_segments, [
        ((8, 8, 1, 64), bf16), *[((2, 8, 500, 64), bf16)] * 2, *[((8, 8, 300, 64), bf16)] * 2
    ]),
    "masked segments": (masked_segments, [
        ((8, 8, 1, 64), bf16), ((8, 1, 1, 40), torch.bool),
        *[((8, 8, length, 64), bf16) for length in (40, 40, 300, 300, 200, 200)]
    ]),
    "merge": (merge, [((4, 2, 8, 1, 64), bf16), ((4, 2, 8, 1), torch.float32)]),
    "rows": (rows, [
        ((7,), torch.int32), ((7, 8, 1, 64), bf16), *[((3, 8, 500, 64), bf16)] * 2, *[((7, 8, 300, 64), bf16)] * 2
    ]),
    "project": (project, [((2, 16, 1, 512), torch.float32), ((16, 256, 512), bf16)]),
    "symbolic rows": (find_rows, ["n", ((7,), torch.int32)]),
    "symbolic lengths": (plain, [Q, *[((2, 8, "s", 128), bf16)] * 2]),
    "plain": (plain, [Q, KV, KV]),
    "float64": (plain, [(shape, torch.float64) for shape, _ in (Q, KV, KV)]),
    "prefix": (shared, [
        ((256, 32, 1, 128), bf16), *[((1, 8, 8192, 128), bf16)] * 2, *[((256, 8, 256, 128), bf16)] * 2
    ]),
    "provider": (cudnn, [Q, KV, KV]),
    "wrong": (plain, [Q, ((2, 5, 64, 64), bf16), ((2, 5, 64, 64), bf16)]),
    **{f"{heads} heads": (latents, [
        ((2, heads, 1, 512), bf16), ((2, heads, 1, 64), bf16), ((2, 1, 4096, 512), bf16), ((2, 1, 4096, 64), bf16)
    ]) for heads in (16, 128)},
    "unrounded": (latents, [
        ((2, 16, 1, 512), torch.float32), ((2, 16, 1, 64), bf16), ((2, 1, 4096, 512), bf16), ((2, 1, 4096, 64), bf16)
    ]),
    "latent layers": (latent_layers, [
        ((2, 128, 1, 512), bf16), ((2, 128, 1, 64), bf16), ((2, 1, 4096, 512), bf16), ((2, 1, 4096, 64), bf16),
        ((2, 1, 1, 4096), torch.bool),
    ]),
    "latents within": (latents_within, [
        ((4,), bf16), ((512 * 512, 3), bf16), ((4,), bf16),
        ((1, 128, 1, 512), bf16), ((1, 128, 1, 64), bf16), ((1, 1, 512, 64), bf16)
    ]),
    "keys as values": (keys_as_values, [
        ((256, 32, 1, 128), bf16), ((1, 8, 8192, 128), bf16), ((256, 8, 256, 128), bf16)
    ]),
    "masked latents": (masked_latents, [
        ((2, 128, 1, 512), bf16), ((2, 128, 1, 64), bf16), ((2, 1, 4096, 512), bf16), ((2, 1, 4096, 64), bf16),
        ((2, 1, 1, 4096), torch.bool),
    ]),
    "views of latents": (views_of_latents, [
        ((2, 128, 1, 576), bf16), ((2, 128, 1, 64), bf16), ((2, 1, 4096, 576), bf16)
    ]),
    "large": (plain, [((64, 32, 1, 128), bf16), *[((64, 8, 2048, 128), bf16)] * 2]),
}
said = []
class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("tatten").addHandler(Said())
logging.getLogger("tatten").setLevel(logging.INFO)
generated = []
ahead_of_time = lowering.ahead_of_time
before, runs = json.loads(sys.argv[1])
if before:
    fake_h200.generated_code(*cases[before])
register_lowerings(counted.append)
for case, lowered, options in runs:
    lowering.ahead_of_time = (lambda: True) if options.pop("package", False) else ahead_of_time
    said.clear()
    code = fake_h200.generated_code(*cases[case], **(with_lowerings(options) if lowered else options))
    generated.append([code, [*said]])
print(json.dumps(generated))
"""

STAY_OPAQUE = [
    ("plain", False, "[not_ours]"),
    ("float64", True, "[not_recordable] NotRecordableError: calls aten"),
    ("windowed segments", True, "[not_recordable] NotRecordableError: takes a view that begins elsewhere"),
    ("provider", True, "[not_recordable] NotRecordableError: calls aten._scaled_dot_product_cudnn_attention"),
    ("wrong", True, "[not_recordable] ValueError: `key` must be"),
    ("symbolic rows", True, "[symbolic]"),
    ("symbolic lengths", True, "[symbolic]"),
]
IN_GLUON = (
    "prefix",
    "128 heads",
    "unrounded",
    "masked latents",
    "keys as values",
    "latents within",
    "latent layers",
    "views of latents",
)
NATIVE = torch.__version__ >= "2.12"  # PyTorch 2.11 runs the Python code first, for which there is no GPU
NATIVE_PDL = torch.__version__ >= "2.15"  # before, PyTorch's C++ launches without programmatic dependent launch
LOWERED = (
    "two layers",
    "invariant",
    "segments",
    "capped segments",
    "masked segments",
    "merge",
    "rows",
    "16 heads",
    "views",
    "project",
)
RUNS: list[tuple[str, bool, dict[str, bool]]] = [
    *((case, True, {}) for case in LOWERED),
    *([(case, True, {"cpp_wrapper": True}) for case in ("two layers", "project")] if NATIVE else []),
    *([(case, True, {"cpp_wrapper": True}) for case in ("128 heads", "large")] if NATIVE else []),
    *((case, True, {}) for case in (*IN_GLUON, "large")),
    *((case, lowered, {}) for case, lowered, _ in STAY_OPAQUE),
    *((case, True, {"package": True}) for case in ("prefix", "128 heads", "unrounded", "project")),
]


@functools.cache
def generate_all() -> list[tuple[str, list[str]]]:
    """All of it in one interpreter: most of the time is its imports."""
    return compile_in_subprocess(SCRIPT, (None, RUNS))  # type: ignore[no-any-return]


def generate(case: str, lowered: bool = True, **options: bool) -> tuple[str, list[str]]:
    return generate_all()[RUNS.index((case, lowered, options))]


def defined_with(code: str, **options: bool) -> Iterator[str]:
    """The names of the kernels that are defined with options of Triton's compiler."""
    for definition in code.split("async_compile.triton(")[1:]:
        (meta,) = re.findall(r"triton_meta=(.*),$", definition, re.M)
        given = dict(re.findall(r"'(launch_pdl|enable_fp_fusion)': (True|False)", meta))
        if {name: str(value) for name, value in options.items()} == given:
            yield definition[1:].partition("'")[0]


def test_layers_launch_the_same_kernels_in_the_same_memory() -> None:
    code, said = generate("two layers")
    assert not said
    assert "torch.ops.tatten" not in re.sub(r"^#.*$", "", code, flags=re.M)
    launches = re.findall(r"^ +(\w+_kernel)_(\d+)\.run\(", code, re.M)
    assert [name for name, _ in launches] == [
        *("bits_kernel", "list_kernel", "decode_kernel", "combine_kernel", "decode_kernel", "combine_kernel")
    ]
    assert launches[2:4] == launches[4:6], "a second definition of an equal kernel"
    assert {"decode_kernel", "combine_kernel"} <= {*defined_with(code, launch_pdl=True, enable_fp_fusion=False)}
    allocated = [i for i, line in enumerate(code.splitlines()) if "empty_strided_cuda((" in line]
    second = next(
        i for i, line in reversed([*enumerate(code.splitlines())]) if "decode_kernel" in line and ".run(" in line
    )
    first = next(i for i, line in enumerate(code.splitlines()) if "decode_kernel" in line and ".run(" in line)
    assert sum(first < i < second for i in allocated) <= 1, "only the second layer's queries are new"


def test_views_are_made_only_where_a_kernel_begins_elsewhere() -> None:
    """Sizes and strides are in the source of a kernel, so it needs an address alone."""
    code, said = generate("views")
    assert not said
    first, second, third = re.findall(r"decode_kernel_\d+\.run\((.*), arg2_1, arg3_1,", code)
    assert (first, second) == ("arg0_1", "arg1_1")
    assert re.fullmatch(r"reinterpret_tensor\(arg1_1, .*, 2048\)", third)


def test_a_graph_compiled_before_the_lowerings_were_registered() -> None:
    """From then on Inductor constrains the op's strides and fills in its defaults, which the graph does not have."""
    ((code, said),) = compile_in_subprocess(SCRIPT, ("plain", [("two layers", True, {})]))
    assert not said
    assert "torch.ops.tatten" not in re.sub(r"^#.*$", "", code, flags=re.M)


def test_launches_side_by_side_share_no_memory() -> None:
    code, said = generate("segments")
    assert not said
    lines = code[code.index("def call(") :].splitlines()
    launched = [i for i, line in enumerate(lines) if re.search(r"(bits|list|decode|combine)_kernel_\d+\.run\(", line)]
    attention = [i for i in launched if "decode_kernel" in lines[i]]
    assert len(attention) == 2
    between = lines[attention[0] + 1 : launched[-1]]
    others = [line for line in between if ".run(" in line and "decode_kernel" not in line]
    assert not others, "another kernel between launches that may run side by side"
    assert not [line for line in between if re.search(r"\bdel |reuse", line)], "memory that a launch may still read"


def test_launches_of_a_call_stay_in_order_with_their_memory() -> None:
    """Some start before those before them end, and wait for these only when they end."""
    code, said = generate("masked segments")
    assert not said
    lines = code[code.index("def call(") :].splitlines()
    launched = [i for i, line in enumerate(lines) if ".run(" in line]
    keys = [re.search(r"arg0_1, (arg\d+_1)", lines[i]) for i in launched if "decode_kernel" in lines[i]]
    assert [found and found[1] for found in keys] == ["arg2_1", "arg4_1", "arg6_1"]
    between = [line for line in lines[launched[0] : launched[-1]] if ".run(" not in line]
    assert not [line for line in between if not re.match(r"(?m)^ *(#.*|(raw_)?stream0 = .*|)$", line)]


@pytest.mark.skipif(not NATIVE, reason="PyTorch 2.11 runs the Python code first")
def test_cpp_wrapper_launches_natively() -> None:
    code, said = generate("two layers", cpp_wrapper=True)
    assert not said
    assert "tatten::" not in code
    assert code.count("    call_decode_kernel_") == code.count("    call_combine_kernel_") == 2
    if NATIVE_PDL:
        launches = dict(re.findall(r"launchKernel\((\w+)_kernel_\d+, .*, (true|false)\);", code))
        pdl = {name for name, launched in launches.items() if launched == "true"}
        assert pdl == {"decode", "combine"}
    code, said = generate("project", cpp_wrapper=True)
    assert not said
    assert "tatten::" not in code
    assert code.count("    call_project_heads_kernel_") == 1


@pytest.mark.parametrize(
    "case, kernel",
    [
        *((case, "decode_kernel") for case in ("prefix", "128 heads", "unrounded")),
        ("project", "project_heads_kernel"),
    ],
)
def test_a_package_does_without_gluon(case: str, kernel: str) -> None:
    code, said = generate(case, package=True)
    assert not said
    assert "torch.ops.tatten" not in re.sub(r"^#.*$", "", code, flags=re.M)
    assert kernel in code


@pytest.mark.parametrize(
    "case, kernels",
    [
        ("merge", {"merge_states"}),
        ("invariant", {"bits", "list", "decode", "combine"}),
        ("rows", {"row_groups", "decode", "combine"}),
        ("capped segments", {"decode", "combine"}),
        ("16 heads", {"decode", "combine"}),
        ("project", {"project_heads"}),
    ],
)
def test_other_ops(case: str, kernels: set[str]) -> None:
    code, said = generate(case)
    assert not said
    assert set(re.findall(r"^ +(\w+)_kernel_\d+\.run\(", code, re.M)) == kernels


@functools.cache
def python_calls(case: str) -> tuple[dict[str, PreparedCall], list[tuple[str, list[str]]], list[str]]:
    """Return the callables of generated code for kernels in Gluon, their calls with the arguments, and the messages."""
    code, said = generate(case)
    names = {x.__name__: x for x in (Bytes, PreparedCall, PreparedLaunch, TmaTiles)}
    assert "from tatten.ops.cuda.prepared import Bytes, PreparedCall, PreparedLaunch, TmaTiles\n" in code
    defined = {name: eval(source, names) for name, source in re.findall(r"^(tatten_\w+) = (.*)", code, re.M)}
    calls = re.findall(r"^ +(tatten_\w+)\((.*)\)$", code, re.M)
    return defined, [(name, given.split(", ")) for name, given in calls], said


@pytest.mark.parametrize(
    "case, kernels",
    [
        ("prefix", ["_prefix_kernel", "_decode_kernel", "_combine_kernel"]),
        ("128 heads", ["_latent_kernel", "_combine_kernel"]),
        ("unrounded", ["_latent_few_kernel", "_combine_kernel"]),
        ("masked latents", ["_bits_kernel", "_list_kernel", "_latent_kernel", "_combine_kernel"]),
    ],
)
def test_kernels_in_gluon_are_launched_by_python(case: str, kernels: list[str]) -> None:
    defined, calls, said = python_calls(case)
    assert not said
    assert "torch.ops.tatten" not in re.sub(r"^#.*$", "", generate(case)[0], flags=re.M)
    ((name, given),) = calls
    launches = defined[name].launches
    assert [launch.kernel for launch in launches] == kernels
    numbers = {*leaves([launch.tensors for launch in launches])}
    assert numbers == {*range(len(given))}, "each tensor is given, and each that is given is read"
    tiles = [(given[x.tensor], x.block) for launch in launches for x in launch.tensors if isinstance(x, TmaTiles)]
    if case == "prefix":
        assert tiles == [("arg1_1", (128, 128)), ("arg2_1", (128, 128))]
    else:
        assert tiles == [("arg2_1", (64, 256)), ("arg3_1", (64, 64))]


def leaves(x: Any) -> Iterator[int]:
    """The numbers of tensors."""
    if isinstance(x, (Bytes, TmaTiles)):
        yield x.tensor
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from leaves(y)
    elif x is not None:
        yield x


def test_a_large_kv_is_read_by_tma() -> None:
    """Python launches what the op would launch, with descriptors for Triton."""
    defined, calls, said = python_calls("large")
    assert not said
    assert "torch.ops.tatten" not in re.sub(r"^#.*$", "", generate("large")[0], flags=re.M)
    ((name, given),) = calls
    (decode,) = defined[name].launches
    assert decode.kernel == "_decode_kernel"
    assert decode.arguments["TMA"]
    tiles = [(given[x.tensor], x.block) for x in decode.tensors if isinstance(x, TmaTiles)]
    block = decode.arguments["RUN_N"], 128
    assert tiles == [("arg1_1", block), ("arg2_1", block)]
    assert {*leaves(decode.tensors)} == {*range(len(given))}


def test_layers_in_gluon_use_memory_again() -> None:
    defined, calls, said = python_calls("latent layers")
    assert not said
    (first, _), (second, _) = calls
    assert first != second
    assert repr(defined[first]) == repr(defined[second])
    lines = generate("latent layers")[0].splitlines()
    at = [i for i, line in enumerate(lines) if re.match(rf" +({first}|{second})\(", line)]
    allocated = [line for line in lines[at[0] : at[1]] if "empty_strided_cuda((" in line]
    assert len(allocated) <= 1, "only the second layer's queries are new"
    read = [{*given} for _, given in calls]
    blocks = re.search(r"list_kernel_\d+\.run\(.*?, (buf\d+),", generate("latent layers")[0])
    assert blocks
    assert {"arg1_1", "arg2_1", "arg3_1", blocks[1]} <= read[0] & read[1]


def test_keys_may_be_the_values() -> None:
    defined, calls, said = python_calls("keys as values")
    assert not said
    ((name, given),) = calls
    tiles = [x for x in defined[name].launches[0].tensors if isinstance(x, TmaTiles)]
    assert [given[x.tensor] for x in tiles] == ["arg1_1", "arg1_1"]


def test_gluon_wants_tensors_that_are_known_to_be_aligned() -> None:
    """A launch is compiled for the alignment of its first tensors, and TMA wants multiples of 16 bytes."""
    defined, calls, said = python_calls("views of latents")
    assert len(defined) == len(calls) == 1
    assert len(said) == 1
    assert re.search(
        r"stays opaque to Inductor \[not_recordable\] .*takes \w+, which may begin at any address", said[0]
    )


def test_gluon_wants_no_tensor_within_another() -> None:
    """PyTorch 2.11 computes the latents twice here, once for a buffer of their own."""
    code, said = generate("latents within")
    if called := re.search(r"^ +tatten_\w+\(\w+, arg4_1, (\w+), ", code, re.M):
        assert f" {called[1]} = empty_strided_cuda(" in code
    else:
        assert re.search(r"\[not_recordable\] .*takes buf\d+, which may begin at any address", said[0])


@pytest.mark.skipif(not NATIVE, reason="PyTorch 2.11 runs the Python code first")
def test_cpp_wrapper_calls_ops_in_gluon() -> None:
    code, said = generate("128 heads", cpp_wrapper=True)
    assert "tatten_op" not in code
    (line,) = said
    assert "[not_recordable] NotRecordableError: launches the latent_sm90 kernel, which is in Gluon" in line


@pytest.mark.skipif(not NATIVE, reason="PyTorch 2.11 runs the Python code first")
def test_cpp_wrapper_reads_a_large_kv_without_tma() -> None:
    code, said = generate("large", cpp_wrapper=True)
    assert not said
    assert "tatten::" not in code
    assert code.count("    call_decode_kernel_") == 1


@pytest.mark.parametrize("case, lowered, why", STAY_OPAQUE)
def test_stays_opaque(case: str, lowered: bool, why: str) -> None:
    code, said = generate(case, lowered)
    assert "torch.ops.tatten." in re.sub(r"^#.*$", "", code, flags=re.M)
    assert len(said) == 1
    assert f"stays opaque to Inductor {why}" in said[0]
