"""Hashes of the code of transformers that continuous batching on attention "tatten" was tested with."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import operator
import re
import textwrap

BATCHING = "transformers.generation.continuous_batching"
# Hashes of the code without comments and texts. `python -m` of this module prints the table for the installed version.
TESTED = {
    "cache:group_layers_by_attn_type": "8aae9efb908f",
    "cache:PagedAttentionCache.__init__": "bcb612c02e48",
    "cache:PagedAttentionCache.can_store_request_tokens": "7c0365a17dcd",
    "cache:PagedAttentionCache.extend_read_and_write_indices": "3ea3466c8841",
    "cache:PagedAttentionCache.fill_block_table": "6b7fe4c8d122",
    "cache:PagedAttentionCache.reset": "0d41ac1806ce",
    "cache:PagedAttentionCache.update": "3f63e56ffe67",
    "cache:PagedAttentionCache.prepare_fork_request": "a40e5a42e1d7",
    "cache:PagedAttentionCache.perform_cache_copy": "3cbd15e27047",
    "cache:PagedAttentionMemoryHandler.__init__": "1108ac3fa77c",
    "cache_allocators.cache_allocator:CacheAllocator._before_cache_tensor_init": "3b222a4b8d66",
    "cache_allocators.cache_allocator:CacheAllocator._after_cache_tensor_init": "5847a3148707",
    "cache_allocators.cache_allocator:CacheAllocator.fork_blocks": "bc94f0ddf58c",
    "cache_allocators.cache_allocator:CacheAllocator.copy_blocks": "66975c3d71aa",
    "cache_allocators.full_attention:FullAttentionCacheAllocator": "c16fd16aaa8f",
    "cache_allocators.sliding_attention:SlidingAttentionCacheAllocator": "f2db9eb3042e",
    "initialization:resolve_continuous_batching_config": "b9ded51b9edc",
    "initialization:ensure_decode_fast_path_is_available": "ebc1eb8fe165",
    "initialization:decide_use_cuda_graphs": "7ecb829ab2e3",
    "input_outputs:PagedAttentionArgs": "15c06bc3d93c",
    "input_outputs:ContinuousBatchingIOs._setup_static_tensors": "a224a32355d4",
    "input_outputs:ContinuousBatchingIOs._transfer_inputs": "4c425fc5dd3c",
    "input_outputs:ContinuousBatchingIOs._reset_static_tensors": "1959f322cd8f",
    "input_outputs:ContinuousBatchingIOs._reset_read_and_write_indices": "345e6b7d8a78",
    "input_outputs:ContinuousBatchingIOs.prepare_batch_tensors": "bb9c869d8397",
    "input_outputs:ContinuousBatchingIOs._get_num_sequences": "5bc00863b52e",
    "input_outputs:ContinuousBatchingIOs.get_model_kwargs": "f1b03131bedb",
    "input_outputs:ContinuousBatchingIOs._get_graph_key": "47d5732afa28",
    "input_outputs:ContinuousBatchingIOs.reset": "52c9cd20bd05",
    "input_outputs:HostDeviceIOPair.reset": "1bdce63de5a8",
    "input_outputs:ContinuousBatchingAsyncIOs.reset": "52f331b97aed",
    "input_outputs:ContinuousBatchingAsyncIOs.get_model_kwargs": "8a62a2d20fc7",
    "model_runner:ModelRunner.maybe_pad_inputs": "0bd6b4556ac5",
    "model_runner:ModelRunner.compute_batch": "a8a80e4b67b4",
    "model_runner:ModelRunner._capture_graph": "39b45a167603",
    "model_runner:ModelRunner._forward_process_and_sample": "0080d61f3448",
    "model_runner:ModelRunner.run_one_warmup": "a117e7a3511f",
    "scheduler:Scheduler._process_candidates": "0efc070a5e2d",
    "continuous_api:ContinuousBatchProcessor.reset": "7a80013ecb45",
    "continuous_api:ContinuousBatchProcessor.prepare_next_batch": "f1998341bfcb",
    "continuous_api:ContinuousBatchProcessor.update_batch": "2194c08f01cf",
    "continuous_api:ContinuousBatchingManager.switch_to_cb_friendly_attn": "59897966734f",
    "continuous_api:ContinuousBatchingManager._create_batch_processor": "a65fbe8ef309",
    "utils:attn_mask_is_needed": "6ec051977349",
    "utils:pad_to_pow2": "cf9fd3f5a070",
}


def moved_code() -> list[str]:
    """Return the names of functions and classes whose code differs from the tested code."""
    return [name for name, tested in TESTED.items() if digest(name) != tested]


@functools.cache
def digest(name: str) -> str:
    """Return a hash of the code of a function or class, or the error of reading the code."""
    module, _, path = name.partition(":")
    try:
        code = inspect.getsource(
            inspect.unwrap(operator.attrgetter(path)(importlib.import_module(f"{BATCHING}.{module}")))
        )
    except (ImportError, AttributeError, OSError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    tree = _WithoutTexts().visit(ast.parse(textwrap.dedent(code)))
    # Versions of Python unparse with different spaces and parentheses.
    return hashlib.sha256(re.sub(r"[\s()]", "", ast.unparse(tree)).encode()).hexdigest()[:12]


class _WithoutTexts(ast.NodeTransformer):
    """A transformer that removes docstrings, and f-strings, which versions of Python unparse differently."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return ast.Pass()
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant(value="")


if __name__ == "__main__":
    for name in TESTED:
        print(f'    "{name}": "{digest(name)}",')
