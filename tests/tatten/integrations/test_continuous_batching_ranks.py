"""`generate_batch` with tensor parallelism on two gloo ranks: both have the tokens of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from slow import slow_but

if not transformers.__version__.startswith("5.24"):
    pytest.skip("no other transformers was tested", allow_module_level=True)

from batched_models import MODELS, Tokens, batching, build, greedy, prompts, quick, run
from ranks import run_ranks
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.distributed import DistributedConfig

import tatten.integrations.transformers  # noqa: F401  (registers the attention)

NEW = 12
SETTINGS = {"page_size": 4, "max_batch_tokens": 16, "seed": 5}
SAMPLED = GenerationConfig(max_new_tokens=NEW, do_sample=True, num_return_sequences=3, eos_token_id=-1, pad_token_id=0)


def on_a_rank(folder: Path, config: GenerationConfig) -> tuple[int, Tokens]:
    """Return the heads of keys in the pages of this rank, and its tokens."""
    parallel = DistributedConfig(tp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="tatten", distributed_config=parallel)
    options = {"generation_config": config, "continuous_batching_config": batching(**SETTINGS)}
    with quick(), model.continuous_batching_context_manager(**options) as manager:
        cache = manager.batch_processor.cache
        key, _ = cache.layer_to_allocator[0]._kv_page_views[0]
    return key.shape[2], run(model, prompts(), config, **SETTINGS)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", slow_but(["llama", "gpt_oss"], MODELS))
def test_tensor_parallelism(name: str, tmp_path: Path) -> None:
    """Each rank has the pages of its heads. Chunks of prompts, forks that share pages, and rings."""
    model = build(name)
    model.save_pretrained(tmp_path)
    heads = model.config.num_key_value_heads
    if name != "gpt_oss":  # whose plan in transformers (5.24) shards the embedding alone
        heads //= 2
    for config in (greedy(NEW, 3), SAMPLED):
        want = heads, run(model, prompts(), config, **SETTINGS)
        assert run_ranks(2, on_a_rank, tmp_path, config, seconds=120, timeout=60) == [want, want]
