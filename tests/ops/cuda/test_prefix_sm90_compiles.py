"""The prefix kernel compiles for Hopper on a machine without a GPU, and its loop is what it was written to be.

A subprocess runs `plan_prefix_attention` on tensors that have no data, and compiles the kernel for the arguments that
it would launch it with.
"""

from __future__ import annotations

import re

import pytest
from compiled import TRITON_3_6, compile_in_subprocess
from slow import slow_but

SCRIPT = """
import json, sys
import torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import prefix_sm90

launches = []
prefix_sm90._prefix_kernel = Recorder(prefix_sm90._prefix_kernel, launches)
dtype, dim = getattr(torch, json.loads(sys.argv[1])), int(sys.argv[2])
key = torch.empty(1, 8, 1000, dim, dtype=dtype, device="meta")
for padding in (0, 4):  # with strides of query that 16 bytes divide, and do not
    query = torch.empty(64, 32, 1, dim + padding, dtype=dtype, device="meta")[..., :dim]
    prefix_sm90.plan_prefix_attention(query, key, key, 0.1, 132)(query, key, key)
print(json.dumps([compile_launch(*launch, sass=True) for launch in launches]))
"""


@pytest.mark.drawn(2, "compiled for Hopper")
@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["bfloat16", "float16"]))
@pytest.mark.parametrize("dim", slow_but([64], [64, 128]))
def test_compiles_for_sm_90(dtype: str, dim: int) -> None:
    aligned, unaligned = compile_in_subprocess(SCRIPT, dtype, dim)
    # Of Triton 3.9, six words for the start and the end of a visit: `assert_overlaps` sees none of them in the loop.
    spilled = 0 if dim == 64 or TRITON_3_6 else 24
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
