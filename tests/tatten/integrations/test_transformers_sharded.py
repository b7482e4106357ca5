"""`generate` over a sharded cache on several gloo ranks: each draws the tokens that one process draws."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from ranks import run_ranks, run_torchrun
from slow import slow_but
from tiny_models import GQA, PROMPT, prompts
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import CompileConfig
from transformers.masking_utils import create_chunked_causal_mask

import tatten.backend
from tatten.integrations.transformers import ShardedKVCache, cache_kwargs
from tatten.integrations.transformers.config import cache_argument
from tatten.integrations.transformers.registration import attention

NEW = 6
NAMES = ["llama", "mistral_window", "qwen3", "gemma3", "llama4", "gpt2", "gpt_bigcode", "opt"]
if "block_sequence_ids" not in inspect.signature(create_chunked_causal_mask).parameters:
    NAMES.remove("llama4")  # `generate` of this transformers has no static cache for chunked attention

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 2},
}


def build(name: str) -> transformers.PreTrainedModel:
    return tiny_models.build(name, "tatten")


def generate(model: transformers.PreTrainedModel, ids: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
    torch.manual_seed(0)
    return model.generate(ids, attention_mask=mask, **({"max_new_tokens": NEW} | kwargs))


def one_dim() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("kv",))


def sharded(model: transformers.PreTrainedModel, capacity: int = PROMPT + NEW) -> ShardedKVCache:
    return ShardedKVCache(model.config, one_dim(), capacity)


def check_generate(names: list[str], padded: bool) -> None:
    ids, mask = prompts(padded)
    for name in names:
        model = build(name)
        for mode, options in MODES.items():
            want = generate(model, ids, mask, **options)
            cache = sharded(model)
            got = generate(model, ids, mask, **cache_kwargs(cache), **options)
            assert torch.equal(got, want), f"{name}, {mode}"
            assert cache.batch_size == len(ids) * (1 if mode == "greedy" else 2)
            assert int(cache.get_seq_length()) == PROMPT + NEW - 1


@pytest.mark.drawn(2, "compiled decoding with transformers")
@pytest.mark.parametrize("padded", [False, True], ids=["one", "padded"])
@pytest.mark.parametrize("n", slow_but([2], [1, 2, 3, 4]))
def test_generate(n: int, padded: bool) -> None:
    run_ranks(n, check_generate, NAMES if n == 3 else ["llama", "gemma3"], padded)


def check_tensor_parallel(names: tuple[str, str]) -> list[Tensor]:
    """Heads on one dim of the mesh, the sequence on the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    ids, mask = prompts(True)
    whole, split = build("llama"), build("llama")
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    for layer in split.model.layers:
        plan = {f"self_attn.{name}": ColwiseParallel() for name in columns[:3]}
        plan |= {f"mlp.{name}": ColwiseParallel() for name in columns[3:]}
        plan |= {"self_attn." + rows[0]: RowwiseParallel(), "mlp." + rows[1]: RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
    tokens = []
    for options in MODES.values():
        cache = ShardedKVCache(split.config, mesh, PROMPT + NEW, heads="tp")
        tokens.append(generate(split, ids, mask, **cache_kwargs(cache), **options))
        assert torch.equal(tokens[-1], generate(whole, ids, mask, **options))
        assert cache.nbytes * 4 == cache.batch_size * 2 * 2 * 2 * 16 * 4 * cache.capacity
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("names", [("tp", "kv"), ("kv", "tp")], ids=str)
def test_tensor_parallel_weights(names: tuple[str, str]) -> None:
    run_ranks(4, check_tensor_parallel, names)


def check_two_levels() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    model, (ids, mask) = build("llama"), prompts(True)
    cache = ShardedKVCache(model.config, mesh, PROMPT + NEW, sequence=("node", "gpu"))
    got = generate(model, ids, mask, **cache_kwargs(cache), do_sample=False)
    assert torch.equal(got, generate(model, ids, mask, do_sample=False))


@pytest.mark.slow
def test_two_levels() -> None:
    run_ranks(4, check_two_levels)


def counting(graphs: list[torch.fx.GraphModule], options: dict[str, Any] | None) -> Callable[..., Any]:
    """A backend that records its graphs: tatten with options, or eager Dynamo without."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm if options is None else tatten.backend.tatten(gm, inputs, options=options)

    return backend


def check_compiled(name: str, options: dict[str, Any] | None, padded: bool) -> int:
    model, (ids, mask) = build(name), prompts(padded)
    graphs: list[torch.fx.GraphModule] = []
    config = CompileConfig(backend=counting(graphs, options), mode=None, fullgraph=True)
    config._compile_all_devices = True  # transformers compiles on accelerators only, unless told
    want = generate(model, ids, mask, do_sample=False)
    with tatten.recording() as report:
        for _ in range(2):
            got = generate(model, ids, mask, **cache_kwargs(sharded(model)), compile_config=config, do_sample=False)
            assert torch.equal(got, want)
    assert options is None or "2 of 2 attention calls rewritten" in str(report)
    return len(graphs)


@pytest.mark.drawn(2, "compiled decoding with transformers")
@pytest.mark.parametrize(
    "options", slow_but([{"inner": "eager"}], [None, {"inner": "eager"}]), ids=["dynamo", "tatten"]
)
@pytest.mark.parametrize(
    "name, padded", slow_but([("llama", True)], [("llama", True), ("llama", False), ("gemma3", True)])
)
def test_compiled_generate(name: str, options: dict[str, Any] | None, padded: bool) -> None:
    """One graph for all steps, and for the next cache."""
    assert run_ranks(2, check_compiled, name, options, padded) == [1, 1]


@pytest.mark.slow
def test_compiled_generate_through_inductor() -> None:
    assert run_ranks(2, check_compiled, "llama", {}, True, seconds=400.0) == [1, 1]


def check_compiled_forward(options: dict[str, Any] | None) -> list[int]:
    model, (ids, mask) = build("llama"), prompts(True)
    wants = [generate(model, ids, mask, do_sample=False, max_new_tokens=new) for new in (4, 8)]
    graphs: list[torch.fx.GraphModule] = []
    counts = []
    model.forward = torch.compile(model.forward, backend=counting(graphs, options))
    for want in wants:
        new = want.shape[1] - PROMPT
        cache = sharded(model, PROMPT + 8)
        got = generate(model, ids, mask, **cache_kwargs(cache), do_sample=False, max_new_tokens=new)
        assert torch.equal(got, want)
        counts.append(len(graphs))
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("options", [None, {"inner": "eager"}], ids=["dynamo", "tatten"])
def test_compiled_forward(options: dict[str, Any] | None) -> None:
    """More tokens need no more graphs. The prefill has a graph break where the cache is allocated."""
    for short, long in run_ranks(2, check_compiled_forward, options):
        assert short == long


def check_goes_on() -> None:
    """A second turn adds several tokens at once, and a reset cache is used again."""
    model, (ids, mask) = build("llama"), prompts(True)
    cache = sharded(model, 40)
    for _ in range(2):
        first = generate(model, ids, mask, **cache_kwargs(cache), do_sample=False)
        turn = torch.cat([first, ids.flip(1)[:, :5]], dim=1)
        seen = torch.cat([mask, torch.ones(3, turn.shape[1] - PROMPT, dtype=torch.int64)], dim=1)
        second = generate(model, turn, seen, **cache_kwargs(cache), do_sample=False)
        assert torch.equal(second, generate(model, turn, seen, do_sample=False))
        assert int(cache.get_seq_length()) == turn.shape[1] + NEW - 1
        cache.reset()
        assert cache.get_seq_length() == 0


@pytest.mark.slow
def test_goes_on() -> None:
    run_ranks(3, check_goes_on)


def check_selects() -> None:
    """Batches of the same size, smaller and larger ones; a second turn goes on from what was selected."""
    model, (ids, mask) = build("llama"), prompts(True)
    for order in ([2, 0, 1], [1], [2, 0, 0, 1], "twice"):
        cache = sharded(model, 40)
        turn = generate(model, ids, mask, **cache_kwargs(cache), do_sample=False)
        seen = torch.cat([mask, torch.ones(3, NEW, dtype=torch.int64)], dim=1)
        if order == "twice":
            index = torch.arange(3).repeat_interleave(2)
            cache.batch_repeat_interleave(2)
        else:
            index = torch.tensor(order)
            cache.batch_select_indices(index)
        assert cache.batch_size == len(index)
        got = generate(model, turn[index], seen[index], **cache_kwargs(cache), do_sample=False)
        assert torch.equal(got, generate(model, turn[index], seen[index], do_sample=False))
    with pytest.raises(IndexError, match="`indices` must be 0 to 5, as the cache holds 6 sequences, got 6"):
        cache.batch_select_indices(torch.tensor([0, 6]))
    assert cache.batch_size == 6


def test_selected_and_repeated_sequences() -> None:
    run_ranks(2, check_selects)


def test_assisted_decoding_is_refused() -> None:
    run_ranks(1, check_assisted)


def check_assisted() -> None:
    model, (ids, mask) = build("llama"), prompts(False)
    error, says = NotImplementedError, "cannot be cropped.*generate without them, or with a DynamicCache"
    if cache_argument(model) == "cache":  # from transformers 5.24 on `generate` asks first, and has words of its own
        error, says = ValueError, "Assisted decoding requires a cache that can be cropped"
    with pytest.raises(error, match=says):
        generate(model, ids, mask, **cache_kwargs(sharded(model, 40)), do_sample=False, prompt_lookup_num_tokens=2)


def check_limits(compiled: bool) -> None:
    model, (ids, mask) = build("llama"), prompts(True)
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = compiled
    cache = sharded(model, PROMPT + 2)
    with pytest.raises(ValueError, match="`capacity` must hold 14 used and 1 new slots, got 14"):
        generate(model, ids, mask, **cache_kwargs(cache), do_sample=False, compile_config=config)
    with pytest.raises(ValueError, match="`capacity` must hold 0 used and 12 new slots, got 6"):
        generate(model, ids, mask, **cache_kwargs(sharded(model, 6)))


@pytest.mark.parametrize("compiled", slow_but([False], [False, True]))
def test_generating_past_the_capacity(compiled: bool) -> None:
    run_ranks(2, check_limits, compiled)


def check_answers() -> None:
    model, (ids, mask) = build("llama"), prompts(True)
    cache = sharded(model, 17)
    assert (cache.batch_size, cache.capacity, cache.nbytes, cache.get_seq_length()) == (-1, 18, 0, 0)
    assert cache.is_compileable
    assert cache.get_mask_sizes(PROMPT, 0) == (PROMPT, 0)
    model(ids, attention_mask=mask, **cache_kwargs(cache))
    assert (cache.batch_size, int(cache.get_seq_length()), cache.get_max_length()) == (3, PROMPT, 18)
    assert cache.get_mask_sizes(2, 0) == (18, 0)
    assert cache.nbytes == 2 * 2 * 3 * 2 * 9 * 16 * 4
    with pytest.raises(NotImplementedError, match="ShardedKVCache cannot be cropped"):
        cache.crop(-1)

    mesh = one_dim()
    other = transformers.LlamaConfig(**GQA)
    assert len(ShardedKVCache(other, mesh, 4).layers) == len(ShardedKVCache(2, mesh, 4).layers) == 2
    other._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=r"`config` must be .* attn_implementation=\"tatten\", got 'sdpa'"):
        ShardedKVCache(other, mesh, 4)
    with pytest.raises(ValueError, match=r"attention only.*got 'linear_attention' in layer 0"):
        ShardedKVCache(transformers.Qwen3NextConfig(**GQA, head_dim=16), mesh, 4)
    with pytest.raises(ValueError, match="`sequence` must name dims of the mesh"):
        ShardedKVCache(2, mesh, 4, "sp")

    layer, (q, k) = ShardedKVCache(1, mesh, 8).layers[0], torch.randn(2, 1, 2, 1, 16).unbind()
    layer.update(k, k)
    keys, values = layer.update(k, k)
    for name in ("softcap", "s_aux", "position_bias"):
        with pytest.raises(ValueError, match=f"`{name}` must be None"):
            attention(nn.Module(), q, keys, values, torch.ones(1, 1, 1, 8).bool(), **{name: 1.0})
    with pytest.raises(ValueError, match="`attention_mask` must exclude the unused slots"):
        attention(nn.Module(), q, keys, values, None)
    additive = torch.zeros(1, 1, 1, 8)
    additive[..., 2:] = -torch.inf
    want = F.scaled_dot_product_attention(q, torch.cat([k, k], 2), torch.cat([k, k], 2), scale=0.1)
    got, weights = attention(nn.Module(), q, keys, values, additive, scaling=0.1)
    torch.testing.assert_close(got, want.transpose(1, 2))
    assert weights is None
    # PyTorch has no kernel for this on a CPU.
    narrow = ShardedKVCache(1, mesh, 8).layers[0]
    narrow.update(k, k[..., :5])
    narrow.update(k, k[..., :5])
    got, _ = attention(nn.Module(), q, *narrow.kv.append(k, k[..., :5]), additive, scaling=0.1)
    torch.testing.assert_close(got, want[..., :5].transpose(1, 2))


def test_answers_to_transformers() -> None:
    run_ranks(2, check_answers)


@pytest.mark.slow
def test_attention_without_a_sharded_cache_is_that_of_transformers() -> None:
    ids, mask = prompts(True)
    for name in NAMES:
        model = build(name)
        for cache in ("dynamic", "static"):
            got = generate(model, ids, mask, do_sample=False, cache_implementation=cache)
            model.set_attn_implementation("sdpa")
            assert torch.equal(got, generate(model, ids, mask, do_sample=False, cache_implementation=cache))
            model.set_attn_implementation("tatten")


@pytest.mark.slow
def test_example() -> None:
    """Two ranks under torchrun; one rank without it."""
    example = str(Path(__file__).parents[3] / "examples/tree_decode.py")
    options = ["--prompt-len", "64", "--new-tokens", "4", "--lengths", "64", "256"]
    two = run_torchrun(2, example, *options)
    command = [sys.executable, example, *options]
    one = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert "tokens: identical on all ranks and in one process (4)" in two
    assert "tokens: identical on all ranks and in one process (4)" in one
    rows = [line.split() for line in two.splitlines() if line.endswith("x")]
    assert [row[5:7] for row in rows] == [["2,112", "32,768"], ["2,112", "131,072"]]
