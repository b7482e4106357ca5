"""The private APIs of PyTorch and transformers that tatten depends on, each used in one file.

A test is named for the file, so that it says what to adapt when an API moves.
"""

from __future__ import annotations

import datetime
import inspect

import pytest
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


def test_integrations_transformers_loop_generate_call() -> None:
    """`generate` marks the caches of users, and passes neither streamer nor assistant on to a callable."""
    from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM, StaticCache

    from tatten.integrations.transformers import cache_kwargs
    from tatten.integrations.transformers.loop import generate_call

    for name in ("_prefill", "_extract_generation_mode_kwargs", *generate_call.REPLACED):
        assert callable(getattr(GenerationMixin, name))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval()
    calls = []

    def keep(model, input_ids, generation_config, **rest):
        cache = rest[next(iter(cache_kwargs(None)))]
        dropped = generate_call.dropped_arguments(model)
        calls.append((generate_call.is_users_cache(cache), dropped.streamer, dropped.synced_gpus, "streamer" in rest))
        assert generation_config._pad_token_tensor.item() == 3
        return input_ids

    class Streamer:
        def put(self, value: torch.Tensor) -> None: ...

        def end(self) -> None: ...

    ids, streamer = torch.ones(1, 4).long(), Streamer()
    arguments = {"max_new_tokens": 4, "pad_token_id": 3, "custom_generate": keep, "streamer": streamer}
    model.generate(ids, **arguments)
    model.generate(ids, **arguments, **cache_kwargs(StaticCache(model.config, max_cache_len=9)))
    assert calls == [(False, streamer, False, False), (True, streamer, False, False)]


def test_integrations_trl() -> None:
    """The hooks that a rollout takes away are known by name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    model.enable_input_require_grads()
    hooks = model.get_input_embeddings()._forward_hooks
    assert [hook.__name__ for hook in hooks.values()] == ["make_inputs_require_grads"]


def test_tatten_serve() -> None:
    """The method that refuses names, and the state whose thread has to be stopped."""
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager, utils

    manager = object.__new__(model_manager.ModelManager)
    manager.quantization, manager.attn_implementation = None, "tatten"
    with pytest.raises(ValueError, match="Unsupported attention implementation: 'tatten'"):
        manager._validate_args()
    assert "self._generation_state = GenerationState(" in inspect.getsource(Serve.__init__)
    assert callable(utils.GenerationState.shutdown)


def test_integrations_transformers_config() -> None:
    from transformers import DynamicCache, LlamaConfig
    from transformers.cache_utils import DynamicLayer

    config = LlamaConfig(num_hidden_layers=2)
    assert config.get_text_config(decoder=True)._attn_implementation is None
    assert [type(layer) for layer in DynamicCache(config=config).layers] == [DynamicLayer] * 2


def test_integrations_transformers_config_of_code() -> None:
    """The parts of a model's code that are read: whether it is made for SDPA, and its own attention."""
    from transformers import FalconConfig, Gemma2Config, Gemma4TextConfig, GptOssConfig, LlamaConfig
    from transformers.models.falcon import modeling_falcon  # noqa: F401
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gemma4 import modeling_gemma4
    from transformers.models.gpt_oss import modeling_gpt_oss  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    from tatten.integrations.transformers.config import eager_attention, made_for_sdpa

    assert made_for_sdpa(LlamaConfig())
    assert not made_for_sdpa(GptOssConfig())  # says that it does not support SDPA, in every version
    asks_by_name = '_attn_implementation == "sdpa"' in inspect.getsource(modeling_gemma4)  # not in transformers 5.17
    assert made_for_sdpa(Gemma4TextConfig()) is not asks_by_name
    assert not made_for_sdpa(FalconConfig())  # has attention of its own
    layer = modeling_gemma2.Gemma2Attention(Gemma2Config(hidden_size=8, head_dim=4), 0)
    assert eager_attention(layer) is modeling_gemma2.eager_attention_forward
    with pytest.raises(NotImplementedError, match="the module of Identity must define `eager_attention_forward`"):
        eager_attention(torch.nn.Identity())


def test_integrations_transformers_config_of_weights() -> None:
    """The context variable that says whether hooks collect attention weights, which models do not pass on."""
    from transformers.utils.output_capturing import _active_collector as collector

    from tatten.integrations.transformers.config import weights_collected

    assert not weights_collected()
    token = collector.set({"hidden_states": []})
    assert not weights_collected()
    collector.reset(token)
    token = collector.set({"cross_attentions": []})
    assert weights_collected()
    collector.reset(token)
    assert collector.global_var is None  # read while a model is compiled


def test_integrations_transformers_layers() -> None:
    """Both caches subclass the mixin, call SDPA of transformers and fill the mask that it expects."""
    from transformers import AttentionInterface, AttentionMaskInterface, Cache
    from transformers.cache_utils import CacheLayerMixin
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask, sdpa_mask

    wanted = {"update", "lazy_initialization", "get_seq_length", "get_mask_sizes", "get_max_length"}
    assert CacheLayerMixin.__abstractmethods__ == wanted
    for name in ("reorder_cache", "crop", "batch_select_indices", "batch_repeat_interleave", "reset"):
        assert callable(getattr(Cache, name)), name
    parameters = list(inspect.signature(sdpa_attention_forward).parameters)
    assert parameters[:8] == ["module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"]
    for mask in (sdpa_mask, eager_mask):
        assert {"q_length", "kv_length", "q_offset", "kv_offset"} <= set(inspect.signature(mask).parameters)
    assert "allow_is_causal_skip" in inspect.signature(sdpa_mask).parameters
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
    """A rendezvous's result takes two GPUs to see: `tests/ops/distributed/test_push_gpu.py`."""
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed._symmetric_memory import rendezvous

    assert callable(_SymmetricMemory.empty_strided_p2p)
    assert list(inspect.signature(rendezvous).parameters)[:2] == ["tensor", "group"]
    for name in ("rank", "world_size", "buffer_ptrs"):
        assert hasattr(_SymmetricMemory, name), name


def test_tatten_dtensor_sdpa() -> None:
    """DTensor's dispatcher has a table of handlers; SDPA's kernels and the softmax of its math go into it."""
    from torch.distributed.tensor import DTensor

    assert type(DTensor._op_dispatcher._custom_op_handlers) is dict
    assert torch._disable_dynamo(abs_of)(torch.tensor(-1.0)) == 1
    softmax = torch.ops.aten._safe_softmax.default
    assert [x.name for x in softmax._schema.arguments][:2] == ["self", "dim"]
    kernels = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for kernel in kernels:
        schema = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default._schema
        names = {x.name for x in schema.arguments}
        assert {"query", "key", "value", "dropout_p", "is_causal", "scale"} <= names
        assert [str(x.type) for x in schema.returns[:2]] == ["Tensor", "Tensor"]


def shard_order() -> list[tuple[int, ...]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 1))
    return [
        tuple(entry.mesh_dims)
        for entry in distribute_tensor(torch.ones(4), mesh, [Shard(0), Shard(0)])._spec.shard_order
    ]


def test_ops_distributed_placement() -> None:
    assert run_ranks(1, shard_order) == [[(0, 1)]]


def test_ops_cuda_providers() -> None:
    """The schemas of PyTorch's CUDA kernels, which take what we hand them by position and name."""
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    assert [x.name for x in cudnn.arguments] == [
        *("query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask"),
        "scale",
    ]
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default._schema
    assert {"query", "key", "value", "scale"} <= {x.name for x in flash.arguments}
    assert [x.name for schema in (cudnn, flash) for x in schema.returns[:2]] == ["output", "logsumexp"] * 2


def test_tatten_export() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch._C._DisableAutocast():
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.float32


def test_tatten_report() -> None:
    from torch._dynamo.utils import counters

    before = counters["tatten"]["private_api"]
    counters["tatten"]["private_api"] += 1
    assert counters["tatten"]["private_api"] == before + 1
    assert {"metadata_fn", "payload_fn"} <= set(inspect.signature(torch._logging.trace_structured).parameters)


def test_tatten_entry_point() -> None:
    from torch._dynamo import register_backend

    assert {"compiler_fn", "name"} <= set(inspect.signature(register_backend).parameters)
