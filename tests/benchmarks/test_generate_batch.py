"""`benchmarks/generate_batch.py` bounds each candidate, and its FlashAttention-3 is called with the right pages."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

if Version(transformers.__version__) < Version("5.24"):
    pytest.skip("it is for the continuous batching of transformers 5.24", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import generate_batch
from support import batches, flash_pages, models
from support.batch_settings import SETTINGS, Setting
from transformers import PreTrainedModel, modeling_flash_attention_utils
from transformers.generation.continuous_batching import initialization

pytestmark = pytest.mark.usefixtures("collections_skip_older_objects")
SMALL = Setting("llama", 4, 5, 40, 6, page=8)
Rows = Callable[[str], list[dict[str, Any]]]


def args_for(**changes: Any) -> argparse.Namespace:
    fixed = {"device": "cpu", "layers": None, "batch_tokens": 24, "rounds": 1}
    return argparse.Namespace(**(fixed | changes))


def greedy(model: PreTrainedModel, what: Setting, seed: int) -> list[list[int]]:
    model.set_attn_implementation("eager")
    fixed = {"max_new_tokens": what.new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    texts = what.inputs(model.config.vocab_size, seed)
    return [model.generate(torch.tensor([x]), **fixed)[0, len(x) :].tolist() for x in texts]


@pytest.mark.parametrize("name, candidate", [("llama", "sdpa"), ("gemma3_text", "tatten"), ("gpt_oss", "sdpa")])
def test_figures_of_one_candidate(name: str, candidate: str) -> None:
    what = Setting(name, 4, 5, 40, 6, page=8)
    row = generate_batch.measure(candidate, what, args_for())
    assert row["tokens_per_second"] == pytest.approx(4 * 6 / row["seconds"])
    assert 0 < row["host_ms"] < row["seconds"] * 1e3
    assert row["pool_bytes"] > 0
    assert row["texts"] == greedy(models.build(models.shape(name, tiny=True), "cpu", torch.float32), what, 1)


@pytest.fixture
def flash_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often keys were written in place, and how often there was attention; transformers would ask for CUDA."""
    calls = {"_write_plainly": 0, "_plain": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            calls[name] += 1
            return function(*given, **more)

        return call

    for name in calls:
        monkeypatch.setattr(flash_pages, name, counted(name, getattr(flash_pages, name)))
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    utils = modeling_flash_attention_utils
    monkeypatch.setattr(utils, "_lazy_imports", utils._lazy_imports)
    yield calls
    utils._loaded_implementation = None


def test_flash_attention_has_the_tokens_of_generate(flash_on_a_cpu: dict[str, int]) -> None:
    row = generate_batch.measure("fa3", SMALL, args_for())
    assert row["texts"] == greedy(models.build(models.shape("llama", tiny=True), "cpu", torch.float32), SMALL, 1)
    assert 0 < flash_on_a_cpu["_write_plainly"] < flash_on_a_cpu["_plain"]


def test_flash_attention_with_windows(flash_on_a_cpu: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding layers never decode in place, and neither does a model that has any."""
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", _off)
    what = Setting("gemma3_text", 3, 5, 90, 6, page=8)
    row = generate_batch.measure("fa3", what, args_for(batch_tokens=32))
    assert row["texts"] == greedy(models.build(models.shape("gemma3_text", tiny=True), "cpu", torch.float32), what, 1)
    assert flash_on_a_cpu["_write_plainly"] == 0


def _off(config: object, cb_config: transformers.ContinuousBatchingConfig, user_requested: bool) -> None:
    cb_config.max_blocks_per_request = 0


def test_the_writer_of_decode_steps() -> None:
    from support.page_writer import write_tokens

    torch.manual_seed(0)
    table = torch.tensor([[5, 2, -1], [0, -1, -1], [-1, -1, -1], [3, 4, 1]], dtype=torch.int32)
    before = torch.tensor([5, 3, -1, 8], dtype=torch.int32)
    key = torch.randn(4, 3, 6).view(4, 1, 3, 6)
    value = torch.randn(3, 4, 6).transpose(0, 1)[:, None]  # heads before tokens, as layers make them
    pools = [torch.randn(6, 4, 3, 6) for _ in "kv"]
    expected = [x.clone() for x in pools]
    write_tokens(*pools, key, value, before, table)
    flash_pages._write_plainly(*expected, key, value, before, table)
    assert all(torch.equal(a, b) for a, b in zip(pools, expected, strict=True))
    assert torch.equal(pools[0][2, 1], key[0, 0])


def test_missing_texts_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build(models.shape("llama", tiny=True), "cpu", torch.float32)
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: 1 / 0)
    batches.make_manager(model, SMALL)
    with pytest.raises(RuntimeError, match=r"of 4 sequences, with errors .*division by zero"):
        batches.draw(model, SMALL, 0)
    model.destroy_cached_continuous_batching_manager()


def test_steps_count_while_all_sequences_decode() -> None:
    early, late = [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 13.0], [9.0, 10.1, 11.1, 12.1, 13.1, 13.2, 13.3]
    assert batches._step_ms([early, late]) == pytest.approx(1000)
    assert batches._step_ms([early, [13.0, 14.0]]) is None


def test_the_pool_holds_the_workload() -> None:
    forks = Setting("llama", 4, 4096, 4096, 256, samples=16)
    assert forks.blocks * 0.85 > 4 * 16 + 64 * 1 + 1  # each sample has a page of its own, and the first a fraction
    for settings in SETTINGS.values():
        for what in settings.values():
            assert all(what.shortest <= n <= what.longest for n in what.lengths)
            assert len(what.lengths) == what.prompts


def test_the_host_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_batch, "HOST", {"cpu": Setting("llama", 3, 20, 20, 8, page=8)})
    row = generate_batch.measure_host("sdpa", args_for(batch_tokens=None))
    assert row["parts_ms"].keys() == {"prepare", "launch", "update"}
    assert row["host_ms"] == pytest.approx(sum(row["parts_ms"].values()))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The rows of a command on a CPU."""

    def rows(options: str) -> list[dict[str, Any]]:
        path = tmp_path / "x.json"
        monkeypatch.setattr(sys, "argv", ["generate_batch.py", *options.split(), "--json", str(path)])
        generate_batch.main()
        return json.loads(path.read_text())["rows"]

    return rows


def test_a_candidate_beyond_its_limit_costs_no_other_figures(run: Rows) -> None:
    (row,) = run("--settings a --only sdpa --limit 0.1")
    assert row == {"setting": "a", "candidate": "sdpa", "left_out": "took longer than 0.1 s"}


def test_candidates_that_cannot_run(run: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"tatten": [[1, 2, 3], [4, 5, 6]], "fa3": [[1, 2, 9], [4, 5, 6]]}
    figures = {"tokens_per_second": 2.0, "seconds": 1.0, "step_ms": None, "host_ms": 0.1, "first_call_s": 3.0}
    figures |= {"weight_bytes": 1, "pool_bytes": 1, "peak_bytes": None, "layers": 2}

    def in_a_process(name: str, *_: object) -> dict[str, Any] | str:
        return (
            "ValueError: no"
            if name == "sdpa"
            else {"candidate": name, "texts": texts[name.partition("_")[0]], **figures}
        )

    monkeypatch.setattr(generate_batch, "in_a_process", in_a_process)
    found = {row["candidate"]: row for row in run("--settings a")}
    assert found["fork"]["left_out"] == "nothing is shared"
    assert found["sdpa"]["left_out"] == "ValueError: no"
    assert (found["tatten"]["alike"], found["fa3"]["alike"]) == (3, 2.5)
    assert found["tatten"]["prompts"] == SETTINGS["cpu"]["a"].prompts


@pytest.mark.slow
def test_on_a_cpu(run: Rows) -> None:
    rows = run("--settings a b --only sdpa fork --limit 900 --rounds 1 --new-tokens 4")
    assert [(x["setting"], x["candidate"]) for x in rows if "left_out" not in x] == [
        ("a", "sdpa"),
        ("b", "sdpa"),
        ("b", "fork"),
    ]
    assert all(x["tokens_per_second"] > 0 for x in rows if "left_out" not in x)
