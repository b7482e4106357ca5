"""The call of `generate` that runs a `custom_generate`. All use of private parts of `generate` is in this file."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from tatten.ops.moved import moved

# Attributes of a model that only `generate` reads or writes, not a forward pass.
BOOKKEEPING = "generation_config", "_previous_max_cache_length", "_compiled_call", "_last_compile_config"

# Methods of `generate` whose work a step does, and what a model with a method of its own does in another way.
REPLACED = {
    "_update_model_kwargs_for_generation": "updates its inputs after each token",
    "_sample": "samples tokens",
    "_has_unfinished_sequences": "ends texts",
}

# Inputs of which new tokens have an entry, too: that of the last token, but 0 for the ones of `mm_token_type_ids`.
TOKEN_TYPES = "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"
# Inputs that the models of transformers read for the positions of a prompt and with the images of a prefill.
GRIDS = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts"}
# Models with a `prepare_inputs_for_generation` of their own, which uses images only in a prefill.
OWN_PREPARATION = {"transformers.models.gemma3.modeling_gemma3.Gemma3ForConditionalGeneration"}
# Models whose `prepare_inputs_for_generation` counts the positions of a decoder's tokens by their mask, which in a step
# has a 1 for each later slot.
COUNTS_BY_MASK = {"transformers.models.whisper.modeling_whisper.WhisperForConditionalGeneration"}


class Dropped(NamedTuple):
    """The arguments of `generate` that it does not pass to a callable `custom_generate` (transformers 5.17 to 5.24).

    `generate` puts the prompt into the streamer. A loop without the streamer could not end it, so a thread that reads a
    `TextIteratorStreamer` would wait forever.
    """

    streamer: Any = None
    assistant_model: Any = None
    synced_gpus: bool | None = None
    inputs_tensor: Tensor | None = None


def moved_method(model: PreTrainedModel) -> str | None:
    """Return the reason why the methods of a model rule out the loop, or None.

    A method of transformers has moved, the model overrides it, or transformers says that the model does not compile.
    """
    for name in ("_prefill", "_extract_generation_mode_kwargs", *REPLACED):
        if not hasattr(GenerationMixin, name):
            return moved(f"transformers.GenerationMixin.{name}", AttributeError(name), "`generate` runs its own loop")
    for name, does in REPLACED.items():
        if getattr(getattr(model, name), "__func__", None) is not getattr(GenerationMixin, name):
            return f"{type(model).__name__} {does} by code of its own"
    if not getattr(model, "_can_compile_fullgraph", True):
        return f"transformers says that {type(model).__name__} does not compile as one graph with a static cache"
    return None


def inputs_of_prefill(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of inputs that steps don't read: images, sounds and their sizes."""
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    base = type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
    if not base and name not in OWN_PREPARATION:
        return frozenset()
    try:
        from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL as names
    except ImportError as error:
        moved("transformers.generation.utils", error, "`generate` runs its own loop for images and sounds")
        return frozenset()
    return frozenset(names) | (GRIDS if name.startswith("transformers.models.") else set())


def counts_by_mask(model: PreTrainedModel) -> bool:
    """Return True if a model prepares inputs by the method of one in `COUNTS_BY_MASK`."""
    method = type(model).prepare_inputs_for_generation
    return f"{method.__module__}.{method.__qualname__.rpartition('.')[0]}" in COUNTS_BY_MASK


def drafts_of(config: GenerationConfig, draft: PreTrainedModel) -> int:
    """Return the number of tokens that a draft model proposes in a step; 0 if none is set."""
    return int(draft.generation_config.num_assistant_tokens or config.num_assistant_tokens or 0)


def is_users_cache(cache: Any) -> bool:
    """Return True if the user passed the cache, False if `generate` made it."""
    return bool(getattr(cache, "_is_user_defined", False))


def pad_token(config: GenerationConfig, device: torch.device) -> Tensor:
    """Return the token that follows the end of a text, 0-d."""
    try:
        token: Tensor = config._pad_token_tensor
    except AttributeError as error:
        moved("transformers.GenerationConfig._pad_token_tensor", error, "the token comes from `pad_token_id`")
        token = torch.tensor(config.pad_token_id)
    return token.to(device).reshape(()).clone()


def dropped_arguments(model: PreTrainedModel) -> Dropped:
    """Read the arguments from the frame of the running `generate` in this thread. Without one, all are None.

    `synced_gpus` is also True if `generate` would set it: for models that FSDP or ZeRO-3 shards over ranks.
    """
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return Dropped()
    dropped = Dropped(**{name: frame.f_locals.get(name) for name in Dropped._fields})
    if dropped.synced_gpus is None and hasattr(model, "_extract_generation_mode_kwargs"):
        defaults = model._extract_generation_mode_kwargs(None, {}, None, None, None)
        dropped = dropped._replace(synced_gpus=defaults.get("synced_gpus"))
    return dropped


def prefill(model: PreTrainedModel, ids: Tensor, config: GenerationConfig, inputs: dict[str, Any]) -> Any:
    """Run the prefill of `generate`, in chunks if the config asks for them, and return the model's output."""
    return model._prefill(ids, config, inputs)


@contextlib.contextmanager
def decoding(model: PreTrainedModel) -> Iterator[None]:
    """Run experts by the implementation that `generate` chooses for decode steps."""
    try:
        context = model._optimize_model_for_decode()
    except AttributeError as error:
        moved("transformers.GenerationMixin._optimize_model_for_decode", error, "experts run as in a prefill")
        context = contextlib.nullcontext()
    with context:
        yield


def run_unmodified(
    model: PreTrainedModel, ids: Tensor, config: GenerationConfig, dropped: Dropped, arguments: dict[str, Any]
) -> Any:
    """Run the method that `generate` would have called without `custom_generate`.

    Raises:
        NotImplementedError: transformers has moved the method to the Hub.
    """
    from transformers.generation.utils import GENERATION_MODES_MAPPING

    mode = config.get_generation_mode(dropped.assistant_model)
    name = GENERATION_MODES_MAPPING[mode]
    if "/" in name:
        raise NotImplementedError(
            f"`custom_generate` must be {name!r} for {mode.value}, which transformers moved there, got the decode loop"
        )
    method = getattr(type(model), name)
    parameters = inspect.signature(method).parameters
    restored = {name: x for name, x in dropped._asdict().items() if x is not None and name in parameters}
    return method(model, ids, generation_config=config, **restored, **arguments)


def rng_state(device: torch.device) -> Tensor:
    """Return the state of the device's default generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Set the state of the device's default generator."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
