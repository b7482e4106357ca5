"""Inductor's caches depend on the source of the ops, and a user's own pass stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from tatten.ops.inductor.custom_pass import (
    OPTION,
    LaunchesKernels,
    in_force,
    source_hash,
    with_lowerings,
)


class Counts(CustomGraphPass):
    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Graph) -> None:
        self.graphs += 1

    def uuid(self) -> str:
        return "counts"


def test_an_edited_or_renamed_file_changes_the_hash(tmp_path: Path) -> None:
    def hash_of(**files: str) -> str:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        (folder / "kernels").mkdir(parents=True)
        for name, text in files.items():
            (folder / "kernels" / f"{name}.py").write_text(text)
        return source_hash(folder)

    assert hash_of(a="x = 1", b="") == hash_of(a="x = 1", b="")
    assert len({hash_of(a="x = 1", b=""), hash_of(a="x = 2", b=""), hash_of(a="", b="x = 1"), hash_of(a="x = 1")}) == 4


def test_all_ops_are_hashed() -> None:
    assert LaunchesKernels().uuid() == (source_hash(),)
    folder = Path(source_hash.__wrapped__.__defaults__[0])
    assert (folder / "cuda/kernels/decode.py").exists()
    assert (folder / "cuda/tuning").is_dir()


def test_a_pass_of_the_users_runs_and_counts() -> None:
    own = Counts()
    options = with_lowerings({OPTION: own, "max_autotune": True})
    assert options["max_autotune"]
    options[OPTION](Graph())
    assert own.graphs == 1
    assert options[OPTION].uuid() == (source_hash(), "counts")
    with config.patch({OPTION: own}):
        assert with_lowerings({})[OPTION].before == [own]


def test_several_passes_of_the_users_run_in_order() -> None:
    ran = []

    class Runs(Counts):
        def __call__(self, graph: Graph) -> None:
            ran.append(self)

    own = [Runs(), Runs()]
    option = with_lowerings({OPTION: own})[OPTION]
    option(Graph())
    assert ran == own
    assert option.uuid() == (source_hash(), "counts", "counts")
    assert with_lowerings({OPTION: [Counts(), print]})[OPTION].uuid() is None


def test_a_pass_that_asks_for_it_is_told_whether_this_is_inference() -> None:
    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    if aware is None:
        pytest.skip("PyTorch has no such passes before 2.13")
    told = []

    class Aware(aware):  # type: ignore[misc, valid-type]
        def __call__(self, graph: Graph, is_inference: bool) -> None:
            told.append(is_inference)

        def uuid(self) -> str:
            return "aware"

    model = torch.compile(lambda x: x + 1, backend="inductor", options=with_lowerings({OPTION: [Aware(), Counts()]}))
    with torch.no_grad(), config.patch(fx_graph_cache=False):
        model(torch.ones(3))
    assert told == [True]


def test_a_pass_without_an_id_is_never_cached() -> None:
    assert LaunchesKernels(lambda graph: None).uuid() is None


def test_in_force_only_where_it_was_asked_for() -> None:
    assert not in_force()
    with config.patch(with_lowerings({})):
        assert in_force()
        assert with_lowerings({})[OPTION] is getattr(config, OPTION), "in a compile within a compile"
    assert not in_force()
