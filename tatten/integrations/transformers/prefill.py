"""A prefill in which each rank of a mesh runs an unchanged model of transformers on its share of the prompt."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from tatten.caches.agreement import agree, fingerprint
from tatten.caches.arguments import INTEGERS, check_positive
from tatten.caches.interleaved import Interleaved
from tatten.caches.striped_prefill import StripedPrefill
from tatten.integrations.transformers.config import (
    attention_implementation,
    cache_argument,
    caches_latents,
    count_full_layers,
    made_for_sdpa,
    rope_types,
)
from tatten.integrations.transformers.handover import run_prefill
from tatten.ops.sizes import ceil_div

# Rotary embeddings whose frequencies do not depend on the number of tokens.
FIXED_ROPE = {"default", "linear", "llama3", "proportional", "yarn"}
# Modules that may mix the tokens of a sequence, which would miss the tokens of other ranks.
MIXERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
# Arguments of attention that do not affect which keys count.
HARMLESS = {"position_ids", "past_key_values", "cache", "position_embeddings", "use_cache", "layer_idx"}


@torch.no_grad()
def prefill(
    cache: Cache,
    layout: Interleaved,
    model: PreTrainedModel,
    prompt: Tensor,
    chunk: int | None,
    cache_length: int,
    capacity: int | None = None,
) -> Tensor:
    """Fill a cache over a mesh, and return the logits of the last token; see `ShardedKVCache.prefill`.

    Args:
        cache_length: number of tokens in the cache.
        capacity: number of tokens that the cache can hold; None for no limit.
    """

    model = getattr(model, "_orig_mod", model)  # the module that torch.compile wrapped

    def describe() -> str:
        check_prompt(prompt, chunk, layout)
        tokens = prompt.shape[1]
        if cache_length:
            raise ValueError(
                f"`prefill` needs an empty cache for the {tokens} tokens of `prompt`, got one with {cache_length}"
            )
        if capacity is not None and tokens > capacity:
            raise ValueError(f"`capacity` must hold the {tokens} tokens of `prompt`, got {capacity}")
        check_model(model, len(cache.layers))
        prompt_text = f"a prompt of shape {tuple(prompt.shape)} (#{int(fingerprint(prompt)) % 2**64:016x})"
        # The dtype has to match: ranks send each other keys as bytes.
        return f"{prompt_text}, chunk {chunk}, a {type(model).__name__} in {model.dtype}"

    agree(layout, "`prompt`, `chunk` and `model`", describe)
    tokens = prompt.shape[1]
    striped = StripedPrefill(layout, [layer.kv for layer in cache.layers], tokens)
    size = layout.ranks * ceil_div(tokens, layout.ranks) if chunk is None else chunk
    arguments = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1, "return_dict": True}
    try:
        # In eager mode: a model that was compiled in place would be traced again for each length of a chunk.
        with run_prefill(striped), torch.compiler.set_stance("force_eager"):
            for positions in striped.chunks(size, prompt.device):
                local_prompt = prompt.index_select(1, positions)
                out = model(local_prompt, position_ids=positions[None], **arguments)
        logits = striped.finish(out.logits[:, -1])
    except BaseException:
        striped.abandon()
        raise
    for layer in cache.layers:
        layer.lazy_initialization(None, None)
    return logits


def attention(
    prefill: StripedPrefill,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention "tatten" while a prefill runs. `key` and `value` are all of this rank's so far."""
    unsupported = {name: x for name, x in kwargs.items() if name not in HARMLESS and x is not None and x is not False}
    if attention_mask is not None:
        unsupported["attention_mask"] = attention_mask
    if dropout:
        unsupported["dropout"] = dropout
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        unsupported["is_causal"] = False
    if unsupported:
        raise NotImplementedError(
            f"{type(module).__name__} must have plain causal attention for a prefill over several ranks, "
            f"got {', '.join(f'`{name}`' for name in unsupported)}: call the model with the cache instead"
        )
    return prefill.attend(query, key, value, scaling).transpose(1, 2).contiguous(), None


def check_prompt(prompt: Tensor, chunk: int | None, layout: Interleaved) -> None:
    """Raise TypeError or ValueError unless `prompt` and `chunk` are as `ShardedKVCache.prefill` takes them."""
    if not isinstance(prompt, Tensor) or prompt.dtype not in INTEGERS:
        kind = prompt.dtype if isinstance(prompt, Tensor) else type(prompt).__name__
        raise TypeError(f"`prompt` must be a tensor of integers, got {kind}")
    if prompt.dim() != 2 or not prompt.numel():
        raise ValueError(f"`prompt` must be [batch, P] with a token at least, got shape {tuple(prompt.shape)}")
    if prompt.device.type != layout.mesh.device_type:
        raise ValueError(f"`prompt` must be on {layout.mesh.device_type}, as the mesh, got {prompt.device}")
    if chunk is not None:
        check_positive("chunk", chunk)
        if chunk % layout.ranks:
            raise ValueError(
                f"`chunk` must be a multiple of {layout.ranks}, the ranks that share the sequence, got {chunk}"
            )


def check_model(model: PreTrainedModel, layers: int) -> None:
    """Raise unless a model mixes tokens only by full causal attention "tatten", in as many layers as the cache has."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"`model` must be a model of transformers, got {type(model).__name__}")
    config = model.config
    if (implementation := attention_implementation(config)) != "tatten":
        raise ValueError(f'`model` must have attn_implementation="tatten", got {implementation!r}')
    if reason := undivided_reason(model):
        raise NotImplementedError(f"`model` can't be divided among ranks, which need {reason}: call it with the cache")
    if (model_layers := count_full_layers(config)) != layers:
        raise ValueError(f"`model` must have the {layers} layers of the cache, got {model_layers}")


def undivided_reason(model: PreTrainedModel) -> str | None:
    """Return the first requirement for dividing prompts among ranks that this model does not meet, or None.

    Only requirements that can be checked before the model runs are covered.
    """
    config, forward = model.config, inspect.signature(model.forward).parameters
    name = type(model).__name__
    needed = "position_ids", cache_argument(model), "logits_to_keep"
    if missing := [argument for argument in needed if argument not in forward]:
        return f"the argument `{missing[0]}`, and {name} has none"
    if caches_latents(config):
        return "keys and values in the cache, and it has latents there"
    try:
        count_full_layers(config)
    except ValueError as error:
        return f"attention to all tokens ({error})"
    if varying := sorted(rope_types(config) - FIXED_ROPE):
        return f"rotary embeddings that do not depend on the length, and its are {varying[0]!r}"
    if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None:
        return "attention without a soft cap, and `attn_logit_softcapping` is set"
    for path, module in model.named_modules():
        if isinstance(module, MIXERS):
            return f"nothing but attention to mix tokens, and there is a {type(module).__name__} at {path}"
        if isinstance(getattr(module, "sinks", None), Tensor):
            return f"attention without sinks, and {path} has some"
    if not made_for_sdpa(config):
        return f"masks to be passed on as they are, which the code of {name} is not known to do"
    return None
