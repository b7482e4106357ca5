"""The wide kernel compiles for Hopper on a machine without a GPU, and its loop is what it was written to be.

A subprocess calls `wide_attention_gluon` with tensors that have no data, and compiles the kernel for the arguments that
it would launch it with.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import json, re, subprocess, sys, tempfile
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from tatten.ops import gluon_wide

NAMES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
launches, kernel = [], gluon_wide._wide_kernel

class Recorder:
    def __getitem__(self, grid):
        return lambda *args, **options: launches.append((args, options))

def compile(args, options):
    signature, constants, attrs = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        x = args[i] if i < len(args) else options.pop(name)
        if i >= len(args):
            signature[name], constants[name] = "constexpr", x
        elif isinstance(x, torch.Tensor):
            signature[name], attrs[(i,)] = NAMES[x.dtype], [["tt.divisibility", 16]]
        elif hasattr(x, "block_shape"):
            signature[name] = f"tensordesc<{NAMES[x.base.dtype][1:]}{x.block_shape},{x.layout!r}>"
        else:
            signature[name] = "fp32" if isinstance(x, float) else "i32"
    source = GluonASTSource(kernel, signature, constants, attrs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        def read(tool, option):
            command = [getattr(triton.knobs.nvidia, tool).path, option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        # ptxas spills to a stack, which PTX does not show
        stack = int(re.search(r"STACK:(\\d+)", read("cuobjdump", "-res-usage")).group(1))
        sass = read("nvdisasm", "-c")
    metadata = {name: getattr(built.metadata, name) for name in ("shared", "launch_pdl")}
    return {"ptx": built.asm["ptx"], "sass": sass, "stack": stack, "version": triton.__version__, **metadata}

gluon_wide._wide_kernel = Recorder()
dtype, dim = getattr(torch, sys.argv[1]), int(sys.argv[2])
key = torch.empty(1, 8, 1000, dim, dtype=dtype, device="meta")
for padding in (0, 4):  # with strides of query that 16 bytes divide, and do not
    query = torch.empty(64, 32, 1, dim + padding, dtype=dtype, device="meta")[..., :dim]
    gluon_wide.wide_attention_gluon(query, key, key, 0.1, 132)
print(json.dumps([compile(*launch) for launch in launches]))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_compiles_for_sm_90(dtype: str, dim: int) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, dtype, str(dim)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    aligned, unaligned = json.loads(done.stdout.splitlines()[-1])
    # Of Triton 3.9, six words for the start and the end of a visit: `assert_overlaps` sees none of them in the loop.
    spilled = 0 if dim == 64 or aligned["version"].startswith("3.6.") else 24
    for built, stack in ((aligned, spilled), (unaligned, 0)):
        assert built["stack"] <= stack, "registers spill to local memory"
        assert built["shared"] <= 227 * 1024
        assert built["launch_pdl"], "griddepcontrol.wait would not wait"
        assert_uses_hopper(built["ptx"], {"bfloat16": "bf16", "float16": "f16"}[dtype])
        assert_waits_first(built["ptx"])
        assert_overlaps(built["sass"])


def assert_uses_hopper(ptx: str, dtype: str) -> None:
    mma = rf"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.{dtype}\.{dtype} *\{{[^{{}}]*\}}, *"
    assert re.search(mma + r"%rd", ptx), "Q is not taken from shared memory"
    assert re.search(mma + r"\{[^{}]*\}, *%rd", ptx), "the weights are not taken from registers"
    assert "cp.async.bulk.tensor.4d.shared" in ptx
    # More in sum than the three warpgroups start with would hang.
    assert re.search(r"\.maxnreg 168\b", ptx)
    assert {"232", "40"} <= set(re.findall(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+(\d+)", ptx))


def assert_waits_first(ptx: str) -> None:
    """Once, before anything is read, the kernel waits for the one before, and then lets the next one start."""
    wait, release = (list(re.finditer(rf"griddepcontrol\.{name}\b", ptx)) for name in ("wait", "launch_dependents"))
    assert len(wait) == len(release) == 1
    first_read = min(ptx.index(read) for read in ("ld.global", "cp.async.bulk.tensor"))
    assert wait[0].start() < release[0].start() < first_read
    before, after = ptx[: wait[0].start()], ptx[release[0].end() :]
    for label in re.findall(r"^(\$L__BB\w+):", before, re.MULTILINE):
        assert not re.search(rf"bra.*{re.escape(label)}\b", after), "in a loop"


def assert_overlaps(sass: str) -> None:
    """In both consumers the softmax of a tile is beside P@V of the tile before, and the loop does not spill."""
    labels = {label[1]: label.start() for label in re.finditer(r"^(\.L_x_\d+):", sass, re.MULTILINE)}
    branches = [(labels[branch[1]], branch.end()) for branch in re.finditer(r"\bBRA\b.*`\((\.L_x_\d+)\)", sass)]
    waits = [wait.start() for wait in re.finditer(r"gsb0, 0x1\b", sass)]  # for Q@K, with P@V still under way
    assert len(waits) == 2
    for wait in waits:
        softmax = sass[wait:].split("gsb0, 0x0", 1)[0]
        assert softmax.count("MUFU.EX2") >= 64, "ptxas moved the softmax behind the wait for P@V"
        start, end = max((start, end) for start, end in branches if start < wait < end)
        assert sass[start:end].count("HGMMA") >= 12
        assert not re.search(r"\b(LDL|STL)\b", sass[start:end]), "the loop over tiles spills"
