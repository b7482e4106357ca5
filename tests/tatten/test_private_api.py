"""The private APIs of PyTorch and transformers that tatten depends on, each used in one file.

A test is named for the file, so that it says what to adapt when an API moves.
"""

from __future__ import annotations

import datetime
import inspect

import torch
import torch.distributed as dist
from ranks import run_ranks


def test_tatten_inner_compiler() -> None:
    from torch._dynamo.backends.registry import lookup_backend

    assert callable(lookup_backend("eager"))
    assert callable(lookup_backend("aot_eager"))
    wrapper = torch._TorchCompileInductorWrapper("reduce-overhead", {"max_autotune": False}, None)
    assert wrapper.config["triton.cudagraphs"] is True
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    assert callable(reset_cudagraph_trees)
    compiled = torch.compile(abs_of)
    assert compiled._torchdynamo_orig_callable is abs_of
    module = torch.nn.Identity()
    assert torch.compile(module)._orig_mod is module
    with torch._dynamo.config.patch(recompile_limit=5, accumulated_recompile_limit=6):
        assert (torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit) == (5, 6)


def abs_of(x: torch.Tensor) -> torch.Tensor:
    return x.abs()


def test_caches_static_address() -> None:
    x = torch.zeros(3)
    torch._dynamo.mark_static_address(x)
    assert x._dynamo_static_input_type  # what Dynamo and Inductor look for


def test_integrations_transformers_config() -> None:
    from transformers import DynamicCache, LlamaConfig
    from transformers.cache_utils import DynamicLayer

    config = LlamaConfig(num_hidden_layers=2)
    assert config.get_text_config(decoder=True)._attn_implementation is None
    assert [type(layer) for layer in DynamicCache(config=config).layers] == [DynamicLayer] * 2


def test_integrations_transformers_layers() -> None:
    """Both caches subclass the mixin, call SDPA of transformers and fill the mask that it expects."""
    from transformers import AttentionInterface, AttentionMaskInterface, Cache
    from transformers.cache_utils import CacheLayerMixin
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    wanted = {"update", "lazy_initialization", "get_seq_length", "get_mask_sizes", "get_max_length"}
    assert CacheLayerMixin.__abstractmethods__ == wanted
    for name in ("reorder_cache", "crop", "batch_select_indices", "batch_repeat_interleave", "reset"):
        assert callable(getattr(Cache, name)), name
    parameters = list(inspect.signature(sdpa_attention_forward).parameters)
    assert parameters[:8] == ["module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"]
    assert callable(sdpa_mask)
    assert callable(AttentionInterface.register)
    assert callable(AttentionMaskInterface.register)


def check_groups() -> None:
    from torch.distributed import distributed_c10d

    world = dist.group.WORLD
    assert distributed_c10d._resolve_process_group(world.group_name) is world
    assert torch.device("cpu") in world._device_types
    backend = world._get_backend(torch.device("cpu"))
    assert backend.name() == "gloo"
    assert backend.options._timeout == datetime.timedelta(seconds=120)
    assert isinstance(distributed_c10d.default_pg_timeout, datetime.timedelta)
    assert isinstance(distributed_c10d._get_process_group_store(world), dist.Store)


def test_ops_distributed_collectives() -> None:
    run_ranks(1, check_groups, timeout=120.0)
    ops = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "wait_tensor")
    for name in ops:
        assert hasattr(torch.ops._c10d_functional, name), name
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert marked._dynamo_marked_constant is True


def test_ops_distributed_push() -> None:
    """What a rendezvous returns takes two GPUs to see: `tests/ops/distributed/test_push_gpu.py`."""
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed._symmetric_memory import rendezvous

    assert callable(_SymmetricMemory.empty_strided_p2p)
    assert list(inspect.signature(rendezvous).parameters)[:2] == ["tensor", "group"]
    for name in ("rank", "world_size", "buffer_ptrs"):
        assert hasattr(_SymmetricMemory, name), name
