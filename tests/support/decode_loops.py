"""Small models for tests of the decode loop, with prompts and streamers, and a loop that launches ahead on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from tiny_models import GQA
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig, PreTrainedConfig, PreTrainedModel

from tatten.integrations.transformers import DecodeLoop

EAGER = CompileConfig(backend="tatten", mode=None, options={"inner": "eager"})
SMALL = GQA | {
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


class Launching(DecodeLoop):
    """Launches ahead on a CPU too, where nothing is gained, as it does on a GPU."""

    def _steps_ahead(self, cache: Any, ours: bool, call: Any, on_gpu: bool) -> int:
        return super()._steps_ahead(cache, ours, call, True)


def with_weights(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.2)  # no token repeats for long, so that wrong keys change the text
    return model.eval()


PROMPT = 20
SIZES = GQA | {"vocab_size": 120, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1}
# Logits processors of greedy decoding, for texts of 50 to 61 tokens after prompts of 20 and of 24.
PROCESSORS: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.4},
    "large penalty": {"repetition_penalty": 5.0},
    "reward": {"repetition_penalty": 0.6},
    "suppressed": {"suppress_tokens": list(range(2, 60)), "renormalize_logits": True},
    "no end before": {"min_new_tokens": 17, "eos_token_id": list(range(1, 100))},
    "no end in": {"min_length": 41, "eos_token_id": list(range(1, 100)), "repetition_penalty": 1.1},
    "forced end": {"forced_eos_token_id": 9, "eos_token_id": 1, "min_new_tokens": 48},
    "n-grams": {"no_repeat_ngram_size": 3},
    "bad words": {"bad_words_ids": [[i, j] for i in range(2, 119, 2) for j in range(60)], "repetition_penalty": 0.7},
    "finite": {"remove_invalid_values": True, "begin_suppress_tokens": [5, 6]},
}
WINDOW = {**SIZES, "sliding_window": 16}
LATENTS = {
    **{name: x for name, x in SIZES.items() if name != "num_key_value_heads"},
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
ENCODER = {"d_model": 64, "vocab_size": 120, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "mistral": ("MistralForCausalLM", "MistralConfig", WINDOW),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**WINDOW, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {**SIZES, "layer_types": ["conv", "full_attention"]}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENTS),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {**ENCODER, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16},
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {**ENCODER, "forced_eos_token_id": None, "encoder_layers": 2, "decoder_layers": 2}
        | {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    ),
}
_built: dict[str, PreTrainedModel] = {}


def build(name: str) -> PreTrainedModel:
    if name not in _built:
        kind, config, sizes = MODELS[name]
        torch.manual_seed(0)
        model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
        model.get_output_embeddings().weight.data.normal_(0, 0.5)  # some tokens are likelier than others
        _built[name] = model
    return _built[name]


def prompts(batch: int, length: int = PROMPT, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Ids and mask of left-padded prompts; one alone has no padding."""
    ids = torch.randint(2, 120, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[1, : length // 3] = mask[-1, : length // 2] = 0
    return ids * mask, mask


def both(model: PreTrainedModel, loop: DecodeLoop, ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The tokens of `generate` and of the loop, from the same seed."""
    arguments = {"max_new_tokens": 16, "do_sample": False, **kwargs}
    torch.manual_seed(0)
    expected = model.generate(ids, **arguments)
    torch.manual_seed(0)
    return model.generate(ids, **arguments, custom_generate=loop, compile_config=EAGER), expected


def graphs_of(call: Callable[[], object]) -> int:
    counters.clear()
    call()
    return counters["stats"]["unique_graphs"]


class Kept:
    """A streamer that keeps its tokens."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1
