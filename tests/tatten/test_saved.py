"""Everything that is saved loads in a process that doesn't import tatten, or says what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import aot_compile
from torch.fx import Graph, GraphModule

import tatten
from tatten.passes.calls import calls_ops

STEP = """
import sys, torch, torch.nn.functional as F
def step(q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True)
torch.manual_seed(0)
keys, values = torch.randn(2, 2, 2, 4096, 64)  # so many that a rewrite pays
args = torch.randn(2, 16, 1, 64), keys, values, torch.arange(4096)[None, None, None] < 99
torch.set_grad_enabled(False)
path = sys.argv[1]
"""
SAVE = """
compiled = torch.compile(step, backend="tatten", fullgraph=True).aot_compile((args, {}))
compiled.save_compiled_function(path)
"""
LOAD = """
compiled = torch.compiler.load_compiled_function(open(path, "rb"))
torch.testing.assert_close(compiled(*args), step(*args))
assert "tatten" in sys.modules
"""
PRECOMPILE = """
compiled = torch.compile(step, backend="tatten")
torch.testing.assert_close(compiled(*args), step(*args))
torch.compiler.save_cache_artifacts()
print(dict(torch._dynamo.utils.counters["tatten"]), torch._dynamo.utils.counters["dynamo_cache"])
"""


def run(code: str, path: Path, **env: str) -> str:
    script = path.with_suffix(".py")  # of one name for all processes: PyTorch keys what it caches by it
    script.write_text(STEP + code)
    command = [sys.executable, "-W", "ignore", str(script), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.drawn(2, "whole programs")
@pytest.mark.skipif(
    "serialize"
    not in Path(aot_compile.__file__).read_text().split("def aot_compile_fullgraph")[1].split("\nclass ")[0],
    reason="aot_compile of this PyTorch takes Inductor alone, and refuses other backends when it compiles",
)
def test_aot_compile(tmp_path: Path) -> None:
    run(SAVE, tmp_path / "step")
    run(LOAD, tmp_path / "step")


@pytest.mark.drawn(2, "whole programs")
def test_caching_precompile(tmp_path: Path) -> None:
    env = {"TORCH_CACHING_PRECOMPILE": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    first, second = (run(PRECOMPILE, tmp_path / "step", **env) for _ in range(2))
    assert "rewritten" in first
    assert "dynamo_cache_hit" in second


def test_graphs_that_call_ops() -> None:
    graph = Graph()
    call = graph.call_function(F.relu, (graph.placeholder("x"),))
    graph.output(call)
    gm = GraphModule({}, graph)
    assert not calls_ops(gm)
    call.target = torch.ops.tatten.merge_states.default
    assert calls_ops(gm)
    outer = Graph()
    outer.output(outer.call_module("body", (outer.placeholder("x"),)))
    assert calls_ops(GraphModule({"body": gm}, outer))


class Step(torch.nn.Module):
    def forward(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, mask)


def test_the_report_of_an_exported_program_says_what_it_needs() -> None:
    args = torch.randn(1, 8, 1, 64), *torch.randn(2, 1, 8, 4096, 64), torch.arange(4096)[None] < 100
    with torch.no_grad():
        program = torch.export.export(Step(), args)
        plain = torch.export.export(torch.nn.ReLU(), args[:1])
    with tatten.recording() as report:
        tatten.rewrite(program)
        tatten.rewrite(plain)
    needs = "a process that loads the program has to import tatten first, unless its ops are decomposed"
    assert [graph.note for graph in report.graphs] == [needs, ""]
