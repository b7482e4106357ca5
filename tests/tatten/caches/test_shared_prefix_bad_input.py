"""Bad input to a shared-prefix cache is an error that names it, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from shared_prefix_steps import (
    HEAD_DIM,
    KV_HEADS,
    prefill,
    state,
    step,
    tensors,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tatten.caches.shared_prefix import SharedPrefixCache


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


FITTING = (6, KV_HEADS, 1, HEAD_DIM)
BAD = {
    "layer": (lambda c: c.update(2, *tensors(*FITTING)), IndexError, "`layer` must be 0 to 1, got 2"),
    "negative layer": (lambda c: c.update(-1, *tensors(*FITTING)), IndexError, "got -1"),
    "batch": (lambda c: c.update(0, *tensors(2, *FITTING[1:])), ValueError, r"`key` must have shape \(6, 2, 1, 8\)"),
    "heads": (lambda c: c.update(0, *tensors(6, 1, 1, 8)), ValueError, r"got \(6, 1, 1, 8\)"),
    "head_dim": (lambda c: c.update(0, *tensors(6, 2, 1, 4)), ValueError, r"got \(6, 2, 1, 4\)"),
    "rank": (lambda c: c.update(0, *tensors(6, 2, 8)), ValueError, r"`key` must be \[batch"),
    "more dims": (lambda c: c.update(0, *tensors(*FITTING, 1)), ValueError, r"`key` must be \[batch"),
    "dtype": (lambda c: c.update(0, *torch.zeros(2, *FITTING)), TypeError, "`key` must be torch.float64.*float32"),
    "device": (lambda c: c.update(0, *tensors(*FITTING, device="meta")), ValueError, "must be on cpu.*got meta"),
    "value": (lambda c: c.update(0, tensors(*FITTING)[0], tensors(6, 2, 2, 8)[0]), ValueError, "`value` must have"),
    "value dtype": (lambda c: c.update(0, tensors(*FITTING)[0], torch.zeros(FITTING)), TypeError, "`value` must be"),
    "full": (lambda c: c.update(0, *tensors(6, 2, 3, 8)), ValueError, "must hold 1 used and 3 new slots, got 3"),
    "full mask": (lambda c: c.mask(3), ValueError, "1 used and 3 new"),
    "full positions": (lambda c: c.positions(3), ValueError, "1 used and 3 new"),
    "q_len": (lambda c: c.mask(0), ValueError, "`q_len` must be at least 1, got 0"),
    "no children": (lambda c: c.fork(0, 1), ValueError, "`n` must be at least 1, got 0"),
    "no capacity": (lambda c: c.fork(1, 0), ValueError, "`capacity` must be at least 1, got 0"),
    "float children": (lambda c: c.fork(2.0, 1), TypeError, "`n` must be an int, got 2.0"),
    "index": (lambda c: c.select([0, 6]), IndexError, "must be 0 to 5, as the cache holds 6 sequences, got 6"),
    "negative index": (lambda c: c.select([-1]), IndexError, "got -1"),
    "one index": (lambda c: c.select(5), TypeError, "`indices` must be a sequence of integers or a tensor, got 5"),
    "bool crop": (lambda c: c.crop(False), TypeError, "`tokens` must be an int, got False"),
    "no index": (lambda c: c.select([]), ValueError, "at least one"),
    "float index": (lambda c: c.select([0.0]), TypeError, "got 0.0"),
    "bool indices": (lambda c: c.select(torch.ones(6, dtype=torch.bool)), TypeError, "torch.bool"),
    "crop": (lambda c: c.crop(2), ValueError, "`tokens` must be at most 1, the tokens since the last fork, got 2"),
    "negative crop": (lambda c: c.crop(-1), ValueError, "`tokens` must be at least 1, got -1"),
    "float crop": (lambda c: c.crop(1.0), TypeError, "`tokens` must be an int, got 1.0"),
    "2-D indices": (lambda c: c.select(torch.zeros(1, 1, dtype=torch.int64)), ValueError, r"shape \(1, 1\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_changes_nothing(name: str) -> None:
    call, error, message = BAD[name]
    cache, texts = prefill(2, 3)
    cache, texts = cache.fork(3, 3), [text for text in texts for _ in range(3)]
    texts = step(cache, texts)
    before = state(cache)
    with pytest.raises(error, match=message):
        call(cache)
    assert all(torch.equal(a, b) for a, b in zip(before, state(cache), strict=True))
    step(cache, texts, 2)


def test_bad_order() -> None:
    with pytest.raises(ValueError, match=r"`fork` needs a prefill of all 2 layers, got none in layers \[0, 1\]"):
        SharedPrefixCache(2).fork(1, 1)
    cache, _ = prefill(2, 3)
    cache.update(0, *tensors(2, 2, 1, 8))
    with pytest.raises(ValueError, match=r"`fork` must come between steps.*got \[4, 3\]"):
        cache.fork(1, 1)
    child = prefill(2, 3)[0].fork(1, 1)
    child.update(0, *tensors(2, 2, 1, 8))
    with pytest.raises(ValueError, match=r"`fork` must come between steps.*got \[1, 0\]"):
        child.fork(1, 1)


def test_a_full_cache_can_be_forked_but_not_written() -> None:
    cache, texts = prefill(1, 3)
    cache = cache.fork(2, 1)
    texts = step(cache, texts * 2)
    with pytest.raises(ValueError, match="must hold 1 used and 1 new slots, got 1"):
        cache.update(0, *tensors(2, 2, 1, 8))
    step(cache.fork(2, 1), [text for text in texts for _ in range(2)])


@pytest.mark.parametrize(
    "real, error, message",
    [
        (torch.ones(2, 3), TypeError, "`prompt_mask` must be bool, got torch.float32"),
        (torch.ones(3, dtype=torch.bool), ValueError, r"must be \[prompts, length\], got shape \(3,\)"),
        (torch.ones(2, 3, 1, dtype=torch.bool), ValueError, r"must be \[prompts, length\], got shape \(2, 3, 1\)"),
        (torch.ones(1, 3, dtype=torch.bool), ValueError, "must have batch 2, as `key`, got 1"),
        (torch.ones(2, 2, dtype=torch.bool), ValueError, "must cover all or none of tokens 0 to 2, got 2"),
        (torch.ones(2, 3, dtype=torch.bool, device="meta"), ValueError, "must be on cpu, as `key`, got meta"),
    ],
)
def test_bad_prompt_mask(real: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SharedPrefixCache(2, real).update(0, *tensors(2, 2, 3, 8))


@pytest.mark.parametrize(
    "lens, error, message",
    [
        (torch.ones(2), TypeError, "`prompt_lens` must be int32 or int64, got torch.float32"),
        ([3, 2], TypeError, "`prompt_lens` must be a Tensor, got list"),
        (torch.ones(2, 1, dtype=torch.int64), ValueError, r"must be \[prompts\], got shape \(2, 1\)"),
        (torch.ones(1, dtype=torch.int64), ValueError, "`prompt_lens` must have batch 2, as `key`, got 1"),
        (torch.ones(2, dtype=torch.int64, device="meta"), ValueError, "must be on cpu, as `key`, got meta"),
        (torch.tensor([3, -1]), ValueError, "`prompt_lens` must be at least 0, got -1"),
    ],
)
def test_bad_prompt_lens(lens: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SharedPrefixCache(2, prompt_lens=lens).update(0, *tensors(2, 2, 3, 8))
    with pytest.raises(ValueError, match="`prompt_lens` must be None if `prompt_mask` is passed, got both"):
        SharedPrefixCache(2, torch.ones(2, 3, dtype=torch.bool), prompt_lens=lens)


def test_lengths_beyond_the_prompts() -> None:
    cache = SharedPrefixCache(1, prompt_lens=torch.tensor([3, 5]))
    cache.update(0, *tensors(2, 2, 3, 8))
    with pytest.raises(ValueError, match=r"`prompt_lens` must be at most 3, the tokens .*, got 5"):
        cache.fork(2, 4)
    cache.update(0, *tensors(2, 2, 2, 8))  # the second chunk of the prefill
    samples = cache.fork(2, 4)
    samples.update(0, *tensors(4, 2, 2, 8))
    assert samples.fork(2, 4).batch_size == 8


def test_lengths_without_values() -> None:
    with FakeTensorMode():
        assert SharedPrefixCache(1, prompt_lens=torch.tensor([3, 2])).prompts.lens is not None
    empty = SharedPrefixCache(1, prompt_lens=torch.zeros(0, dtype=torch.int64))
    empty.update(0, *tensors(0, 2, 3, 8))
    assert empty.fork(2, 4).batch_size == 0


def test_layers_of_one_cache_hold_one_batch() -> None:
    cache = SharedPrefixCache(2)
    cache.update(0, *tensors(2, 2, 3, 8))
    with pytest.raises(ValueError, match="`key` must have batch 2, as in layer 0, got 1"):
        cache.update(1, *tensors(1, 2, 3, 8))


def test_keys_that_want_gradients_are_refused_by_a_suffix() -> None:
    cache, _ = prefill(2, 3)
    child = cache.fork(1, 4)
    before = state(child)
    key = torch.randn(2, KV_HEADS, 1, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="`value` must not require grad"):
        child.update(0, key.detach(), key)
    assert all(map(torch.equal, state(child), before))
    with torch.no_grad():
        child.update(0, key, key)


def test_what_needs_something_else() -> None:
    with pytest.raises(ValueError, match="`heads` must name a dim of `mesh`, got 'tp' without a mesh"):
        SharedPrefixCache(1, heads="tp")
    with pytest.raises(ValueError, match="`indices` must come after a prefill"):
        SharedPrefixCache(1).select([0])
