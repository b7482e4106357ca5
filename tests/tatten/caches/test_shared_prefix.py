"""The shared-prefix cache against recomputation of every sequence: its sharing, compilation and errors."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tatten.caches import shared_prefix
from tatten.caches.selection import Selection
from tatten.caches.shared_prefix import SharedPrefixCache

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 4, 2, 8, 23
Texts = list[list[int]]


class Decoder(torch.nn.Module):
    """A model of attention only; without a cache it processes whole texts."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        width = HEADS * HEAD_DIM
        random_table = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
        self.register_buffer("tokens", random_table(VOCAB, width))
        self.register_buffer("places", random_table(64, width))
        self.register_buffer("weights", random_table(LAYERS, width, width + 2 * KV_HEADS * HEAD_DIM) / width**0.5)

    def forward(self, tokens: Tensor, cache: SharedPrefixCache | None = None) -> Tensor:
        q_len = tokens.shape[1]
        positions = torch.arange(q_len)[None] if cache is None else cache.positions(q_len)
        mask = torch.ones(q_len, q_len, dtype=torch.bool).tril() if cache is None else cache.mask(q_len)
        x = self.tokens[tokens] + self.places[positions]
        for layer, weight in enumerate(self.weights):
            heads = (x @ weight).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            if cache is not None:
                k, v = cache.update(layer, k, v)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            x = x + out.transpose(1, 2).flatten(2)
        return x


MODEL = Decoder()


def step(cache: SharedPrefixCache, texts: Texts, q_len: int = 1, forward: Callable = MODEL) -> Texts:
    """Append tokens to the texts, and check each output against that of the whole text."""
    new = torch.randint(VOCAB, (len(texts), q_len))
    got = forward(new, cache)
    texts = [text + row for text, row in zip(texts, new.tolist(), strict=True)]
    want = torch.cat([MODEL(torch.tensor([text]))[:, -q_len:] for text in texts])
    torch.testing.assert_close(got, want)
    return texts


def prefill(prompts: int = 2, length: int = 5, padding: str | None = None) -> tuple[SharedPrefixCache, Texts]:
    tokens = torch.randint(VOCAB, (prompts, length))
    real = torch.ones(prompts, length, dtype=torch.bool)
    if padding:
        real[0, :2] = False
        real = real if padding == "left" else real.flip(1)
    lens = real.sum(1) if padding == "lengths" else None
    cache = SharedPrefixCache(LAYERS, real if padding in ("left", "right") else None, prompt_lens=lens)
    for chunk in tokens.split(3, dim=1):
        MODEL(chunk, cache)
    return cache, [row[mask].tolist() for row, mask in zip(tokens, real, strict=True)]


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def state(cache: SharedPrefixCache) -> list[Tensor]:
    lengths = [layer.length for layer in cache.layers if layer.forked]
    return [tensor.clone() for tensor in (*(t for layer in cache.layers for t in layer.tensors), *lengths)]


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


def test_a_prefix_is_stored_once() -> None:
    cache, texts = prefill(2, 5)
    token = cache.nbytes // (2 * 5)
    child = cache.fork(8, 4)
    assert child.nbytes == token * (2 * 5 + 16 * 4)
    texts = step(child, [text for text in texts for _ in range(8)], 3)
    grandchild = child.fork(2, 1)
    assert grandchild.nbytes == token * (2 * 5 + 16 * 3 + 32 * 1)
    for old, mid, new in zip(cache.layers, child.layers, grandchild.layers, strict=True):
        pointers = [tensor.data_ptr() for tensor in new.tensors]
        assert pointers[:4] == [t.data_ptr() for t in (*old.segments[0], mid.keys, mid.values)]
        assert new.keys.shape[0] == 32
        assert max(tensor.shape[0] for segment in new.segments for tensor in segment) == 16


def test_prefill_is_copied() -> None:
    """Keys and values may be views of the output of a fused projection."""
    cache = SharedPrefixCache(1)
    fused = torch.randn(1, 3, 12, 4)
    cache.update(0, fused[..., :4, :].transpose(1, 2), fused[..., 4:8, :].transpose(1, 2))
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in cache.layers[0].tensors)


@pytest.mark.parametrize(
    "indices, stored, rows",
    [
        ([0, 1, 2, 3, 4, 5], [2, 6], [None, None]),
        ([1, 0, 2, 5, 4, 3], [2, 6], [None, [1, 0, 2, 5, 4, 3]]),  # beams within their prompts
        ([0, 0, 4, 4], [2, 6], [None, [0, 0, 4, 4]]),
        ([4, 4, 5, 5], [1, 2], [None, None]),  # consecutive rows, for equal blocks, are a view
        ([3], [1, 1], [None, None]),
        ([3, 4, 5], [1, 3], [None, None]),
        ([5, 0], [2, 6], [[1, 0], [5, 0]]),
        ([0, 1, 2, 3], [2, 4], [[0, 0, 0, 1], None]),  # three of one prompt and one of the other
    ],
)
def test_select_copies_no_prefix(indices: list[int], stored: list[int], rows: list[list[int] | None]) -> None:
    cache, texts = prefill(2, 5)
    cache, texts = cache.fork(3, 2), [text for text in texts for _ in range(3)]
    texts = step(cache, texts)
    cache = cache.fork(1, 2)
    for picked in (indices, torch.tensor(indices, dtype=torch.int32)):
        chosen = cache.select(picked)
        assert [key.shape[0] for key, _ in chosen.layers[0].segments] == stored
        assert [None if x is None else x.tolist() for x in chosen.layers[0].rows] == rows
        assert all(x is y for x, y in zip(chosen.layers[0].rows, chosen.layers[1].rows, strict=True))
        for new, old in zip(chosen.layers[0].segments, cache.layers[0].segments, strict=True):
            assert all(memory(a) == memory(b) for a, b in zip(new, old, strict=True))
        assert chosen.layers[0].keys.data_ptr() != cache.layers[0].keys.data_ptr()
        step(chosen, [texts[i] for i in indices])


def test_select_before_a_fork() -> None:
    cache, texts = prefill(2, 5, "left")
    assert cache.select([0, 1]).layers[0].segments[0][0].data_ptr() == cache.layers[0].segments[0][0].data_ptr()
    chosen = cache.select([1, 1, 0, 1])
    step(chosen, step(chosen, [texts[i] for i in (1, 1, 0, 1)], 2))


def test_select_in_place_keeps_addresses_but_not_those_that_children_read() -> None:
    cache, texts = prefill(1, 3)
    cache, texts = cache.fork(3, 4), texts * 3
    texts = step(cache, texts)
    address = cache.layers[0].keys.data_ptr()
    for order in ([2, 0, 1], [1, 1, 0]):
        cache.select_(order)
        texts = step(cache, [texts[i] for i in order])
    assert cache.layers[0].keys.data_ptr() == address
    child = cache.fork(1, 1)
    cache.select_([2, 1, 0])
    assert child.layers[0].segments[1][0].data_ptr() == address
    step(child, texts)
    step(cache, texts[::-1])


def test_rows_stay_where_they_are() -> None:
    """What a graph reads moves neither in the reorderings of a beam search nor from a fork to the next."""
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(MODEL, fullgraph=True, backend=backend)
    old = None
    for _ in range(3):
        cache, texts = prefill(2, 3)
        cache, texts = cache.fork(2, 1), [text for text in texts for _ in range(2)]
        texts = step(cache, texts)
        cache = cache.fork(2, 4, into=old)
        texts = [text for text in texts for _ in range(2)]
        for order in ([7, 1, 2, 3, 4, 5, 6, 0], [1, 1, 0, 2, 3, 4, 5, 7], [0, 1, 2, 3, 4, 5, 6, 7]):
            cache.select_(order)
            texts = step(cache, [texts[i] for i in order], forward=compiled)
        old = cache
    assert len(graphs) == 1
    calls = [node.target for node in graphs[0].graph.nodes if node.op.startswith("call")]
    assert calls.count("index_select") == 2 * 2 * LAYERS
    assert not any(str(target) == "expand" for target in calls)


@pytest.mark.parametrize("kind", ["list", "tensor"])
def test_any_selection_leaves_prefixes_at_their_size(kind: str) -> None:
    """Drops, duplicates and permutations, each of a selection of the last one."""
    choose = random.Random(0)
    cache, texts = prefill(4, 5, "left")
    cache, texts = cache.fork(4, 2), [text for text in texts for _ in range(4)]
    texts = step(cache, texts)
    cache, texts = cache.fork(2, 8), [text for text in texts for _ in range(2)]
    prefix = sum(tensor.nbytes for segment in cache.layers[0].segments for tensor in segment)
    addresses = [[memory(tensor) for tensor in segment] for segment in cache.layers[0].segments]
    for batch in (32, 24, 16, 7, 7, 3):
        picked = [choose.randrange(len(texts)) for _ in range(batch)]
        indices = picked if kind == "list" else torch.tensor(picked, dtype=torch.int32)
        cache, texts = cache.select(indices), [texts[i] for i in picked]
        assert sum(tensor.nbytes for segment in cache.layers[0].segments for tensor in segment) <= prefix
        assert [[memory(tensor) for tensor in segment] for segment in cache.layers[0].segments] == addresses
        texts = step(cache, texts)


class NoHostReads(TorchDispatchMode):
    """Refuses what waits for the device."""

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        assert not (func is torch.ops.aten._to_copy.default and kwargs.get("device", args[0].device).type == "cpu")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("prompts", [{}, {"prompt_lens": [1, 3]}, {"prompt_mask": [[True] * 3, [False, True, True]]}])
@pytest.mark.parametrize("forked", [False, True])
def test_indices_on_the_device_are_not_read(forked: bool, prompts: dict) -> None:
    """Meta tensors have no values to read."""
    with torch.device("meta"):
        cache = SharedPrefixCache(2, **{name: torch.tensor(x) for name, x in prompts.items()})
        for layer in range(2):
            cache.update(layer, *tensors(2, 2, 3, 8))
        cache = cache.fork(3, 2) if forked else cache
        batch = cache.batch_size
        indices = torch.zeros(batch, dtype=torch.int32)
        with NoHostReads():
            for chosen in (cache.select(indices), cache.select(indices[:1]).select(indices[:1].repeat(5))):
                chosen.select_(torch.zeros(chosen.batch_size, dtype=torch.int64))
                assert all(tensor.is_meta for tensor in chosen.layers[0].tensors)
                assert len({id(layer.rows[0]) for layer in chosen.layers}) == 1
                if forked:
                    rows = chosen.layers[0].rows[0]
                    assert (rows.dtype, tuple(rows.shape), rows.is_meta) == (torch.int32, (chosen.batch_size,), True)
                    chosen.select_(torch.zeros(chosen.batch_size, dtype=torch.int64))
                    assert chosen.layers[1].rows[0] is rows


def test_selecting_by_the_device_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would run, on a CPU: a selection that the host does not know."""
    cache, texts = prefill(2, 5, "lengths")
    cache, texts = cache.fork(3, 6), [text for text in texts for _ in range(3)]
    texts = step(cache, texts)
    for picked in ([5, 0, 0, 4], [3, 3, 1, 0, 2, 2], [1, 0]):
        with monkeypatch.context() as patch:
            patch.setattr(shared_prefix, "Selection", unknown_selection)
            cache = cache.select(picked)
        assert [rows.dtype for rows in cache.layers[0].rows] == [torch.int32]
        texts = step(cache, [texts[i] for i in picked])
    cache, texts = cache.fork(2, 2), [text for text in texts for _ in range(2)]
    step(cache, texts)


def unknown_selection(picked: list[int], batch: int) -> Selection:
    selection = Selection(picked, batch)
    selection.on(torch.device("cpu"))
    selection._device_indices, selection.known = torch.tensor(picked), None
    return selection


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
    with pytest.raises(ValueError, match="`tokens` must be at most 0, as many as came since the last fork, got 1"):
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
        (one_layer, 2, 3, "as many layers, 1, got 2"),
        (halves, 2, 3, "the same keys in level 0 of layer 0, .*float32.*got .*float64"),
        (padded, 2, 3, r"prompts of the same kind, .*'prompt_mask': \(\(2, 4\), torch.bool, 'cpu'\).*got \{\}"),
        (cache.fork(1, 3).select([1, 0]), 2, 3, "have rows in level 0, as the sequences to fork, got none"),
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


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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


@needs_gpu
def test_select_on_cuda() -> None:
    root = SharedPrefixCache(1)
    root.update(0, *tensors(2, 2, 3, 8, device="cuda"))
    chosen = root.fork(2, 1).select([3, 0])
    assert all(tensor.is_cuda for tensor in chosen.layers[0].tensors)


@needs_gpu
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


@needs_gpu
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


def tensors(*shape: int, **kwargs: object) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, *shape, dtype=torch.float64, **kwargs).unbind()  # type: ignore[arg-type]


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
    "no index": (lambda c: c.select([]), ValueError, "at least one"),
    "float index": (lambda c: c.select([0.0]), TypeError, "got 0.0"),
    "bool indices": (lambda c: c.select(torch.ones(6, dtype=torch.bool)), TypeError, "torch.bool"),
    "crop": (lambda c: c.crop(2), ValueError, "`tokens` must be at most 1, as many as came since the last fork, got 2"),
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
    ],
)
def test_bad_prompt_lens(lens: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SharedPrefixCache(2, prompt_lens=lens).update(0, *tensors(2, 2, 3, 8))
    with pytest.raises(ValueError, match="`prompt_lens` must be None where `prompt_mask` is given, got both"):
        SharedPrefixCache(2, torch.ones(2, 3, dtype=torch.bool), prompt_lens=lens)


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
