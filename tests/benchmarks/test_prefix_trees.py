"""`benchmarks/prefix_trees.py` is right, and so are its calls of peers, for which PyTorch stands in."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from support import grouped_rows, merge_levels, peers, prefix_tree_peers
from support.prefix_tree_cases import PUBLISHED, Tree, trees
from support.prefix_tree_peers import LEVELS, cascade, compose, pages_of
from support.prefix_tree_problem import Problem, fastest, measure

TREES = [Tree("test", (1, 2, 6), (20, 16, 5), 8, 2, 64), Tree("test", (2, 4), (7, 33), 4, 4, 64)]


def state(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and lse of `[batch, heads, rows, d]`, kv heads repeated."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for x in (k, v))
    scores = q.float() @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1)


def fa3(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: None, max_q: int, max_k: int, *, seqused_k: Tensor):
    """FlashAttention-3 as `peers.fa3` calls it: tokens of sequences one after the other, a batch of keys."""
    assert cu_k is None
    assert (len(cu_q), int(cu_q.diff().max())) == (len(k) + 1, max_q)
    assert k.shape[1] == max_k
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for i, used in enumerate(seqused_k.tolist()):
        at = slice(int(cu_q[i]), int(cu_q[i + 1]))
        found = state(q[None, at].transpose(1, 2), *(x[i : i + 1, :used].transpose(1, 2) for x in (k, v)))
        out[at], lse[:, at] = found[0][0].transpose(0, 1), found[1][0]
    return out, lse


class Cascade:
    """FlashInfer's wrapper: attention over the pages that it is told at each level."""

    def __init__(self, levels: int, workspace: object, layout: str) -> None:
        assert layout == "NHD"

    def plan(self, starts, page_starts, pages, used, q_heads, kv_heads, head_dim, page, q_data_type) -> None:
        self.levels = list(zip(starts, page_starts, pages, used, strict=True))

    def run(self, q: Tensor, kv: Tensor) -> Tensor:
        outs, lses = torch.empty(len(self.levels), *q.shape), torch.empty(len(self.levels), *q.shape[:2])
        for level, (starts, page_starts, pages, used) in enumerate(self.levels):
            assert int(starts[-1]) == len(q)
            for i, last in enumerate(used.tolist()):
                own = kv[pages[int(page_starts[i]) : int(page_starts[i + 1])].long()].transpose(0, 1).flatten(1, 2)
                length = own.shape[1] - peers.PAGE + last
                at = slice(int(starts[i]), int(starts[i + 1]))
                found = state(q[None, at].transpose(1, 2), *own[:, None, :length].transpose(2, 3))
                outs[level, at], lses[level, at] = found[0][0].transpose(0, 1).float(), found[1][0].t()
        return (lses.softmax(0).unsqueeze(-1) * outs).sum(0).to(q.dtype)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "fa3", lambda: fa3)
    monkeypatch.setattr(peers, "cudnn_state", lambda q, k, v: (state(q, k, v)[0], state(q, k, v)[1].unsqueeze(-1)))
    monkeypatch.setattr(peers, "flash_state", state)
    monkeypatch.setattr(peers, "has_flashinfer", lambda: True)
    monkeypatch.setattr(peers, "workspace", lambda: None)
    module = types.ModuleType("flashinfer")
    module.MultiLevelCascadeAttentionWrapper = Cascade
    monkeypatch.setitem(sys.modules, "flashinfer", module)


def errors(p: Problem, attention: Callable[[int], Tensor]) -> float:
    return max(p.error(copy, attention(copy)) for copy in p.exact)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
@pytest.mark.parametrize("kernel", LEVELS)
def test_compositions(kernel: str, tree: Tree, stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel gets what it wants at each level; its device is only asked whether there is such a kernel."""
    p = Problem(tree, "cpu")
    attention = compose([LEVELS[kernel](tree, i, "cuda" if kernel == "cudnn" else "cpu") for i in range(tree.levels)])
    assert errors(p, lambda copy: attention(p.q[copy], p.keys[copy], p.values[copy])) < 1e-2


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_cascade(tree: Tree, stand_ins: None) -> None:
    p = Problem(tree, "cpu")
    attention = cascade(tree, "cpu")
    assert attention is not None
    assert errors(p, lambda copy: attention(p.q[copy], pages_of(tree, p.keys[copy], p.values[copy]))) < 1e-2


def test_merge_kernel(stand_ins: None) -> None:
    """States as different kernels leave them, with strides of their own."""
    if torch.cuda.is_available():
        pytest.skip("in the interpreter")
    tree = TREES[0]
    p = Problem(tree, "cpu")
    kinds = ("fa3", "cpu"), ("cudnn", "cuda"), ("flash", "cpu")
    levels = [LEVELS[kind](tree, i, device) for i, (kind, device) in enumerate(kinds)]
    kv = zip(p.keys[0], p.values[0], strict=True)
    states = [level(p.q[0], k, v) for level, (k, v) in zip(levels, kv, strict=True)]
    assert len({out.stride() for out, _ in states}) > 1
    assert p.error(0, merge_levels.merge_levels(states)) < 1e-2
    assert p.error(0, merge_levels.merge_levels_reference(states)) < 1e-2
    assert p.error(0, merge_levels.merge_levels_reference(states[1:])) > 0.1


def test_published_trees() -> None:
    found = [tree for source in PUBLISHED["cuda"] for tree in trees(source, "cuda")]
    assert [sum(tree.source == source for tree in found) for source in ("pat", "fasttree")] == [80, 45]
    assert len({(tree.source, tree.name, tree.q_heads, tree.kv_heads) for tree in found}) == 125
    for tree in found:
        assert len(tree.nodes) == len(tree.lengths)
        assert all(tree.batch % n == 0 for n in tree.nodes)
        assert tree.q_heads % tree.kv_heads == 0
        assert tree.kv_bytes * tree.copies("cuda") < 20e9


def test_measured_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing and wrong candidates are left out with the reason, and none of them is the best."""
    tree = trees("fasttree", "cpu")[0]
    row = measure(tree, "cpu", ["tatten", "fa3", "flash", "cascade"], 1)
    assert row["us"].keys() == {"tatten", "flash"}
    assert row["best"] == "flash"
    assert row["ratio"] == row["us"]["tatten"] / row["us"]["flash"]
    assert row["left_out"] == {
        "fa3": "RuntimeError: fa3 not installed",
        "cascade": "RuntimeError: not installed",
    }
    monkeypatch.setattr(prefix_tree_peers, "merge_levels_reference", lambda states: states[0][0].flatten(0, 1)[:, :, 0])
    row = measure(tree, "cpu", ["tatten", "flash"], 1)
    assert row["ratio"] is None
    assert row["left_out"].keys() == {"flash"}


def test_picked_kernels(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest alone at each level; one that fails is not picked."""

    def broken(tree: Tree, level: int, device: str) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setitem(LEVELS, "fa3", broken)
    assert fastest(Problem(TREES[0], "cpu"), list(LEVELS)) == ("flash",) * 3


def test_groups() -> None:
    sizes = grouped_rows.TINY
    rows = grouped_rows.measure(sizes, "cpu", (1e3, 1e5), 1)
    assert [(r["groups"], r["given"], r["batch"]) for r in rows] == [
        ("regular", "blocks", 16),
        ("regular", "groups", 16),
        ("regular", "rows", 16),
        ("dropped", "groups", 13),
        ("dropped", "rows", 13),
        ("skewed", "groups", 16),
        ("skewed", "rows", 16),
        ("dropped", "copied", 13),
    ]
    assert (rows[0]["over_regular"], rows[0]["added_us"]) == (1, 0)
    assert all(r["error"] < 1e-2 for r in rows)
    assert grouped_rows.replay(sizes, "cpu") < 1e-2


def test_group_sizes() -> None:
    found = grouped_rows.groups(grouped_rows.Sizes())
    assert {name: len(rows) for name, rows in found.items()} == {"regular": 128, "dropped": 115, "skewed": 128}
    assert sorted(found["skewed"].count(i) for i in range(8)) == [1] * 7 + [121]
    assert set(found["dropped"]) == set(range(8))


def test_wrong_groups_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    p = grouped_rows.Problem(grouped_rows.TINY, "cpu")
    prompts = grouped_rows.groups(p.sizes)["regular"]
    inputs = p.segments(len(prompts))
    with pytest.raises(ArithmeticError, match="relative error"):
        grouped_rows.checked(p, prompts[::-1], lambda: grouped_rows.attend(*inputs, None))
    assert math.isnan(p.error(prompts, torch.full_like(p.q, math.nan)))
