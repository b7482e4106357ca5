"""Rollouts for TRL's `GRPOTrainer` without vLLM: each distinct prompt is prefilled and stored once for its samples."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from trl import GRPOTrainer, is_conversational
from trl.models import unwrap_model_for_generation

from tatten.integrations.transformers import SharedPrefixCache
from tatten.integrations.transformers.config import cache_argument, cache_kwargs
from tatten.ops.moved import moved
from tatten.ops.sizes import ceil_div

Tokens = list[list[int]]


class SharedPrefixRollouts:
    """A `rollout_func` for `GRPOTrainer`. With the same seed, it draws the completions that the trainer would draw.

    The trainer passes each prompt `num_generations` times, and its rollouts with `generate` compute and store each
    copy. This function prefills a prompt once and decodes from a fork of a `SharedPrefixCache`. On a GPU the decode
    step is compiled, as in `generate`.

        trainer = GRPOTrainer(model, rewards, args=config, train_dataset=prompts, rollout_func=SharedPrefixRollouts())

    A process may have any part of a prompt's samples. The keys and values of the last rollout are kept until the next
    rollout. If its prompts have the same length, it reuses their memory, and CUDA graphs stay valid.
    `pad_to_multiple_of` of the `GRPOConfig` makes this likely, and saves compilations.

    Args:
        compile_config: the config with which `generate` compiles the decode step. Default:
            `CompileConfig(backend="tatten")`.
    """

    def __init__(self, compile_config: CompileConfig | None = None):
        self.compile_config = CompileConfig(backend="tatten") if compile_config is None else compile_config
        self._last: tuple[object, SharedPrefixCache] | None = None

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, Tokens | None]:
        """Draw a completion of each prompt.

        Returns:
            `prompt_ids` and `completion_ids`, lists of tokens; and `logprobs`, which is None, as in the trainer's
            rollouts with `generate`: the trainer computes log-probabilities in a separate forward pass.

        Raises:
            ValueError: the trainer generates with vLLM, is sharded by FSDP, has environments, uses beam search, or
                sets no length for completions; or the prompts are more than text.
        """
        _check(trainer)
        prompt_ids = _tokenize(prompts, trainer)
        with _unwrapped(trainer) as model, _without_gradient_hooks(model), torch.no_grad():
            completions = self._generate(model, prompt_ids, trainer)
        return {"prompt_ids": prompt_ids, "completion_ids": _cut(completions, trainer.eos_token_ids), "logprobs": None}

    def _generate(self, model: PreTrainedModel, prompt_ids: Tokens, trainer: GRPOTrainer) -> Tensor:
        """Return the new tokens of each prompt, `[batch, new_tokens]`."""
        distinct: dict[tuple[int, ...], int] = {}
        indices = [distinct.setdefault(tuple(ids), len(distinct)) for ids in prompt_ids]
        ids, mask = _left_padded(list(distinct), trainer)
        config = self._generation_config(trainer.generation_config)

        prompts = SharedPrefixCache(model.config)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :-1]  # as `generate` numbers them
        arguments = {"attention_mask": mask[:, :-1], "position_ids": positions, cache_argument(model): prompts}
        model(ids[:, :-1], **arguments, logits_to_keep=1)
        memory = [(x.shape, x.dtype, x.device) for layer in prompts.layers for x in layer.kv.tensors]
        shapes = indices, config.max_new_tokens, memory
        into = self._last[1] if self._last is not None and self._last[0] == shapes else None
        self._last = None  # frees a cache of other shapes before a new one is allocated
        cache = prompts.fork(1, capacity=config.max_new_tokens).select(indices, into=into)
        self._last = shapes, cache

        arguments = {"attention_mask": mask[indices], **cache_kwargs(cache)}
        tokens: Tensor = model.generate(ids[indices], **arguments, generation_config=config)
        return tokens[:, ids.shape[1] :]

    def _generation_config(self, config: GenerationConfig) -> GenerationConfig:
        """Return the trainer's config with this class's cache and compilation."""
        config = copy.deepcopy(config)
        config.cache_implementation, config.disable_compile = None, False
        config.use_cache = True
        config.compile_config = self.compile_config
        return config


class ForkedRollouts:
    """A `rollout_func` for `GRPOTrainer` with `use_transformers_continuous_batching`, which reads each prompt once.

    The trainer passes each prompt `num_generations` times, and its batches prefill each copy. This function prefills a
    prompt once, and forks its samples. With attention "tatten" each decode step reads the shared pages once.

        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tatten")
        config = GRPOConfig(..., use_transformers_continuous_batching=True)
        trainer = GRPOTrainer(model, rewards, args=config, train_dataset=prompts, rollout_func=ForkedRollouts())

    A process may have any part of a prompt's samples. Prompts with the same number of samples form one batch.
    """

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, Tokens | None]:
        """Draw a completion of each prompt.

        Returns:
            The same as `SharedPrefixRollouts`.

        Raises:
            ValueError: the trainer has no continuous batching, or `SharedPrefixRollouts` rejects it.
            RuntimeError: transformers returned no completion for some sample.
        """
        _check(trainer)
        if not trainer.use_transformers_continuous_batching:
            raise ValueError("`trainer` must have use_transformers_continuous_batching=True, got False")
        prompt_ids = _tokenize(prompts, trainer)
        completions: Tokens = [[] for _ in prompt_ids]
        with _unwrapped(trainer) as model, torch.no_grad():
            training = model.training
            try:
                for n, requests in sorted(_by_samples(prompt_ids).items()):
                    batch_completions = self._generate(model, [ids for ids, _ in requests], n, trainer)
                    places = itertools.chain(*(places for _, places in requests))
                    for place, completion in zip(places, batch_completions, strict=True):
                        completions[place] = completion
            finally:
                model.train(training)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}

    def _generate(self, model: PreTrainedModel, prompt_ids: Tokens, n: int, trainer: GRPOTrainer) -> Tokens:
        """Draw `n` completions of each prompt, one prompt after the other."""
        config = copy.deepcopy(trainer.generation_config)
        config.num_return_sequences = n
        batching_config = copy.deepcopy(trainer.continuous_batching_config)
        outputs = model.generate_batch(
            prompt_ids, generation_config=config, continuous_batching_config=batching_config
        ).values()
        errors = [x.error for x in outputs if x.error is not None]
        if errors or len(outputs) != n * len(prompt_ids):
            reason = errors[0] if errors else "see its log"
            missing = n * len(prompt_ids) - len(outputs) + len(errors)
            raise RuntimeError(f"`generate_batch` returned no completion for {missing} samples: {reason}")
        return [x.generated_tokens for x in outputs]


def _by_samples(prompt_ids: Tokens) -> dict[int, list[tuple[list[int], list[int]]]]:
    """Group the distinct prompts by their number of samples; each prompt comes with the places of its samples."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, ids in enumerate(prompt_ids):
        places.setdefault(tuple(ids), []).append(place)
    groups: dict[int, list[tuple[list[int], list[int]]]] = {}
    for prompt, prompt_places in places.items():
        # transformers (5.24) computes all tokens except the last before it forks, so a prompt of one can't be forked.
        for samples in [prompt_places] if len(prompt) > 1 else [[place] for place in prompt_places]:
            groups.setdefault(len(samples), []).append((list(prompt), samples))
    return groups


def _unwrapped(trainer: GRPOTrainer) -> AbstractContextManager[PreTrainedModel]:
    """Unwrap the model for generation as the trainer's rollouts do."""
    unwrapped: AbstractContextManager[PreTrainedModel] = unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
        generation_kwargs=trainer.generation_kwargs,
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    )
    return unwrapped


def _check(trainer: GRPOTrainer) -> None:
    new, beams = trainer.generation_config.max_new_tokens, trainer.generation_config.num_beams
    for rejected, requirement in (
        (trainer.use_vllm, "generate with transformers, got use_vllm=True"),
        (trainer.is_fsdp_enabled, "have all weights on each rank, got FSDP"),
        (trainer.environment_factories is not None, "have no environments, got an `environment_factory`"),
        (new is None, "have a `max_completion_length`, which sets the cache's capacity, got None"),
        (beams not in (None, 1), f"draw its completions one by one, got num_beams={beams}"),
    ):
        if rejected:
            raise ValueError(f"`trainer` must {requirement}")


@contextmanager
def _without_gradient_hooks(model: PreTrainedModel) -> Iterator[None]:
    """Remove the hooks that make the embeddings' output require grad, which a rollout does not need.

    transformers (5.23) adds another hook each time gradient checkpointing is enabled, which TRL does several times in a
    step. A compiled model is compiled again for each number of hooks.
    """
    try:
        hooks = model.get_input_embeddings()._forward_hooks
    except AttributeError as error:
        moved("torch.nn.Module._forward_hooks", error, "rollouts may be compiled again and again")
        hooks = {}
    all_hooks = dict(hooks)
    for key, hook in all_hooks.items():
        if getattr(hook, "__name__", None) == "make_inputs_require_grads":
            del hooks[key]
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(all_hooks)


def _tokenize(prompts: Sequence[Any], trainer: GRPOTrainer) -> Tokens:
    """Tokenize text prompts as the trainer does."""
    if is_conversational({"prompt": prompts[0]}):
        tokenized = trainer.processing_class.apply_chat_template(
            conversation=prompts,
            tools=trainer.tools or None,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )
    else:
        tokenized = trainer.processing_class(text=prompts)
    if other_inputs := sorted(tokenized.keys() - {"input_ids", "attention_mask"}):
        raise ValueError(f"`prompts` must be text that becomes only tokens, got {other_inputs} as well")
    ids: Tokens = tokenized["input_ids"]
    return ids


def _left_padded(prompt_ids: Sequence[Sequence[int]], trainer: GRPOTrainer) -> tuple[Tensor, Tensor]:
    """Return tokens and attention mask, `[prompts, length]`, left-padded.

    The length is at least two: one token to prefill, and one to decode.
    """
    multiple = trainer.pad_to_multiple_of or 1
    length = ceil_div(max(2, *map(len, prompt_ids)), multiple) * multiple
    shape, device = (len(prompt_ids), length), trainer.accelerator.device
    ids = torch.full(shape, trainer.generation_config.pad_token_id)
    mask = torch.zeros(shape, dtype=torch.int64)
    for row, real, tokens in zip(ids, mask, prompt_ids, strict=True):
        row[length - len(tokens) :] = torch.tensor(tokens)
        real[length - len(tokens) :] = 1
    return ids.to(device), mask.to(device)


def _cut(completions: Tensor, ends: Sequence[int]) -> Tokens:
    """Cut each completion after its first end token."""
    rows = completions.tolist()
    lengths = [next((i for i, token in enumerate(row, start=1) if token in ends), len(row)) for row in rows]
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]
