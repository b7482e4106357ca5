"""The reasons for which `generate` runs its own loop in place of the decode loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.generation import stopping_criteria as sc
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
from transformers.pytorch_utils import Conv1D

from tatten.integrations.transformers.config import attention_without_masks, longrope_length
from tatten.integrations.transformers.loop.cache import static_cache
from tatten.integrations.transformers.loop.call import is_missing, longest_text, text_length
from tatten.integrations.transformers.loop.compiled_function import in_dispatch_mode
from tatten.integrations.transformers.loop.generate_call import (
    GRIDS,
    TOKEN_TYPES,
    Dropped,
    counts_by_mask,
    drafts_of,
    inputs_of_prefill,
    is_users_cache,
    moved_method,
)
from tatten.integrations.transformers.loop.processors import unsupported_processor

CRITERIA = (sc.MaxLengthCriteria, sc.EosTokenCriteria, sc.MaxTimeCriteria)
RESULTS = ("output_attentions", "output_hidden_states")
# Arguments of the model's forward that `generate` passes unchanged at each step, or that a step computes.
INPUTS = {"use_cache", "logits_to_keep", "attention_mask", "position_ids", "encoder_outputs"}
INPUTS |= {"decoder_attention_mask", "decoder_position_ids", "cache", "past_key_values", "return_dict"}
# Modules without dropout. Parts of a model that are replaced after `model.eval()` are in training mode.
SAME_IN_TRAINING = {
    *(nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.Identity, nn.Linear, nn.Conv1d, nn.Conv2d, Conv1D, nn.Embedding),
    *(nn.LayerNorm, nn.RMSNorm, nn.SiLU, nn.GELU, nn.ReLU, nn.Tanh),
}
IMPLEMENTATIONS = (None, "static", "dynamic", "dynamic_full", "hybrid", "sliding_window")


def reason_against(
    model: PreTrainedModel,
    ids: Tensor,
    processors: list[Any],
    criteria: list[Any],
    config: GenerationConfig,
    cache: object,
    inputs: dict[str, Any],
    dropped: Dropped,
) -> str | None:
    """Return the reason why a captured step can't do what this call of `generate` asks for, or None if it can.

    Args:
        model: the model.
        ids, processors, criteria, config: as `generate` passes them to its loop.
        cache: the cache that `generate` made, or that the user passed.
        inputs: the arguments of the model's forward.
        dropped: the arguments that `generate` does not pass on.
    """
    draft = None if config.prompt_lookup_num_tokens else dropped.assistant_model
    has_drafts = bool(config.prompt_lookup_num_tokens or draft)
    length = longest_text(criteria)
    checks = (
        moved_method(model),
        _mode(config, dropped),
        _results(config),
        _model(model, ids, inputs),
        _inputs(model, config, inputs, draft is not None),
        "the text has no largest length" if length is None else _long_text(model, length, has_drafts),
        "two repetition penalties may ignore two parts of a prompt" if _penalties(processors) > 1 else None,
        next((text for x in processors if (text := unsupported_processor(x, ids.shape[1])) is not None), None),
        next(
            (
                f"the stopping criterion {type(x).__name__} runs on the host"
                for x in criteria
                if type(x) not in CRITERIA
            ),
            None,
        ),
        _cache(cache, config, text_length(length or 0, ids)),
        _drafts(model, ids, config, cache, inputs) if has_drafts else None,
        _assistant(model, draft, config) if draft is not None else None,
    )
    return next((text for text in checks if text is not None), None)


def _mode(config: GenerationConfig, dropped: Dropped) -> str | None:
    if (config.num_beams or 1) > 1:
        return "beams choose tokens in another way"
    if config.assistant_early_exit:
        return "the first layers of the model draft the tokens"
    if config.is_assistant:
        return "an assistant's calls are short and keep its cache"
    if (config.penalty_alpha or 0) > 0 or config.dola_layers is not None:
        return "contrastive decoding chooses tokens in another way"
    if dropped.synced_gpus:
        return "with `synced_gpus` the host looks at every step, so that ranks stop together"
    if config.disable_compile:
        return "`disable_compile` is True"
    if in_dispatch_mode():
        return "a dispatch mode, such as FlopCounterMode, is active, and PyTorch compiles nothing under it"
    return None


def _results(config: GenerationConfig) -> str | None:
    requested = [name for name in RESULTS if config.return_dict_in_generate and getattr(config, name)]
    return f"`{requested[0]}` returns results of every step" if requested else None


def _model(model: PreTrainedModel, ids: Tensor, inputs: dict[str, Any]) -> str | None:
    if (trains := _in_training_mode(model)) is not None:
        return trains
    if not _on_device(model, ids.device):
        return "the model and `input_ids` are not on one device"
    indexed = getattr(model.config.get_text_config(decoder=True), "index_topk", None) is not None
    if indexed and inputs.get("attention_mask") is not None and not bool(inputs["attention_mask"].all()):
        return "the indexer of the model picks masked keys, as many as the cache has slots"
    return attention_without_masks(model)


def _inputs(model: PreTrainedModel, config: GenerationConfig, inputs: dict[str, Any], assisted: bool) -> str | None:
    """Return the reason why steps can't leave out inputs of a prefill, or don't know those of a step."""
    of_images = inputs_of_prefill(model)
    of_images |= {*TOKEN_TYPES} if of_images else set()  # unless the model prepares its inputs by code of its own
    # Without positions, a step might compute them from the grids of images.
    known = (INPUTS | of_images) - (set() if inputs.get("position_ids") is not None else GRIDS)
    used = {name: x for name, x in sorted(inputs.items()) if not is_missing(x) and x is not False}
    if unknown := used.keys() - known:
        return f"the input `{min(unknown)}` of the model may change at each step"
    if (counted := _counts_by_code(model, inputs)) is not None:
        return counted
    types = {name: x for name, x in used.items() if name in TOKEN_TYPES}
    mixed = [name for name, x in types.items() if not bool((x[:, -1] == x[0, -1]).all())]
    if mixed:
        return f"new tokens have several kinds of `{mixed[0]}`"
    if assisted and used.keys() & of_images:
        return "an assistant in one step reads text alone"
    if config.prefill_chunk_size is not None and used.keys() & of_images:
        return "in chunks of a prefill, the mask of an image depends on the kind of cache"
    return None


def _counts_by_code(model: PreTrainedModel, inputs: dict[str, Any]) -> str | None:
    """Return the reason if code outside of transformers may count a decoder's positions by their mask, or None.

    In a step, the mask has a 1 for each later slot.
    """
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    mask, positions = (inputs.get(f"{prefix}{name}") for name in ("attention_mask", "position_ids"))
    if mask is None or positions is not None:
        return None
    if not type(model).prepare_inputs_for_generation.__module__.startswith("transformers."):
        return f"{type(model).__name__} prepares masks by code of its own, and there are no `{prefix}position_ids`"
    if f"{prefix}position_ids" in inputs and counts_by_mask(model):
        return f"`{prefix}position_ids` is None, beside a mask"
    return None


def _in_training_mode(model: nn.Module, name: str = "the model") -> str | None:
    """Return the reason why a model can't run in a step if a part of it is in training mode.

    Eager and compiled dropout differ.
    """
    trains = (part for part, x in model.named_modules() if x.training and type(x) not in SAME_IN_TRAINING)
    part = next(trains, None)
    if part is None:
        return None
    return f"`{part}` of {name} is in training mode" if part else f"{name} is in training mode"


def _long_text(model: PreTrainedModel, length: int, has_drafts: bool) -> str | None:
    """Return the reason why steps can't generate a text of this length, or None."""
    limit = getattr(model.config, "original_max_position_embeddings", None)
    prepares = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if prepares and limit is not None and length > limit:  # Phi-3 and its relatives
        return f"{type(model).__name__} may compute its cache anew in a text of more than {limit} tokens"
    switch = longrope_length(model.config) if has_drafts else None
    if switch is not None and length > switch:
        return f"longrope changes its angles at {switch} tokens, which the drafts of a step may cross"
    return None


def _on_device(model: PreTrainedModel, device: torch.device) -> bool:
    """Return True if the full model is on this device."""
    return model.device == device and len({*(getattr(model, "hf_device_map", None) or {}).values()}) <= 1


def _penalties(processors: list[Any]) -> int:
    return sum(isinstance(x, RepetitionPenaltyLogitsProcessor) for x in processors)


def _cache(cache: object, config: GenerationConfig, length: int) -> str | None:
    """Return the reason why steps can't use a cache for texts of up to `length` tokens, or None."""
    if not config.use_cache:
        return "`use_cache` is False"
    if not isinstance(cache, Cache):
        return f"the model takes no `transformers.Cache`, but {type(cache).__name__}"
    if not is_users_cache(cache):
        if config.cache_implementation not in IMPLEMENTATIONS:
            return f"the cache of `cache_implementation={config.cache_implementation!r}` is not static"
        return None
    first = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if isinstance(first, DynamicCache):
        return "the cache that was passed is a DynamicCache, which moves as it grows"
    if not first.is_compileable:
        return f"the cache that was passed, {type(first).__name__}, is not static"
    if any(isinstance(layer, StaticSlidingWindowLayer) for layer in first.layers):
        return "the cache that was passed has sliding layers, whose length is a number of the host"
    # The last token is not stored. A step could not raise an error that names the cache.
    room = min((n for layer in first.layers if (n := layer.get_max_length()) > 0), default=length)
    if room < length - 1:
        return f"the cache that was passed has room for {room} tokens, and the text may have {length}"
    return None


def _drafts(
    model: PreTrainedModel,
    ids: Tensor,
    config: GenerationConfig,
    cache: object,
    inputs: dict[str, Any],
) -> str | None:
    """Return the reason why a step can't check drafts."""
    method = f"{'prompt lookup' if config.prompt_lookup_num_tokens else 'an assistant'} in one step"
    if config.do_sample:
        return f"{method} is greedy"
    mask = inputs.get("attention_mask")  # transformers 5.17 passes one of ones
    if len(ids) != 1 or model.config.is_encoder_decoder or (mask is not None and not bool(mask.all())):
        return f"{method} takes one sequence without padding, of a decoder"
    positions = inputs.get("position_ids")
    if positions is not None and not torch.equal(positions, torch.arange(ids.shape[1], device=ids.device)[None]):
        return f"{method} counts positions from 0 on"
    if is_users_cache(cache) or config.return_dict_in_generate:
        return f"{method} keeps its cache to itself"
    return _cannot_remove_drafts(model)


def _cannot_remove_drafts(model: PreTrainedModel) -> str | None:
    """Return the reason why refused drafts can't be removed from a model's cache, or None."""
    if all(isinstance(x, StaticLayer) for x in static_cache(model, 1).layers):
        return None
    return f"the cache layers of {type(model).__name__} can't remove refused drafts"


def _assistant(model: PreTrainedModel, draft: Any, config: GenerationConfig) -> str | None:
    """Return the reason why a step can't run a draft model."""
    if config.assistant_ensemble_weight is not None:
        return "`assistant_ensemble_weight` mixes the scores of two models"
    if getattr(config, "speculation_type", None) is not None or "Assistant" in type(draft).__name__:
        return f"{type(draft).__name__} drafts from the states of the model"
    if drafts_of(config, draft) < 1:
        return "`num_assistant_tokens` leaves the assistant no token to choose"
    if draft.config.is_encoder_decoder:
        return "the assistant is an encoder-decoder"
    if (trains := _in_training_mode(draft, "the assistant")) is not None:
        return trains
    if not _on_device(draft, model.device):
        return "the model and the assistant are not on one device"
    sizes = [x.config.get_text_config(decoder=True).vocab_size for x in (model, draft)]
    if sizes[0] != sizes[1]:
        return f"the model has a vocabulary of {sizes[0]} tokens, the assistant one of {sizes[1]}"
    return moved_method(draft) or attention_without_masks(draft) or _cannot_remove_drafts(draft)
