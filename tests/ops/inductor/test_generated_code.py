"""Inductor's generated code for the ops: launches of their kernels, with memory of its own. For a made-up H200."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compiled
import pytest
import torch
from compiled import compile_in_subprocess

from tatten.ops.cuda.bound_kernel import BoundLaunch
from tatten.ops.cuda.prepared import Bytes, PreparedCall, PreparedLaunch, TmaTiles
from tatten.ops.cuda.recording import NotRecordableError
from tatten.ops.inductor.ir import TAKES_OPTIONS, check_options
from tatten.options import COMBINED

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the made-up GPU is for machines without one")

SCRIPT = Path(compiled.__file__).with_name("generate_code.py").read_text()

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
    "picked latents",
    "unrounded",
    "masked latents",
    "keys as values",
    "latents within",
    "latent layers",
    "views of latents",
    "mixed on Hopper",
    "mixed shared on Hopper",
    "shared pages on Hopper",
    "many shared pages",
    "shared pages of 8/8 heads",
    "mixed shared of 8/8 heads",
)
NATIVE = torch.__version__ >= "2.12"  # PyTorch 2.11 runs the Python code first, for which there is no GPU
NATIVE_PDL = torch.__version__ >= "2.15"  # before, PyTorch's C++ launches without programmatic dependent launch
EARLY = {"triton.enable_pdl": True}
LOWERED = (
    "two layers",
    "layers of one length",
    "layers of first keys",
    "invariant",
    "segments",
    "capped segments",
    "masked segments",
    "merge",
    "rows",
    "picks",
    "pages",
    "many pages",
    "mixed",
    "mixed shared",
    "paged latents",
    "shared pages",
    "16 heads",
    "views",
    "project",
    "index scores",
    "selection",
    "linears",
    "linears of one row",
    "fused linears",
)
RUNS: list[tuple[str, bool, dict[str, bool]]] = [
    *((case, True, {}) for case in LOWERED),
    *([(case, True, {"cpp_wrapper": True}) for case in ("two layers", "project")] if NATIVE else []),
    *([(case, True, {"cpp_wrapper": True}) for case in ("128 heads", "large")] if NATIVE else []),
    *((case, True, {}) for case in (*IN_GLUON, "large")),
    *((case, lowered, {}) for case, lowered, _ in STAY_OPAQUE),
    ("stored and read", True, EARLY),
    ("stored and read", False, EARLY),
    ("counters", True, EARLY),
    ("rotary", True, EARLY),
    ("rotary", True, EARLY | COMBINED),
    *(
        (case, True, {"package": True})
        for case in ("prefix", "128 heads", "unrounded", "project", "index scores", "mixed on Hopper")
    ),
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


def test_an_operand_of_several_layers_is_computed_once() -> None:
    code, said = generate("layers of one length")
    assert not said
    assert re.findall(r" (\w+)\.run\(arg3_1,", code) == ["triton_poi_fused_add_view_0"]


def test_a_part_of_an_operand_is_computed_alone() -> None:
    code, said = generate("layers of first keys")
    assert not said
    assert "empty_strided_cuda((2, 8, 64, 128)" in code
    assert "empty_strided_cuda((2, 8, 4096, 128)" not in code


def test_registers_are_limited_where_inductor_passes_the_limit_on() -> None:
    """Before PyTorch 2.15 it would drop it, and fewer programs than planned would share an SM."""
    for case, limited in (("many pages", TAKES_OPTIONS), ("many shared pages", True), ("pages", False)):
        code, said = generate(case)
        assert not said
        assert ("maxnreg" in code) == limited, case


def test_an_option_that_inductor_drops_is_refused() -> None:
    launch = BoundLaunch(SimpleNamespace(__name__="kernel"), {}, {}, (1,), {"num_warps": 4, "maxnreg": 128})
    if TAKES_OPTIONS:
        check_options(launch)
        return
    with pytest.raises(NotRecordableError, match=re.escape("launches kernel with ['maxnreg'], which Inductor drops")):
        check_options(launch)


def test_views_are_made_only_where_a_kernel_begins_elsewhere() -> None:
    """Sizes and strides are in the source of a kernel, so it needs an address alone."""
    code, said = generate("views")
    assert not said
    first, second, third = re.findall(r"decode_kernel_\d+\.run\((.*), arg2_1, arg3_1,", code)
    assert (first, second) == ("arg0_1", "arg1_1")
    assert re.fullmatch(r"reinterpret_tensor\(arg1_1, .*, 2048\)", third)


@pytest.mark.slow
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
        ("index scores", "index_scores_kernel"),
        ("mixed on Hopper", "ragged_kernel"),
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
        ("mixed", {"list_blocks", "ragged", "combine_shares"}),
        (
            "mixed shared",
            {"free_pages", "own_pages", "runs", "cut_runs", "list_shared", "decode", "ragged", "combine_shared"},
        ),
        ("pages", {"decode", "combine"}),
        ("paged latents", {"decode", "combine"}),
        ("shared pages", {"free_pages", "own_pages", "runs", "cut_runs", "decode", "combine"}),
        ("16 heads", {"decode", "combine"}),
        ("project", {"project_heads"}),
        ("index scores", {"index_scores"}),
        ("selection", {"count_scores", "write_picks"}),
        ("linears", {"skinny_linear"}),
        ("fused linears", {"fused_linear"}),
        ("linears of one row", {"one_row_linear", "skinny_linear"}),  # one of its calls asks for two parts
    ],
)
def test_other_ops(case: str, kernels: set[str]) -> None:
    code, said = generate(case)
    assert not said
    assert set(re.findall(r"^ +(\w+)_kernel_\d+\.run\(", code, re.M)) == kernels


def accesses_before_a_wait(code: str) -> list[str]:
    """The loads and stores of Inductor's kernels, and of the parts of a combined one, that come before a wait."""
    early = []
    for kernel in re.findall(r"^def triton_.*?^'''", code, re.M | re.S):
        waited = True
        for line in kernel.splitlines():
            if re.match(r"def triton_| *(el)?if pid", line):
                waited = False
            waited |= "gdc_wait()" in line
            early += [line.strip()] if re.search(r"tl\.(load|store|atomic)", line) and not waited else []
    return early


def test_kernels_wait_before_they_read_what_was_written_in_place() -> None:
    """Inductor alone lets a kernel read a cache before the kernel that writes to it has ended."""
    assert accesses_before_a_wait(generate("stored and read", False, **EARLY)[0])
    assert not accesses_before_a_wait(generate("stored and read", True, **EARLY)[0])


def test_counters_share_a_launch_that_waits() -> None:
    """Kernels before it may still read the counters."""
    code, _ = generate("counters", True, **EARLY)
    assert not accesses_before_a_wait(code)
    assert sorted(re.findall(r"^ +triton_(\w+?)_fused_\w+\.run\(", code, re.M)) == ["for", "poi"]


def test_kernels_of_a_rotary_embedding_are_combined() -> None:
    """Those of query, key and value; each part waits."""
    launches = []
    for options in (EARLY, EARLY | COMBINED):
        code, said = generate("rotary", True, **options)
        assert not said
        assert not accesses_before_a_wait(code)
        launches.append(len(re.findall(r"^ +triton_\w+\.run\(", code, re.M)))
        assert len(re.findall(r"^ +(?:decode|combine)_kernel_\d\.run\(", code, re.M)) == 2
    assert launches == [5, 2]


def test_pages_are_read_where_the_pool_has_them() -> None:
    code, _ = generate("pages")
    launches = re.findall(r"decode_kernel_\d+\.run\((.*)", code)
    assert len(launches) == 2
    for given in launches:  # keys begin with the pool, values behind a page of keys
        assert re.search(r"arg1_1, reinterpret_tensor\(arg1_1, .*, 16384\), arg3_1, arg2_1", given), given
    assert "index" not in re.sub(r"^#.*$", "", code[code.index("def call(") :], flags=re.M)


def test_latents_and_rope_are_read_as_columns_of_a_pool() -> None:
    code, _ = generate("paged latents")
    (given,) = re.findall(r"decode_kernel_\d+\.run\((.*)", code)
    assert re.search(r"arg2_1, .*arg1_1, reinterpret_tensor\(arg2_1, .*, 512\), arg3_1, ", given), given


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
        ("picked latents", ["_picked_sm90_kernel", "_combine_splits_kernel"]),
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
    else:  # picked rows are gathered without TMA
        assert tiles == ([] if case == "picked latents" else [("arg2_1", (64, 256)), ("arg3_1", (64, 64))])


@pytest.mark.parametrize(
    "case, kernels",
    [
        ("mixed on Hopper", ["_list_blocks_kernel", "_pages_kernel", "_combine_shares_kernel"]),
        ("shared pages on Hopper", ["_pages_kernel", "_decode_kernel", "_combine_kernel"]),
        ("shared pages of 8/8 heads", ["_pages_kernel", "_decode_kernel", "_combine_kernel"]),
        *(
            (case, ["_list_shared_kernel", "_pages_kernel", "_pages_kernel", "_combine_shared_kernel"])
            for case in ("mixed shared on Hopper", "mixed shared of 8/8 heads")
        ),
    ],
)
def test_boxes_of_pages_are_those_of_the_pool(case: str, kernels: list[str]) -> None:
    defined, calls, said = python_calls(case)
    assert not said
    assert len(calls) == 2
    for name, _ in calls:
        launches = defined[name].launches
        assert [launch.kernel for launch in launches] == kernels
        for launch in launches:
            if launch.kernel == "_pages_kernel":
                key, value = [x for x in launch.tensors if isinstance(x, TmaTiles)]
                assert (key.block, key.heads_last) == (value.block, value.heads_last) == ((16, 128), True)
                assert key.tensor != value.tensor


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
    if called := re.search(r"^ +tatten_\w+\(\w+, arg4_1, (?:reinterpret_tensor\()?(buf\d+), ", code, re.M):
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
