"""A workload of prompts of one length through a fork of a `SharedPrefixCache` in `generate`, compiled by tatten."""

from __future__ import annotations

import itertools
import statistics
import time

import torch
from transformers import CompileConfig, PreTrainedModel

from support.batch_settings import Setting
from support.batches import Batch
from tatten.integrations.transformers import SharedPrefixCache, cache_kwargs


class Clock:
    """Notes when each step ends: `generate` waits for the device in each, to see whether it is done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return logits


class Forked:
    """Draws samples repeatedly in the memory of the first fork, so that graphs captured over it stay valid."""

    def __init__(self, model: PreTrainedModel, setting: Setting):
        self.model, self.setting = model, setting
        self.fork: SharedPrefixCache | None = None
        self.compile_config = CompileConfig(backend="tatten")
        self.compile_config._compile_all_devices = True  # transformers compiles on accelerators only, unless told

    @torch.no_grad()
    def draw(self, seed: int) -> Batch:
        setting, clock = self.setting, Clock()
        inputs = setting.inputs(self.model.config.vocab_size, seed)
        start = time.perf_counter()
        prompts = torch.tensor(inputs, device=self.model.device)
        cache = SharedPrefixCache(self.model.config)
        self.model(prompts[:, :-1], **cache_kwargs(cache), logits_to_keep=1)
        self.fork = cache.fork(setting.samples, capacity=setting.new, into=self.fork)
        texts = self.model.generate(
            prompts,
            **cache_kwargs(self.fork),
            num_return_sequences=setting.samples,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=setting.new,
            pad_token_id=0,
            eos_token_id=None,
            logits_processor=[clock],
            compile_config=self.compile_config,
        )
        tokens = texts[:, prompts.shape[1] :].tolist()
        seconds = time.perf_counter() - start
        steps = [b - a for a, b in itertools.pairwise(clock.times)]
        return Batch(tokens, seconds, statistics.median(steps) * 1e3)

    @property
    def pool_bytes(self) -> int:
        assert self.fork is not None
        return self.fork.nbytes
