"""The shared-prefix cache against recomputation of every sequence: its sharing, forks and compilation."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from shared_prefix_steps import (
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    MODEL,
    VOCAB,
    Decoder,
    prefill,
    state,
    step,
    tensors,
)
from torch import Tensor

from tatten.caches.shared_prefix import SharedPrefixCache


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("padding", [None, "left", "right", "lengths"])
def test_levels(padding: str | None) -> None:
    cache, texts = prefill(2, 5, padding)
    if padding != "lengths":
        texts = step(cache, texts)  # a root that goes on after its prompts
    for n in (3, 1, 2):
        cache, texts = cache.fork(n, 4), [text for text in texts for _ in range(n)]
        for q_len in (1, 2, 1):
            texts = step(cache, texts, q_len)
    assert cache.batch_size == 12
    assert [key.shape[0] for key, _ in cache.layers[0].segments] == [2, 6, 6]


def test_last_prompt_token_after_the_fork() -> None:
    """A prompt mask may be one longer than the prefix."""
    tokens = torch.randint(VOCAB, (2, 4))
    real = torch.tensor([[False, True, True, True], [True] * 4])
    cache = SharedPrefixCache(LAYERS, real)
    MODEL(tokens[:, :3], cache)
    got = MODEL(tokens[:, 3:].repeat_interleave(2, 0), cache.fork(2, 1))
    want = torch.cat([MODEL(row[None, mask])[:, -1:] for row, mask in zip(tokens, real, strict=True)])
    torch.testing.assert_close(got, want.repeat_interleave(2, 0))


@pytest.mark.parametrize("padding", [None, "left", "lengths"])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_forks_selections_and_steps(seed: int, padding: str | None) -> None:
    """Caches derived from each other are independent: whatever happens to one, the others continue their own texts."""
    choose = random.Random(seed)
    caches = [prefill(2, 5, padding)]
    if padding == "lengths":
        caches = [(caches[0][0].fork(1, 3), caches[0][1])]
    for _ in range(24):
        index = choose.randrange(len(caches))
        cache, texts = caches[index]
        action = choose.choice(["step", "step", "fork", "select", "select_", "crop", "into"])
        room = cache.capacity - int(cache.layers[0].length) if cache.capacity else 9
        if action == "step" and room:
            caches[index] = cache, step(cache, texts, choose.randint(1, min(2, room)))
        elif action == "fork" and len(texts) <= 6:
            n = choose.randint(1, 3)
            caches.append((cache.fork(n, choose.randint(1, 4)), [text for text in texts for _ in range(n)]))
        elif action == "into" and len(texts) <= 6:
            n, capacity = choose.randint(1, 3), choose.randint(1, 4)
            old = copy.deepcopy(cache.select(range(len(texts)))).fork(n, capacity)
            caches.append((cache.fork(n, capacity, into=old), [text for text in texts for _ in range(n)]))
        elif action == "crop" and cache.capacity:
            tokens = choose.randint(0, int(cache.layers[0].length) - cache.layers[0].frozen)
            cache.crop(tokens)
            caches[index] = cache, [text[: len(text) - tokens] for text in texts]
        elif action.startswith("select"):
            picked = [choose.randrange(len(texts)) for _ in range(choose.randint(1, 6))]
            if choose.random() < 0.5:
                picked.sort()
            if action == "select":
                caches.append((cache.select(picked), [texts[i] for i in picked]))
            else:
                cache.select_(picked)
                caches[index] = cache, [texts[i] for i in picked]
    for cache, texts in caches:
        if not cache.capacity or int(cache.layers[0].length) < cache.capacity:
            step(cache, texts)


@pytest.mark.parametrize("padding", [None, "left"])
def test_compiles_once(padding: str | None) -> None:
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(MODEL, fullgraph=True, backend=backend)
    for _ in range(2):
        root, prompts = prefill(2, 5, padding)
        cache, texts = root.fork(3, 4), [text for text in prompts for _ in range(3)]
        for _ in range(4):
            texts = step(cache, texts, forward=compiled)
    assert len(graphs) == 1
    calls = [node.target for node in graphs[0].graph.nodes if node.op.startswith("call")]
    assert calls.count(torch.cat) == 2 * LAYERS
    assert calls.count("index_copy_") == 2 * LAYERS
    assert not any("tatten" in str(target) for target in calls)


def test_update_returns_prefix_and_all_slots() -> None:
    cache, _ = prefill(2, 3)
    child = cache.fork(2, 4)
    key, value = torch.randn(2, 4, KV_HEADS, 1, HEAD_DIM, dtype=torch.float64).unbind()
    keys, values = child.update(0, key, value)
    for got, prefix, new in zip((keys, values), cache.layers[0].segments[0], (key, value), strict=True):
        want = [prefix.repeat_interleave(2, 0), new, new.new_zeros(4, KV_HEADS, 3, HEAD_DIM)]
        assert torch.equal(got, torch.cat(want, dim=2))


def test_mask_and_positions_stay_within_a_step() -> None:
    cache = SharedPrefixCache(3, torch.tensor([[False, True, True]]))
    assert cache.positions(3).tolist() == [[0, 0, 1]]
    for _ in range(2):
        q_len = 2 if cache.capacity else 3
        before = cache.mask(q_len), cache.positions(q_len)
        for layer in range(3):
            assert torch.equal(cache.mask(q_len), before[0])
            assert torch.equal(cache.positions(q_len), before[1])
            key = torch.randn(1, 1, q_len, 4)
            assert cache.update(layer, key, key)[0].shape[2] == before[0].shape[3]
        cache = cache.fork(1, 5)
    assert cache.mask().tolist() == [[[[False, True, True, True, True, True, False, False, False, False]]]]
    assert cache.positions(2).tolist() == [[4, 5]]


@pytest.mark.parametrize("q_len", [1, 3])
def test_lengths_of_prompts(q_len: int) -> None:
    """Positions go on from each prompt's length, and the tokens beyond it are nobody's."""
    cache = SharedPrefixCache(1, prompt_lens=torch.tensor([2, 4, 1], dtype=torch.int32))
    assert cache.positions(4).tolist() == [[0, 1, 1, 1], [0, 1, 2, 3], [0, 0, 0, 0]]
    cache.update(0, *tensors(3, 1, 4, 2))
    cache = cache.fork(2, 5).select([0, 5, 2])
    assert cache.positions(q_len)[:, -1].tolist() == [q_len + 1, q_len, q_len + 3]
    assert cache.mask(q_len)[:, 0, -1].sum(-1).tolist() == [q_len + 2, q_len + 1, q_len + 4]
    assert cache.mask(q_len)[1, 0, -1, :5].tolist() == [True, False, False, False, True]


def test_crop_frees_slots_but_not_those_of_children() -> None:
    cache, texts = prefill(1, 3)
    cache, texts = cache.fork(2, 4), texts * 2
    texts = step(cache, texts, 3)
    cache.crop(2)
    texts = step(cache, [text[:-2] for text in texts], 2)
    child, its_texts = cache.fork(1, 1), [*texts]
    texts = step(cache, texts)
    cache.crop(0)
    cache.crop(1)
    texts = [text[:-1] for text in texts]
    with pytest.raises(ValueError, match="`tokens` must be at most 0, the tokens since the last fork, got 1"):
        cache.crop(1)
    step(child, its_texts)
    step(cache, texts)
    root, texts = prefill(1, 5)
    root.crop(2)
    step(root, [text[:-2] for text in texts])


def test_a_fork_into_an_old_one_says_what_differs() -> None:
    cache, _ = prefill(2, 4)
    old = prefill(2, 4)[0].fork(2, 3)
    longer, wider = prefill(2, 5)[0], prefill(3, 4)[0]
    padded = prefill(2, 4, "left")[0]
    one_layer = SharedPrefixCache(1)
    one_layer.update(0, *tensors(2, 2, 4, 8))
    halves = SharedPrefixCache(2)
    for layer in range(2):
        halves.update(layer, *torch.zeros(2, 2, KV_HEADS, 4, HEAD_DIM))
    before = state(old)
    for parent, n, capacity, message in [
        (cache, 3, 3, r"the same batch and capacity, \(6, 3\), got \(4, 3\)"),
        (cache, 2, 4, r"the same batch and capacity, \(4, 4\), got \(4, 3\)"),
        (wider, 2, 3, r"the same batch and capacity, \(6, 3\), got \(4, 3\)"),
        (longer, 2, 3, r"levels of the same lengths, \(5,\), got \(4,\)"),
        (one_layer, 2, 3, "the same number of layers, 1, got 2"),
        (halves, 2, 3, "the same keys in level 0 of layer 0, .*float32.*got .*float64"),
        (padded, 2, 3, r"prompts of the same kind, .*'prompt_mask': \(\(2, 4\), torch.bool, 'cpu'\).*got \{\}"),
        (cache.fork(1, 3).select([1, 0]), 2, 3, "have rows in level 0, as the new selection has, got none"),
        (step_once(cache.fork(1, 3)), 2, 3, r"levels of the same lengths, \(4, 1\), got \(4,\)"),
    ]:
        with pytest.raises(ValueError, match=f"`into` must .*{message}"):
            parent.fork(n, capacity, into=old)
    with pytest.raises(TypeError, match="`into` must be a SharedPrefixCache, got int"):
        cache.fork(2, 3, into=1)
    with pytest.raises(ValueError, match=r"the same batch and capacity, \(4, 3\), got \(2, 0\)"):
        cache.fork(2, 3, into=longer)
    tree = prefill(3, 4)[0].fork(1, 3)
    with pytest.raises(ValueError, match="memory of its own, got one that shares rows or slots with the keys"):
        tree.select([0]).fork(1, 3, into=tree.select([1]))
    assert all(torch.equal(a, b) for a, b in zip(before, state(old), strict=True))
    used = step_once(cache.fork(1, 3))
    with pytest.raises(ValueError, match="`into` must"):
        used.fork(2, 3, into=old)
    used.crop(1)  # no child reads it


def step_once(cache: SharedPrefixCache) -> SharedPrefixCache:
    MODEL(torch.zeros(cache.batch_size, 1, dtype=torch.int64), cache)
    return cache


def test_a_fork_into_an_old_one_of_the_same_parent_copies_nothing() -> None:
    cache, texts = prefill(1, 3)
    fork = cache.fork(2, 2)
    step(fork, texts * 2)
    assert cache.fork(2, 2, into=fork) is fork
    step(fork, texts * 2, 2)


def check_on_cuda(model: Decoder, padded: bool, make_step: Callable[[SharedPrefixCache], Callable]) -> None:
    """Eight steps of three children of two prompts, the last four of which must not wait for the device."""
    prompts, new = torch.randint(VOCAB, (2, 3)), torch.randint(VOCAB, (6, 8))
    real = torch.tensor([[not padded, True, True], [True, True, True]])
    root = SharedPrefixCache(LAYERS, real.cuda() if padded else None)
    with torch.device("cuda"):  # where an empty cache without a prompt mask makes its mask
        model(prompts.cuda(), root)
    cache, got = root.fork(3, 8), []
    forward = make_step(cache)
    for index, token in enumerate(new.cuda().split(1, dim=1)):
        torch.cuda.set_sync_debug_mode("error" if index >= 4 else "default")
        got.append(forward(token).clone())
    torch.cuda.set_sync_debug_mode("default")
    for row, text in enumerate(torch.cat([prompts.repeat_interleave(3, 0), new], dim=1)):
        text = text[1:] if padded and row < 3 else text
        torch.testing.assert_close(torch.cat(got, dim=1)[row].cpu(), MODEL(text[None])[0, -8:])


@pytest.mark.gpu
def test_select_on_cuda() -> None:
    root = SharedPrefixCache(1)
    root.update(0, *tensors(2, 2, 3, 8, device="cuda"))
    chosen = root.fork(2, 1).select([3, 0])
    assert all(tensor.is_cuda for tensor in chosen.layers[0].tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("padded", [False, True])
def test_compiled_on_cuda(mode: str, padded: bool) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = copy.deepcopy(MODEL).cuda()
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.no_grad():
        for _ in range(2):
            check_on_cuda(model, padded, lambda cache: lambda token: compiled(token, cache))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
def test_captured_on_cuda(padded: bool) -> None:
    model = copy.deepcopy(MODEL).cuda()

    def capture(cache: SharedPrefixCache) -> Callable:
        token, graph = torch.zeros(cache.batch_size, 1, dtype=torch.int64, device="cuda"), torch.cuda.CUDAGraph()
        model(token, cache.fork(1, 1))  # what is made on first use cannot be captured
        with torch.cuda.graph(graph):
            out = model(token, cache)

        def replay(new: Tensor) -> Tensor:
            token.copy_(new)
            graph.replay()
            return out

        return replay

    with torch.no_grad():
        check_on_cuda(model, padded, capture)
