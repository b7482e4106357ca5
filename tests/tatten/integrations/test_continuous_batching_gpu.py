"""`generate_batch` on pages on a GPU: with CUDA graphs and asynchronous batching, and without."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from typing import Any

import pytest
import torch
import transformers

if not transformers.__version__.startswith("5.24"):
    pytest.skip("no other transformers was tested", allow_module_level=True)

from batched_models import MODELS, SHARING, batching, behind, build, greedy, prompts, quick, run_session
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import input_outputs

from tatten.integrations.transformers.continuous_batching import layer_pages, steps

pytestmark = pytest.mark.gpu
NEW = 24
LENGTHS = (130, 64, 200, 7, 131, 90)
WIDER = {"hidden_size": 128, "head_dim": 64, "max_position_embeddings": 1024}
CALM = {"use_cuda_graph": False, "use_async_batching": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {"page_size": 16, "num_blocks": 400, "max_batch_tokens": 512},
    "graphs, chunks": {"page_size": 64, "num_blocks": 100, "max_batch_tokens": 64},
    "graphs, large pages": {"page_size": 256, "num_blocks": 40, "max_batch_tokens": 256},
    "graphs, one batch at a time": {"page_size": 16, "num_blocks": 400, "use_async_batching": False},
    "graphs, decode steps alone": {"page_size": 16, "num_blocks": 400, "use_cuda_graph": (False, True)},
    "calm": {"page_size": 16, "num_blocks": 400, "max_batch_tokens": 96} | CALM,
}


@pytest.fixture(autouse=True)
def _no_old_graphs() -> None:
    """Graphs and memory pools of an earlier test that are freed while another one warms up or captures can abort."""
    gc.collect()


def on_gpu(name: str, dtype: torch.dtype) -> PreTrainedModel:
    window = {"sliding_window": 40} if "sliding_window" in MODELS[name][1] else {}
    return build(name, **(WIDER | window)).to("cuda", dtype)


def config(**options: Any) -> ContinuousBatchingConfig:
    return batching(**({"max_requests_per_batch": 32} | options))


def check_greedy(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    """Each token has the largest logit, up to rounding, in one forward over the whole text with "eager"."""
    assert len(tokens) == NEW
    assert behind(model, prompt, tokens) < (2e-3 if model.dtype == torch.float32 else 0.3)


def generate(
    model: PreTrainedModel, ids: list[list[int]], options: ContinuousBatchingConfig, n: int = 1, **others: Any
) -> list[list[int]]:
    with quick():
        results = model.generate_batch(
            ids, generation_config=greedy(NEW, n), continuous_batching_config=options, **others
        )
    assert [x.error for x in results.values() if x.error] == []
    return [x.generated_tokens for x in results.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens(name: str, setting: str, dtype: torch.dtype) -> None:
    if name == "gpt_oss" and dtype == torch.float32 and "graphs" in setting:
        pytest.skip("transformers' experts are not captured in float32")
    model, ids = on_gpu(name, dtype), prompts(LENGTHS, common=60)
    for prompt, tokens in zip(ids, generate(model, ids, config(**SETTINGS[setting])), strict=True):
        check_greedy(model, prompt, tokens)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_graphs_and_asynchronous_batches_are_on(name: str) -> None:
    model = on_gpu(name, torch.bfloat16)
    options = {"generation_config": greedy(NEW), "continuous_batching_config": config(page_size=16, num_blocks=400)}
    with quick(), model.continuous_batching_context_manager(**options) as manager:
        resolved = manager.continuous_batching_config
        assert tuple(resolved.use_cuda_graph) == (True, True)
        assert resolved.use_async_batching
        pairs = manager.batch_processor.inputs_and_outputs.io_pairs
        assert all(any(len(key) == 1 for key in x.device_io.graphs._storage) for x in pairs)  # those of decode steps


def test_a_late_reset_of_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy GPU, inputs may be reset after those of the first batch were copied and before they are read."""
    pair, inputs = input_outputs.HostDeviceIOPair, input_outputs.ContinuousBatchingAsyncIOs
    reset, get_model_kwargs = pair.reset, inputs.get_model_kwargs
    second = 2_000_000_000  # about its cycles
    delays, resets = [second], []

    @functools.wraps(reset)  # for the check of transformers' code
    def late_reset(self: Any) -> None:
        torch.cuda._sleep(second // 5)
        resets.append(self)
        reset(self)

    @functools.wraps(get_model_kwargs)
    def late_first_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = get_model_kwargs(self, *args, **kwargs)
        with torch.cuda.stream(self.compute_stream):
            if delays:
                torch.cuda._sleep(delays.pop())
        return batch

    model, ids = on_gpu("llama", torch.bfloat16), prompts(LENGTHS, common=60)
    options = config(page_size=16, num_blocks=400, max_batch_tokens=1024)
    with quick():
        manager = model.init_continuous_batching(greedy(NEW), continuous_batching_config=options)
        for session in range(2):
            if session == 1:  # all graphs are captured, so nothing synchronizes
                monkeypatch.setattr(pair, "reset", late_reset)
                monkeypatch.setattr(inputs, "get_model_kwargs", late_first_batch)
            for prompt, tokens in zip(ids, run_session(manager, ids, NEW, keep=session == 0), strict=True):
                check_greedy(model, prompt, tokens)
    assert len(resets) == 2
    assert not delays


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_forks_in_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that were captured for the forks of one batch find those of another, which share other pages."""
    calls: Counter[str] = Counter()
    found = steps.shared_pages

    def find(*args: Any, **kwargs: Any) -> Any:
        calls["captured" if torch.cuda.is_current_stream_capturing() else "found"] += 1
        return found(*args, **kwargs)

    monkeypatch.setattr(steps, "shared_pages", find)
    model = on_gpu(name, torch.bfloat16)
    options = config(page_size=16, num_blocks=600, max_batch_tokens=512)
    for seed, lengths in enumerate([(200, 130), (64, 300, 9)]):
        ids = prompts(lengths, common=48 * (1 - seed), seed=seed)
        tokens = generate(model, ids, options, n=5, persistent_manager=True, warmup=True)
        for i, answer in enumerate(tokens):
            check_greedy(model, ids[i // 5], answer)
    model.destroy_cached_continuous_batching_manager()
    assert calls["captured"] > 0
    assert calls["captured"] == calls["found"]  # once while transformers warms up, and once in the graph


@pytest.mark.parametrize("graphs", [True, False])
def test_forks_beside_a_chunk(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks of the second prompt are in steps with the forks of the first, which share pages there."""
    calls: Counter[str] = Counter()
    attend = layer_pages.paged_attention

    def paged(*args: Any, **kwargs: Any) -> Any:
        calls["shared" if kwargs.get("shared_pages") is not None else "apart"] += 1
        return attend(*args, **kwargs)

    monkeypatch.setattr(layer_pages, "paged_attention", paged)
    model, ids = on_gpu("llama", torch.bfloat16), prompts((300, 400))
    options = config(page_size=16, num_blocks=400, max_batch_tokens=64, **({} if graphs else CALM))
    for i, tokens in enumerate(generate(model, ids, options, n=4)):
        check_greedy(model, ids[i // 4], tokens)
    assert calls["shared"] > 0


@pytest.mark.parametrize("backend, options", [("inductor", None), ("tatten", None), ("tatten", {"decode": True})])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_compiled_decode_steps_in_graphs(name: str, backend: str, options: dict[str, bool] | None) -> None:
    """Each step is one graph of Dynamo, captured with the attention of all layers. Forks share pages."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, ids = on_gpu(name, torch.bfloat16), prompts(LENGTHS, common=60)
    mode = None if options else "default"
    compiling = CompileConfig(backend=backend, mode=mode, options=options, fullgraph=True, dynamic=True)
    batching = config(page_size=16, num_blocks=600, max_batch_tokens=512, decode_compile_config=compiling)
    for i, answer in enumerate(generate(model, ids, batching, n=3)):
        check_greedy(model, ids[i // 3], answer)
    # One graph serves a step of one request, and one any other number. Gemma 3 has two groups of layers. Its block
    # table is contiguous for a full batch, which takes a third graph.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= (3 if name == "gemma3" else 2)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_nothing_waits_for_the_gpu(name: str) -> None:
    """In a forward pass, the host reads nothing from the device."""
    model, ids = on_gpu(name, torch.bfloat16), prompts(LENGTHS, common=60)
    generate(model, ids, config(**SETTINGS["calm"]))  # compiles the kernels
    seen: Counter[int] = Counter()

    def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen[kwargs["input_ids"].shape[1]] += 1
        torch.cuda.set_sync_debug_mode("error")

    handles = [
        model.model.register_forward_pre_hook(begin, with_kwargs=True),
        model.model.register_forward_hook(lambda *args: torch.cuda.set_sync_debug_mode("default")),
    ]
    try:
        generate(model, ids, config(**SETTINGS["calm"]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        for handle in handles:
            handle.remove()
    assert len(seen) > 1


@pytest.mark.parametrize("space", [0.0, 0.1])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_more_requests_than_memory(name: str, space: float) -> None:
    """Requests that are put off are computed anew, or come back from the memory of the CPU."""
    model, ids = on_gpu(name, torch.bfloat16), prompts(LENGTHS * 2, common=60)
    options = config(page_size=16, num_blocks=40, max_batch_tokens=128, cpu_offload_space=space)
    for prompt, tokens in zip(ids, generate(model, ids, options), strict=True):
        check_greedy(model, prompt, tokens)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_sampled_tokens(name: str) -> None:
    """Samples are the same from the same seed, and differ."""
    model, ids = on_gpu(name, torch.bfloat16), prompts((90, 30))
    sampled = GenerationConfig(max_new_tokens=NEW, do_sample=True, num_return_sequences=4, eos_token_id=-1)
    with quick():
        drawn = [
            [
                x.generated_tokens
                for x in model.generate_batch(
                    ids, generation_config=sampled, continuous_batching_config=config(num_blocks=200, seed=5)
                ).values()
            ]
            for _ in range(2)
        ]
    assert drawn[0] == drawn[1]
    assert len({tuple(tokens) for tokens in drawn[0]}) > 4
    assert all(len(tokens) == NEW for tokens in drawn[0])


def test_the_models_that_share_pages() -> None:
    """The list that other tests use agrees with transformers."""
    for name in SHARING:
        model = on_gpu(name, torch.bfloat16)
        options = {"generation_config": greedy(NEW), "continuous_batching_config": config(num_blocks=200)}
        with quick(), model.continuous_batching_context_manager(**options) as manager:
            assert manager.batch_processor.cache.use_prefix_sharing
