"""The example of a vLLM backend, held to the stored contract of vLLM 0.33, which is not installed, and to float64."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_contract
from torch import Tensor

import tatten
from tatten.ops.page_runs import ENTRY_STOPS

EXAMPLE = Path(__file__).parents[2] / "examples/vllm_backend.py"
CONTRACT = vllm_contract.stored()
HEADS, KV_HEADS, D, PAGE, BLOCKS, COLUMNS = 4, 2, 16, 16, 60, 12
WINDOW = 20


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, module in vllm_contract.stub(CONTRACT).items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("vllm_backend", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "vllm_backend", module)
    spec.loader.exec_module(module)
    return module


def inherited(bases: list[str]) -> tuple[set[str], dict[str, str]]:
    """The attributes and methods that vLLM's classes give to a class with these bases."""
    attributes, methods = set[str](), dict[str, str]()
    for base in bases:
        facts = CONTRACT[vllm_contract.BACKEND].get(base.partition("[")[0])
        if facts is not None:
            above = inherited(facts["bases"])
            attributes |= above[0] | {x.rstrip("=") for x in facts["attributes"].split(", ")}
            methods |= above[1] | facts["methods"]
    return attributes, methods


def test_version() -> None:
    assert CONTRACT["version"] == "0.33.0"
    assert "vLLM 0.33" in EXAMPLE.read_text()


def test_signatures() -> None:
    """Overriding methods take what vLLM's take, under the same names; and nothing is an override by mistake."""
    own: dict[str, list[str]] = {}
    overridden = 0
    for name, facts in vllm_contract.classes(ast.parse(EXAMPLE.read_text())).items():
        attributes, methods = inherited(facts["bases"])
        for method, signature in facts["methods"].items():
            if method not in methods:
                own.setdefault(name, []).append(method)
                continue
            overridden += 1
            theirs, ours = (vllm_contract.names_of(x) for x in (methods[method], signature))
            assert ours[: len(theirs)] == theirs, (name, method)
            assert all(x.endswith("=") for x in ours[len(theirs) :]), (name, method)
            kind = methods[method].partition("(")[0].replace("abstractmethod", "").split()
            assert signature.partition("(")[0].split() == kind, (name, method)
        for attribute in facts["attributes"].split(", "):
            if facts["attributes"] and attribute.rstrip("=") not in attributes:
                own.setdefault(name, []).append(attribute)
    assert overridden == 10
    assert own == {
        "TattenMetadata": ["tokens", "starts", "lens", "table", "decode", "shared"],
        "TattenMetadataBuilder": ["find_shared"],
        "TattenImpl": ["pools", "do_kv_cache_update"],
    }


def test_calls_of_the_layer(example: Any) -> None:
    """The layer's calls bind, as they are written there."""
    backend = example.TattenBackend
    for name, called in (
        ("impl_cls", backend.get_impl_cls()),
        ("forward", backend.get_impl_cls()(1, 1, 1.0).forward),
        ("do_kv_cache_update", backend.get_impl_cls()(1, 1, 1.0).do_kv_cache_update),
    ):
        arguments = [x for x in CONTRACT["calls"][name].split(", ") if not x.startswith("**")]
        by_name = dict.fromkeys(x[:-1] for x in arguments if x.endswith("="))
        inspect.signature(called).bind(*(x for x in arguments if not x.endswith("=")), **by_name)
    assert backend.forward_includes_kv_cache_update is False


def test_register(example: Any) -> None:
    example.register()
    (name, path), *more = sys.modules[vllm_contract.REGISTRY].registered.items()
    module, _, attribute = path.rpartition(".")
    assert not more
    assert name == example.TattenBackend.get_name() == "TATTEN"
    assert getattr(sys.modules[module], attribute) is example.TattenBackend
    assert CONTRACT[vllm_contract.REGISTRY]["register_backend"].startswith("backend, class_path=")


class Engine:
    """Stands for vLLM's runner and one layer: a cache in its layout, and tables, slots and lengths of each step."""

    def __init__(self, example: Any, dtype: torch.dtype, heads_first: bool, window: int | None, **options: Any):
        self.generator = torch.Generator().manual_seed(0)
        shape = (BLOCKS, KV_HEADS, PAGE, 2 * D) if heads_first else (BLOCKS, PAGE, KV_HEADS, 2 * D)
        cache = torch.full(shape, torch.nan, dtype=dtype)
        self.layer = SimpleNamespace(kv_cache=cache if heads_first else cache.transpose(1, 2))
        self.window, self.dtype = window, dtype
        spec = SimpleNamespace(sliding_window=window, block_size=PAGE)
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"layer": self.layer}))
        backend = example.TattenBackend
        self.builder = backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
        arguments = (HEADS, D, 0.3, KV_HEADS, None, window, "auto", options.get("softcap", 0), "decoder", None)
        self.impl = backend.get_impl_cls()(*arguments, sinks=options.get("sinks"))
        self.texts: list[tuple[Tensor, Tensor]] = []  # the keys and values of each sequence
        self.tables: list[list[int]] = []
        free = (torch.randperm(BLOCKS - 2, generator=self.generator) + 1).tolist()  # vLLM keeps block 0
        self.free = [*free, BLOCKS - 1]  # the last block is taken first: slot -1 would be in it

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def admit(self, like: int | None = None, shared: int = 0) -> int:
        """Add a sequence without keys, or one that has the first full blocks of another in common."""
        key, value = self.texts[like] if like is not None else (self.randn(0, KV_HEADS, D),) * 2
        self.texts.append((key[: shared * PAGE], value[: shared * PAGE]))
        self.tables.append(self.tables[like][:shared] if like is not None else [])
        return len(self.texts) - 1

    def step(self, new: dict[int, int], more_rows: int = 0, more_tokens: int = 0, beyond: int = 0) -> Any:
        """Run a step of these sequences with so many new tokens, and hold its output to float64.

        Padding is rows without tokens, tokens that the metadata counts, and tokens beyond these.
        """
        lens, starts, slots = [], [0], []
        table = torch.zeros(len(new) + more_rows, COLUMNS, dtype=torch.int32)
        for row, (i, n) in enumerate(new.items()):
            past = len(self.texts[i][0])
            self.texts[i] = tuple(torch.cat((x, self.randn(n, KV_HEADS, D))) for x in self.texts[i])  # type: ignore
            while len(self.tables[i]) * PAGE < past + n:
                self.tables[i].append(self.free.pop())
            slots += [self.tables[i][j // PAGE] * PAGE + j % PAGE for j in range(past, past + n)]
            lens.append(past + n)
            starts.append(starts[-1] + n)
            table[row, : len(self.tables[i])] = torch.tensor(self.tables[i])
            if self.window is not None:  # blocks that slid out of the window are replaced by block 0
                table[row, : max(0, past - self.window) // PAGE] = 0
        tokens = starts[-1] + more_tokens
        fields = {
            "query_start_loc": torch.tensor(starts + [starts[-1]] * more_rows, dtype=torch.int32),
            "query_start_loc_cpu": None,
            "seq_lens": torch.tensor(lens + [0] * more_rows, dtype=torch.int32),
            "num_reqs": len(table),
            "num_actual_tokens": tokens,
            "max_query_len": max(new.values()),
            "max_seq_len": COLUMNS * PAGE,
            "block_table_tensor": table,
            "slot_mapping": torch.tensor(slots + [-1] * more_tokens),
        }
        common = sys.modules[vllm_contract.BACKEND].CommonAttentionMetadata(**fields)
        metadata = self.builder.build(0, common)

        inputs = tokens + beyond
        query, key, value = (self.randn(inputs, heads, D) for heads in (HEADS, KV_HEADS, KV_HEADS))
        for i, start, stop in zip(new, starts, starts[1:], strict=False):
            for x, all_of_it in zip((key, value), self.texts[i], strict=True):
                x[start:stop] = all_of_it[len(all_of_it) - (stop - start) :]
        self.impl.do_kv_cache_update(self.layer, key, value, self.layer.kv_cache, fields["slot_mapping"])
        output = torch.full((inputs, HEADS, D), torch.nan, dtype=self.dtype)
        arguments = (self.layer, query, key, value, self.layer.kv_cache, metadata)
        self.impl.forward(*arguments, output=output, output_scale=None, output_block_scale=None)

        want = [self.attend(query[a:b], i) for i, a, b in zip(new, starts, starts[1:], strict=False)]
        accuracy = {"rtol": 0, "atol": 1e-5} if self.dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(output[: starts[-1]].double(), torch.cat(want), **accuracy)
        assert not output[starts[-1] : tokens].any()
        assert output[tokens:].isnan().all()
        return metadata

    def attend(self, query: Tensor, i: int) -> Tensor:
        """Attention of the last tokens of a sequence, in float64."""
        key, value = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in self.texts[i])
        scores = torch.einsum("qhd,khd->hqk", query.double(), key) * self.impl.options["scale"]
        if softcap := self.impl.options["softcap"]:
            scores = torch.tanh(scores / softcap) * softcap
        at, places = torch.arange(len(key)), torch.arange(len(key))[len(key) - len(query) :, None]
        seen = (at <= places) & (at > places - (self.window or len(key)))
        scores = scores.masked_fill(~seen, -torch.inf)
        if (sinks := self.impl.options["sinks"]) is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(query), 1)), dim=2)
        return torch.einsum("hqk,khd->qhd", scores.softmax(2)[..., : len(key)], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("heads_first", [True, False], ids=["HND", "NHD"])
@pytest.mark.parametrize("kind", ["plain", "window", "softcap", "sinks"])
def test_steps(kind: str, heads_first: bool, dtype: torch.dtype, example: Any) -> None:
    """Prefills, chunks of them beside decode steps, decode steps with shared pages, and padding of all sorts."""
    options = {"softcap": {"softcap": 3.0}, "sinks": {"sinks": torch.linspace(-1, 2, HEADS)}}.get(kind, {})
    engine = Engine(example, dtype, heads_first, WINDOW if kind == "window" else None, **options)
    first, second = engine.admit(), engine.admit()
    engine.step({first: 90, second: 3})
    third = engine.admit(first, shared=5)
    assert not engine.step({second: 1, third: 13, first: 1}, more_tokens=3).decode
    assert not engine.step({second: 1, third: 9, first: 4}, more_rows=2, more_tokens=2).decode
    assert not engine.step({second: 2, first: 1}, more_rows=1, beyond=5).decode  # as many rows as tokens
    for padding in (0, 3, 0):
        assert engine.step({first: 1, third: 1, second: 1}, more_rows=padding, more_tokens=padding).decode
    assert not engine.step({first: 1, third: 1, second: 1}, more_tokens=2).decode  # more tokens than rows
    assert engine.step({first: 1, third: 1}, beyond=6).decode
    assert not engine.step({first: 3, third: 3}).decode  # speculative


def test_shared_pages_once_a_step(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found in `build`, for all layers, and are where a captured graph reads them."""
    finds, used = [], []
    find, attend, attend_mixed = tatten.shared_pages, tatten.decode_attention, tatten.paged_attention

    def finding(*args: Any, **kwargs: Any) -> Any:
        found = find(*args, **kwargs)
        finds.append(found.data.clone())
        return found

    def attending(*args: Any, **kwargs: Any) -> Any:
        used.append(kwargs["shared_pages"])
        return (attend if "kv_lens" in kwargs else attend_mixed)(*args, **kwargs)

    monkeypatch.setattr(tatten, "shared_pages", finding)
    monkeypatch.setattr(tatten, "decode_attention", attending)
    monkeypatch.setattr(tatten, "paged_attention", attending)
    engine = Engine(example, torch.float32, True, None)
    first = engine.admit()
    engine.step({first: 140})
    second, third = engine.admit(first, shared=8), engine.admit()
    steps = [{second: 7, third: 20}, *(dict.fromkeys(rows, 1) for rows in ([first, second], [third, first]))]
    kept = [engine.step(step).shared for step in [*steps, {second: 1, first: 1}]]
    assert len(finds) == len(used) == 5
    assert all(x is kept[0] for x in kept + used[1:])
    assert [bool(data[ENTRY_STOPS].any()) for data in finds] == [False, False, True, False, True]
    assert torch.equal(kept[0].data, finds[4])
    beside_a_chunk = engine.step({first: 1, second: 1, third: 30})
    assert beside_a_chunk.shared is used[5] is not kept[0]
    assert finds[5][ENTRY_STOPS].any()


def test_no_search_under_a_window(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tatten, "shared_pages")
    engine = Engine(example, torch.float32, True, WINDOW)
    first = engine.admit()
    engine.step({first: 50})
    assert engine.step({first: 1}).shared is None


def test_before_there_is_a_cache(example: Any) -> None:
    engine = Engine(example, torch.float32, True, None)
    output = torch.full((3, HEADS, D), torch.nan)
    assert engine.impl.forward(engine.layer, output, output, output, torch.tensor([]), None, output) is output
    assert not output.any()


def test_what_is_refused(example: Any) -> None:
    with pytest.raises(NotImplementedError, match="`alibi_slopes` must be None"):
        example.TattenImpl(HEADS, D, 1.0, KV_HEADS, [0.5] * HEADS)
    engine, scale = Engine(example, torch.float32, True, None), torch.ones(())
    with pytest.raises(NotImplementedError, match="`output_scale` and `output_block_scale` must be None"):
        engine.impl.forward(engine.layer, *(scale,) * 4, None, scale, output_scale=scale)
