"""`generate` from a shared prefix over a mesh, on several gloo ranks: the tokens that one process draws."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
import transformers
from ranks import run_ranks
from slow import slow_but
from tiny_models import PROMPT, prompts
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import CompileConfig

import tatten.backend
from tatten.integrations.transformers import SharedPrefixCache, cache_kwargs

NEW, N = 6, 2

MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (1, {"do_sample": False}),
    "sampling": (N, {"do_sample": True, "num_return_sequences": N}),
    "beams": (N, {"do_sample": False, "num_beams": N}),
}


def build(name: str) -> transformers.PreTrainedModel:
    return tiny_models.build(name, "tatten")


def one_dim() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("kv",))


def generate(model: transformers.PreTrainedModel, ids: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
    torch.manual_seed(0)
    return model.generate(ids, attention_mask=mask, **({"max_new_tokens": NEW} | kwargs))


def prefilled(
    model: transformers.PreTrainedModel, ids: Tensor, mask: Tensor, mesh: DeviceMesh, **names: Any
) -> SharedPrefixCache:
    """Prefill all tokens but the last, in two parts: the second attends to DTensors."""
    cache = SharedPrefixCache(model.config, mesh=mesh, **names)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        for part in (slice(0, 7), slice(7, ids.shape[1] - 1)):
            seen = mask[:, : part.stop]
            model(ids[:, part], attention_mask=seen, position_ids=positions[:, part], **cache_kwargs(cache))
    return cache


def check_generate(names: list[str], padded: bool) -> None:
    all_ids, all_mask = prompts(padded)
    n = dist.get_world_size()
    for name in names:
        model = build(name)
        for cut in range(min(n, 2)):  # prompts of other lengths modulo the ranks
            ids, mask = all_ids[:, cut:], all_mask[:, cut:]
            root = prefilled(model, ids, mask, one_dim())
            prefix = root.nbytes
            for mode, (fan, options) in MODES.items():
                want = generate(model, ids, mask, **options)
                fork = root.fork(fan, capacity=NEW)
                got = generate(model, ids, mask, **cache_kwargs(fork), **options)
                assert torch.equal(got, want), f"{name}, {mode}"
                assert int(fork.get_seq_length()) == ids.shape[1] + NEW - 1
                for _ in range(2):  # again in the same memory
                    assert root.fork(fan, NEW, into=fork) is fork
                    assert torch.equal(generate(model, ids, mask, **cache_kwargs(fork), **options), want)
            assert root.nbytes == prefix


@pytest.mark.drawn(2, "compiled decoding with transformers")
@pytest.mark.parametrize("padded", [False, True], ids=["one", "padded"])
@pytest.mark.parametrize("n", slow_but([2], [2, 3, 4]))
def test_generate(n: int, padded: bool) -> None:
    run_ranks(n, check_generate, ["llama", "gemma3", "gpt2"] if n == 3 else ["llama"], padded)


def check_levels() -> None:
    """Three levels, with a selection between them, and samples that were dropped."""
    model, (ids, mask) = build("llama"), prompts(True)
    fork = prefilled(model, ids, mask, one_dim()).fork(3, capacity=NEW)
    twice = {"num_return_sequences": 3, "do_sample": True}
    turn = generate(model, ids, mask, **cache_kwargs(fork), **twice)
    assert torch.equal(turn, generate(model, ids, mask, **twice))
    seen = torch.cat([mask.repeat_interleave(3, 0), torch.ones(9, NEW, dtype=torch.int64)], dim=1)
    for kept in ([8, 0, 1, 3], [2]):
        index = torch.tensor(kept)
        child = fork.select(index).fork(2, capacity=NEW)
        got = generate(model, turn[index], seen[index], **cache_kwargs(child), num_beams=2, do_sample=False)
        want = generate(model, turn[index], seen[index], num_beams=2, do_sample=False)
        assert torch.equal(got, want)
        assert len(child.layers[0].kv.segments) == 2


@pytest.mark.parametrize("n", slow_but([2], [2, 3, 4]))
def test_levels(n: int) -> None:
    run_ranks(n, check_levels)


def check_assisted() -> None:
    model, (ids, mask) = build("llama"), prompts(False)
    assistant = tiny_models.build("llama", "sdpa")
    with torch.no_grad():
        assistant.lm_head.weight.mul_(1 + 0.1 * torch.randn(99, 1))
    fork = prefilled(model, ids, mask, one_dim()).fork(1, 40)
    got = generate(model, ids, mask, **cache_kwargs(fork), assistant_model=assistant, max_new_tokens=16)
    assert torch.equal(got, generate(model, ids, mask, max_new_tokens=16))


def test_assisted_decoding() -> None:
    run_ranks(2, check_assisted)


def check_compiled(options: dict[str, Any] | None, padded: bool) -> tuple[int, str]:
    model, (ids, mask) = build("llama"), prompts(padded)
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(gm)
        return gm if options is None else tatten.backend.tatten(gm, inputs, options=options)

    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True  # transformers compiles on accelerators only, unless told
    fan, how = MODES["sampling"]
    want = generate(model, ids, mask, **how)
    root = prefilled(model, ids, mask, one_dim())
    with tatten.recording() as report:
        for _ in range(2):
            got = generate(model, ids, mask, **cache_kwargs(root.fork(fan, NEW)), compile_config=config, **how)
            assert torch.equal(got, want)
    return len(graphs), str(report)


AOT = {"inner": "aot_eager"}


@pytest.mark.drawn(2, "compiled decoding with transformers")
@pytest.mark.parametrize(
    "options, padded",
    slow_but(
        [({"inner": "aot_eager"}, False)], [(x, y) for x in (None, {"inner": "aot_eager"}) for y in (False, True)]
    ),
    ids=str,
)
def test_compiled_generate(options: dict[str, Any] | None, padded: bool) -> None:
    """One graph for all steps, and for the next fork."""
    for graphs, report in run_ranks(2, check_compiled, options, padded):
        assert graphs == 1
        assert options is None or "2 of 2 attention calls rewritten" in report


def check_meshes() -> None:
    ids, mask = prompts(True)
    model = build("llama")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    fan, options = MODES["sampling"]
    fork = prefilled(model, ids, mask, mesh, sequence=("node", "gpu")).fork(fan, NEW)
    want = generate(model, ids, mask, **options)
    assert torch.equal(generate(model, ids, mask, **cache_kwargs(fork), **options), want)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "kv"))
    split = build("llama")
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    for layer in split.model.layers:
        plan = {f"self_attn.{name}": ColwiseParallel() for name in columns[:3]}
        plan |= {f"mlp.{name}": ColwiseParallel() for name in columns[3:]}
        plan |= {"self_attn." + rows[0]: RowwiseParallel(), "mlp." + rows[1]: RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
    for fan, options in MODES.values():
        fork = prefilled(split, ids, mask, mesh, heads="tp").fork(fan, NEW)
        got = generate(split, ids, mask, **cache_kwargs(fork), **options)
        assert torch.equal(got, generate(model, ids, mask, **options))


@pytest.mark.drawn(2, "compiled decoding with transformers")
def test_meshes() -> None:
    run_ranks(4, check_meshes)


def check_errors() -> None:
    ids, mask = prompts(False)
    model = tiny_models.build("llama", "sdpa")
    with pytest.raises(ValueError, match="must be of a model with attn_implementation=\"tatten\", got 'sdpa'"):
        SharedPrefixCache(model.config, mesh=one_dim())
    model = build("llama")
    odd = dist.get_rank() == 1
    with pytest.raises(ValueError, match=r"prompts must be the same .* on ranks \[1\] from token 0 of prompt 0 on"):
        prefilled(model, ids + 1 if odd else ids, mask, one_dim())
    fork = prefilled(model, ids, mask, one_dim()).fork(4, NEW)
    with pytest.raises(
        ValueError, match=r"`indices` must .* \[0, 1, 2, 3\] on ranks \[0\] and \[0, 1, 3, 2\] on ranks"
    ):
        fork.reorder_cache(torch.tensor([0, 1, 3, 2] if odd else [0, 1, 2, 3]))
    fork.crop(0)
    with pytest.raises(ValueError, match="`tokens` must be at most 0"):
        fork.crop(-1)
    with pytest.raises(ValueError, match=f"`capacity` must hold {NEW} used and 1 new slots, got {NEW}"):
        generate(model, ids, mask, **cache_kwargs(fork), num_return_sequences=4, do_sample=True, max_new_tokens=NEW + 1)
    assert fork.layers[0].kv.prefix_length + 1 == PROMPT


def test_errors() -> None:
    run_ranks(2, check_errors)
