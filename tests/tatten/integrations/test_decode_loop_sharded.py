"""`decode_loop` with a cache sharded over ranks: each rank launches the same steps, and draws the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from transformers import CompileConfig

from tatten.integrations.transformers import DecodeLoop, ShardedKVCache, cache_kwargs

EAGER = CompileConfig(backend="tatten", mode=None, options={"inner": "eager"})


def check(options: dict[str, Any]) -> tuple[str | None, int]:
    model, loop = tiny_models.build("llama", "tatten"), DecodeLoop()
    ids = torch.randint(2, model.config.vocab_size, (1, 11), generator=torch.Generator().manual_seed(0))
    arguments = {"max_new_tokens": 8, "pad_token_id": 0, **options}
    torch.manual_seed(0)
    expected = model.generate(ids, **arguments)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("kv",))
    cache = ShardedKVCache(model.config, mesh, 11 + 8)
    for _ in range(2):
        cache.reset()
        torch.manual_seed(0)
        result = model.generate(ids, **arguments, **cache_kwargs(cache), custom_generate=loop, compile_config=EAGER)
        assert torch.equal(result, expected)
    return loop.reason, loop.launched_steps


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}], ids=["greedy", "sampled"]
)
def test_tokens_of_generate_on_two_ranks(options: dict[str, Any]) -> None:
    (reason, steps), other = run_ranks(2, check, options)
    assert (reason, steps) == other
    assert reason is None
    assert steps > 0
