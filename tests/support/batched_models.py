"""Tiny models for tests of continuous batching, and the tokens that `generate` and `generate_batch` give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager, continuous_api, model_runner

VOCABULARY, WINDOW = 97, 10
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MIXED = SMALL | {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "mistral": ("Mistral", SMALL | {"sliding_window": WINDOW}),
    "qwen3": ("Qwen3", SMALL),
    "gemma2": ("Gemma2", MIXED | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text", MIXED | {"query_pre_attn_scalar": 16}),
    "gpt_oss": ("GptOss", MIXED | {"num_local_experts": 4}),
}
SHARING = ("llama", "qwen3")  # whose layers are all of full attention
Tokens = list[list[int]]


def build(name: str, attention: str = "tatten", seed: int = 0, **config: Any) -> PreTrainedModel:
    prefix, sizes = MODELS[name]
    torch.manual_seed(seed)
    made = getattr(transformers, f"{prefix}Config")(**(sizes | config))
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention).eval()
    draw_weights(model, made.hidden_size)
    return model


def draw_weights(model: PreTrainedModel, hidden_size: int) -> None:
    """Draw weights with which few logits are close to the largest."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in name:
                parameter.normal_(0, 1.7 / hidden_size**0.5)


def prompts(lengths: Sequence[int] = (24, 28, 40, 3), common: int = 23, seed: int = 1) -> Tokens:
    """Prompts of these lengths, of which those that are longer than `common` begin with the same tokens."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(2, VOCABULARY, (common,), generator=generator)

    def draw(n: int) -> Tensor:
        return torch.randint(2, VOCABULARY, (n,), generator=generator)

    return [(torch.cat((shared, draw(n - common))) if n > common else draw(n)).tolist() for n in lengths]


def expected(model: PreTrainedModel, prompt_ids: Tokens, new: int) -> Tokens:
    """The greedy tokens of `generate` with the model's own attention, one prompt at a time."""
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    rows = [
        model.generate(torch.tensor([ids], device=model.device), max_new_tokens=new, do_sample=False, eos_token_id=None)
        for ids in prompt_ids
    ]
    model.set_attn_implementation(attention)
    return [row[0, len(ids) :].tolist() for row, ids in zip(rows, prompt_ids, strict=True)]


@torch.no_grad()
def behind(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> float:
    """Return how far below the largest logit a token is at most, in standard deviations, with attention "eager"."""
    model.set_attn_implementation("eager")
    logits: Tensor = model(torch.tensor([prompt + tokens], device=model.device), use_cache=False).logits[0].float()
    model.set_attn_implementation("tatten")
    logits = logits[len(prompt) - 1 : -1]
    below = logits.amax(-1) - logits.gather(-1, torch.tensor(tokens, device=model.device)[:, None])[:, 0]
    return float(below.max() / logits.std())


def greedy(new: int, n: int = 1) -> GenerationConfig:
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config.num_return_sequences = n  # its check refuses equal samples, but they show whether forks are right
    return config


def batching(**options: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        **{"page_size": 8, "num_blocks": 96, "max_batch_tokens": 64, "max_memory_percent": 0.1} | options
    )


def run(model: PreTrainedModel, prompt_ids: Tokens, config: GenerationConfig, **options: Any) -> Tokens:
    """The tokens of `generate_batch`, of the samples of a prompt one after the other."""
    with quick():
        results = model.generate_batch(
            prompt_ids, generation_config=config, continuous_batching_config=batching(**options)
        )
    assert [x.error for x in results.values() if x.error] == []
    assert len(results) == len(prompt_ids) * (config.num_return_sequences or 1)
    return [x.generated_tokens for x in results.values()]


def run_session(manager: ContinuousBatchingManager, prompt_ids: Tokens, new: int, keep: bool = True) -> Tokens:
    """The tokens of a manager from its start to its stop; `keep` it for another session."""
    manager.start()
    requests = manager.add_requests(prompt_ids, max_new_tokens=new)
    results = [manager.get_result(timeout=60) for _ in prompt_ids]
    manager.stop(block=True, keep_for_next_session=keep)
    assert None not in results
    tokens = {result.request_id: result.generated_tokens for result in results}
    return [tokens[request] for request in requests]


@contextmanager
def quick() -> Iterator[None]:
    """Collect no garbage after each batch, which takes most of the time of a tiny one."""
    with mock.patch.object(continuous_api, "gc", SimpleNamespace(collect=lambda: 0)):
        yield


@contextmanager
def padded() -> Iterator[None]:
    """Pad batches as CUDA graphs need it. transformers does so for compiled models, which are left as they are."""
    with mock.patch.object(model_runner.torch, "compile", lambda function, **options: function):
        yield
