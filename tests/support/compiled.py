"""Compiling kernels for Hopper on a machine without a GPU, for the arguments that they would be launched with.

`compile_in_subprocess` runs a script in an interpreter without TRITON_INTERPRET. There `Recorder`s stand in for kernels
and take launches down, and `compile_launch` compiles one of them.
"""

from __future__ import annotations

import functools
import json
import os
import re
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton

TRITON_3_6 = triton.__version__.startswith("3.6.")  # that of torch 2.11
FUSIBLE = re.compile(r"\b(?:mul|add|sub)\.(?:ftz\.)?f32")  # without `.rn` ptxas may make one instruction of two

_SHARED_STORE = re.compile(r"st\.shared(?:\.v(\d))?\.b(\d+)\s+\[global_smem(?:\+(\d+))?\]")
_SHARED_LOAD = re.compile(r"ld\.shared\S*\s.*\[\s*global_smem(?:\+(\d+))?\s*\]")

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def captures_over_reads(ptx: str) -> list[str]:
    """Return the loads from memory that a warp may overwrite before another warp has read it.

    `warp_specialize` stores the values that its partitions capture in shared memory, where a reduction before it may
    have left its result. Triton (3.6) puts no barrier between the loads of that result and the stores.
    """
    lines, overwritten = ptx.splitlines(), list[str]()
    for i in (i for i, line in enumerate(lines) if re.search(r"\bbarrier\.sync\s+1;", line)):
        stored = set[int]()
        for j in range(i - 1, -1, -1):
            if store := _SHARED_STORE.search(lines[j]):
                first = int(store[3] or 0)
                stored |= {*range(first, first + int(store[1] or 1) * int(store[2]) // 8)}
            elif (load := _SHARED_LOAD.search(lines[j])) and int(load[1] or 0) in stored:
                overwritten.append(lines[j].strip())
            elif re.search(r"\bbar(rier)?\.sync\b|\bret;", lines[j]):
                break
    return overwritten


def last_program_waits(ptx: str) -> bool:
    """Return True if the last program of a kernel, and no other, waits for the launch before after its last store."""
    end = ptx[ptx.rfind("st.global") :]
    guard = re.search(
        r"mov\.u32\s+(%r\d+), %nctaid\.x;\s+add\.s32\s+(%r\d+), \1, -1;\s+setp\.ne\.\w+\s+(%p\d+), (%r\d+), \2;"
        r"\s+@\3 bra\s+(\S+);\s+griddepcontrol\.wait",
        re.sub(r"^\s*(//|\.loc|\$L__tmp).*$", "", end, flags=re.M),
    )
    program = re.search(r"mov\.u32\s+(%r\d+), %ctaid\.x;", ptx)
    return guard is not None and program is not None and guard[4] == program[1]


FORK_SERVER = """
import json, os, sys, traceback
import compiled
from tatten.ops.cuda import decode, latent_sm90, prefix_sm90

for line in sys.stdin:
    script, args, output = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(output, os.O_WRONLY), 1)
        os.dup2(1, 2)
        sys.argv[1:], status = args, 1
        try:
            exec(compile(script, "script", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def compile_in_subprocess(script: str, *args: object) -> Any:
    """Return the last line that a script prints, from JSON; it gets `args` as JSON in `sys.argv`."""
    server = _fork_server()
    with tempfile.NamedTemporaryFile("r") as output:
        print(json.dumps([script, list(map(json.dumps, args)), output.name]), file=server.stdin, flush=True)
        if not select.select([server.stdout], [], [], 300)[0]:
            server.kill()
            _fork_server.cache_clear()
            raise AssertionError(f"still running after 300 s:\n{output.read()[-3000:]}")
        status, printed = server.stdout.readline().strip(), output.read()
        assert status == "0", printed[-3000:]
        return json.loads(printed.splitlines()[-1])


@functools.cache
def _fork_server() -> Any:
    """A process that has imported the kernels without TRITON_INTERPRET, and runs each script in a fork of itself."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, "-c", FORK_SERVER]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class Recorder:
    """In place of a kernel: launches are added to a list."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches, self.arg_names = kernel, launches, kernel.arg_names

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sass: bool = False) -> dict[str, Any]:
    """Compile a kernel for sm_90, specialised as Triton does at a launch: on None, 1 and multiples of 16.

    Raise AssertionError if `captures_over_reads` finds a race in it.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, constants, attrs, options = {}, {}, {}, dict(kwargs)

    def specialize(x: Any, path: tuple[int, ...], param: Any, do_not: bool) -> Any:
        """The type of an argument; members of a tuple are always specialised."""
        if isinstance(x, tuple) and not param.is_constexpr:
            kinds = [specialize(y, (*path, i), param, False) for i, y in enumerate(x)]
            return type(x)(*kinds) if hasattr(x, "_fields") else tuple(kinds)
        if param.is_constexpr or x is None or (type(x) is int and x == 1 and not do_not):
            constants[path] = x
            return "constexpr"
        if hasattr(x, "data_ptr") or (type(x) is int and x % 16 == 0 and not do_not):
            attrs[path] = [["tt.divisibility", 16]]
        return _kind(x)

    for i, param in enumerate(kernel.params):
        x = args[i] if i < len(args) else options.pop(param.name)
        signature[param.name] = specialize(x, (i,), param, param.do_not_specialize)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attrs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert not (lines := captures_over_reads(built.asm["ptx"])), f"{kernel.__name__}: captures overwrite reads: {lines}"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = _read("cuobjdump", "-res-usage", file.name)
        listing = _read("nvdisasm", "-c", file.name) if sass else ""
    return {
        "kernel": kernel.__name__,
        "ptx": built.asm["ptx"],
        "sass": listing,
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),  # ptxas spills to it, which PTX does not show
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "shared": built.metadata.shared,
        "launch_pdl": getattr(built.metadata, "launch_pdl", False),
        "threads": int(re.search(r"\.reqntid (\d+)", built.asm["ptx"])[1]),
    }


def _kind(x: Any) -> str:
    """The type of an argument in a kernel's signature."""
    import torch

    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64"}
    names |= {torch.float8_e4m3fn: "fp8e4nv", torch.int8: "i8", torch.int32: "i32", torch.uint8: "u8", torch.bool: "i1"}
    if isinstance(x, torch.Tensor):
        return "*" + names[x.dtype]
    if hasattr(x, "block_shape"):
        layout = f",{x.layout!r}" if hasattr(x, "layout") else ""
        return f"tensordesc<{names[x.base.dtype]}{str(list(x.block_shape)).replace(' ', '')}{layout}>"
    if isinstance(x, float):
        return "fp32"
    return "i32" if x < 2**31 else "i64"


def _read(tool: str, option: str, cubin: str) -> str:
    import triton

    command = [getattr(triton.knobs.nvidia, tool).path, option, cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
