"""Logits processors as functions of tensors: the scores that those of transformers return, bit for bit."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as lp

from tatten.integrations.transformers.loop.history import History, mark
from tatten.integrations.transformers.loop.processors import (
    FIRST_TOKEN_ONLY,
    _below_kth,
    largest_by_picks,
    occurred_tokens,
    processed,
    rules,
    unsupported_processor,
)
from tatten.passes.top_k import LEAST_SCORES, MOST_SCORES

VOCABULARY, PROMPT = 61, 9
KINDS = {
    "temperature": lambda r: lp.TemperatureLogitsWarper(r.uniform(0.1, 3.0)),
    "top_k": lambda r: lp.TopKLogitsWarper(r.choice([1, 2, 17, 60, 61, 500]), min_tokens_to_keep=r.choice([1, 3])),
    "top_p": lambda r: lp.TopPLogitsWarper(r.choice([0.0, 0.3, 0.9, 1.0]), min_tokens_to_keep=r.choice([1, 2, 5])),
    "min_p": lambda r: lp.MinPLogitsWarper(r.choice([0.0, 0.02, 0.5, 1.0])),
    "typical": lambda r: lp.TypicalLogitsWarper(r.uniform(0.05, 0.95), min_tokens_to_keep=r.choice([1, 3])),
    "epsilon": lambda r: lp.EpsilonLogitsWarper(r.uniform(1e-3, 0.2), min_tokens_to_keep=r.choice([1, 3])),
    "eta": lambda r: lp.EtaLogitsWarper(r.uniform(1e-3, 0.2), min_tokens_to_keep=r.choice([1, 3])),
    "repetition": lambda r: lp.RepetitionPenaltyLogitsProcessor(
        r.uniform(0.5, 2.0), prompt_ignore_length=r.choice([None, 0, 4])
    ),
    "suppress": lambda r: lp.SuppressTokensLogitsProcessor(r.sample(range(70), 5)),
    "suppress_at_begin": lambda r: lp.SuppressTokensAtBeginLogitsProcessor([3, 9], r.choice([PROMPT, PROMPT + 3])),
    "min_length": lambda r: lp.MinLengthLogitsProcessor(r.choice([0, PROMPT + 2, PROMPT + 4]), [1, 7]),
    "min_new_tokens": lambda r: lp.MinNewTokensLengthLogitsProcessor(PROMPT, r.choice([0, 1, 3, 9]), 5),
    "forced_eos": lambda r: lp.ForcedEOSTokenLogitsProcessor(r.choice([PROMPT + 2, PROMPT + 4]), [2, 8]),
    "ngram": lambda r: lp.NoRepeatNGramLogitsProcessor(r.choice([1, 2, 3, 11, 99])),
    "ngram_of_source": lambda r: lp.EncoderNoRepeatNGramLogitsProcessor(
        r.choice([1, 2, 3]), torch.tensor([[r.randrange(9) for _ in range(r.choice([1, 40, 200]))]])
    ),
    "bad_words": lambda r: lp.NoBadWordsLogitsProcessor(
        [[r.randrange(9) for _ in range(r.choice([1, 1, 2, 3, 11, 30]))] for _ in range(r.choice([1, 40]))], 1
    ),
    "timestamps": lambda r: lp.WhisperTimeStampLogitsProcessor(
        GenerationConfig(
            no_timestamps_token_id=r.choice([4, 29, 58]),
            eos_token_id=r.choice([3, 28, -1, -40, -99]),
            max_initial_timestamp_index=r.choice([None, 0, 3, 99]),
        ),
        begin_index=r.choice([1, PROMPT, PROMPT + 1, PROMPT + 2]),
        _detect_timestamp_from_logprob=r.choice([None, False, True]),
    ),
    "forced_bos": lambda r: lp.ForcedBOSTokenLogitsProcessor(4),
    "finite": lambda r: lp.InfNanRemoveLogitsProcessor(),
    "normalise": lambda r: lp.LogitNormalization(),
}
NAN_TOO = {"finite"}


def draw_scores(seed: int, batch: int, nan: bool) -> Tensor:
    """Random scores; some rows have ties, and some scores are infinite."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(batch, VOCABULARY, generator=generator)
    scores[::2] = scores[::2].round()
    scores[:, 11] = -math.inf
    if nan:
        scores[0, 3], scores[-1, 5] = math.nan, math.inf
    return scores


def draw_ids(seed: int, batch: int, tokens: int) -> Tensor:
    """Random tokens; with odd seeds, few of them, so that n-grams repeat."""
    high = (VOCABULARY, 9)[seed % 2]
    return torch.randint(0, high, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def apply(processors: list[object], ids: Tensor, prompt: int, scores: Tensor) -> Tensor:
    """Apply the rules to the scores of the token that follows `ids`, of which `prompt` tokens are the prompt."""
    occurred = occurred_tokens(processors, ids[:, :prompt], ids[:, prompt : prompt + 1], VOCABULARY)
    for n in range(prompt + 1, ids.shape[1]):
        if occurred is not None:
            mark(ids[:, n : n + 1], occurred)
    behind = torch.randint(0, VOCABULARY, (len(ids), 5))  # of an earlier, longer text
    history = History(torch.tensor([ids.shape[1]]), torch.cat([ids, behind], 1), occurred)
    return processed(scores, history, rules(processors))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_each_processor_returns_the_scores_of_transformers(kind: str, seed: int) -> None:
    r = random.Random(f"{kind} {seed}")
    processor, scores = KINDS[kind](r), draw_scores(seed, 3, kind in NAN_TOO)
    ids = draw_ids(seed, 3, PROMPT + 1 + seed % 4)
    assert unsupported_processor(processor, PROMPT) is None
    expected = processor(ids, scores.clone())
    torch.testing.assert_close(apply([processor], ids, PROMPT, scores), expected, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(40))
def test_chains_of_processors_return_the_scores_of_transformers(seed: int) -> None:
    r = random.Random(seed)
    kinds = [x for x in KINDS if x not in ("forced_bos", "finite")]
    processors = [KINDS[kind](r) for kind in r.sample(kinds, r.randint(2, 5))]
    ids = draw_ids(seed, 2, PROMPT + 2)
    scores = draw_scores(seed, 2, False)
    expected = LogitsProcessorList(processors)(ids, scores.clone())
    torch.testing.assert_close(apply(processors, ids, PROMPT, scores), expected, rtol=0, atol=0, equal_nan=True)


def test_top_k_compiles_once_for_each_bucket() -> None:
    shapes = [rules([lp.TopKLogitsWarper(k)])[0].operands[1].shape for k in (1, 64, 65, 1000, 5000)]
    assert [x[0] for x in shapes] == [64, 64, 1024, 1024, 1 << 20]


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("n", [1, 17, 60])
def test_the_largest_scores_by_a_selection_without_a_sort(n: int, nan: bool) -> None:
    """In descending order, as `topk` returns them; scores that are excluded tie at -inf."""
    for seed in range(3):
        scores = draw_scores(seed, 3, nan)
        scores[1, : 20 * seed] = -math.inf
        want = scores.topk(n).values
        for select in (largest_by_picks, torch.compile(largest_by_picks, dynamic=False)):
            torch.testing.assert_close(select(scores, n), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "device, batch, vocabulary, selects",
    [
        ("cuda", 1, LEAST_SCORES, True),
        ("cuda", 1, LEAST_SCORES - 1, False),
        ("cuda", 2, MOST_SCORES // 2, True),
        ("cuda", 2, MOST_SCORES // 2 + 1, False),
        ("cpu", 1, LEAST_SCORES, False),
    ],
)
def test_a_gpu_selects_without_a_sort(device: str, batch: int, vocabulary: int, selects: bool) -> None:
    """Unless all scores are kept, which a sort orders."""
    with FakeTensorMode():
        for bucket, without_a_sort in ((vocabulary, False), (64, selects)):
            scores, buckets = (torch.empty(shape, device=device) for shape in ((batch, vocabulary), (bucket,)))
            k = torch.empty((), device=device, dtype=torch.int64)
            targets = {node.target for node in make_fx(_below_kth)(scores, k, buckets).graph.nodes}
            assert (torch.ops.tatten.top_picks.default in targets) == without_a_sort
            assert (torch.ops.aten.topk.default in targets) != without_a_sort


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 64, 1024])
def test_the_largest_scores_on_a_gpu(n: int) -> None:
    """As Inductor compiles it, for scores of which many tie."""
    scores = torch.randn(2, 32000, device="cuda").bfloat16().float()
    scores[1, ::3] = -math.inf
    compiled = torch.compile(largest_by_picks, dynamic=False, backend="tatten")
    assert torch.equal(compiled(scores, n), scores.topk(n).values)


@pytest.mark.parametrize("kind", ["top_p", "typical"])
def test_running_sums_stay_out_of_generated_code(kind: str) -> None:
    """Inductor's scan over a vocabulary adds in an order that depends on timing, and PyTorch 2.11 can't generate it."""
    ((apply, operands),) = rules([KINDS[kind](random.Random(0))])
    history = History(torch.tensor([3]), torch.zeros(8, 9, dtype=torch.int64), None)
    graph = make_fx(lambda scores: apply(scores, history, *operands))(draw_scores(0, 8, False)).graph
    targets = {node.target for node in graph.nodes}
    assert torch.ops.tatten.cumsum.default in targets
    assert torch.ops.aten.cumsum.default not in targets


def test_processors_for_the_first_token_have_no_rule() -> None:
    assert rules([FIRST_TOKEN_ONLY[0](3)]) == ()


class Mine(lp.TemperatureLogitsWarper):
    pass


@pytest.mark.parametrize(
    "processor, reason",
    [
        (Mine(2.0), "the logits processor Mine is not known"),
        (lp.SequenceBiasLogitsProcessor([[[3], 2.0]]), "the logits processor SequenceBiasLogitsProcessor is not known"),
        (lp.TopKLogitsWarper(3, filter_value=-5.0), "has a `filter_value` other than -inf, -5.0"),
        (lp.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=PROMPT + 1), "more tokens than the prompt has"),
        (lp.MinPLogitsWarper(0.1, min_tokens_to_keep=2), "keeps 2 tokens of any probability"),
        (lambda ids, scores: scores, "the logits processor function is not known"),
    ],
    ids=["subclass", "bias", "filter_value", "ignored", "min_p", "function"],
)
def test_other_processors_are_declined(processor: object, reason: str) -> None:
    assert reason in str(unsupported_processor(processor, PROMPT))


def test_returned_sequences_share_the_n_grams_of_their_source() -> None:
    sources = torch.tensor([[3, 4, 5, 6], [3, 5, 3, 7]])
    processor = lp.EncoderNoRepeatNGramLogitsProcessor(2, sources)
    ids = torch.tensor([[2, 3], [2, 5], [2, 3], [2, 4]])
    scores = draw_scores(0, 4, False)
    expected = processor(ids, scores.clone())
    assert expected[2, [5, 7]].eq(-math.inf).all()
    torch.testing.assert_close(apply([processor], ids, 1, scores), expected, rtol=0, atol=0)


def test_sources_of_many_lengths_have_tables_of_one_shape() -> None:
    def shape(tokens: int) -> torch.Size:
        processor = lp.EncoderNoRepeatNGramLogitsProcessor(3, torch.arange(2, tokens + 2)[None])
        ((_, (table,)),) = rules([processor])
        return table.shape

    assert [shape(n) for n in (1, 20, 128, 129)] == [(1, 128, 3), (1, 128, 3), (1, 128, 3), (1, 256, 3)]


def test_tokens_without_a_score_are_not_excluded() -> None:
    ids = torch.tensor([[3, VOCABULARY + 5, 3, 4, 3]])
    scores = draw_scores(0, 1, False)
    out = apply([lp.NoRepeatNGramLogitsProcessor(2)], ids, 2, scores)
    assert out[0, 4] == -math.inf
    scores[0, 4] = -math.inf
    assert torch.equal(out, scores)


def test_lists_of_bad_words_have_tables_of_few_shapes() -> None:
    def shapes(*lengths: int) -> list[tuple[int, ...]]:
        words = [[3 + i, *[4] * (n - 1)] for i, n in enumerate(lengths)]
        ((_, operands),) = rules([lp.NoBadWordsLogitsProcessor(words)])
        return [tuple(x.shape) for x in operands]

    assert shapes(1) == [(1, 128, 1), (128,)]
    assert shapes(3) == shapes(4, 1, 2) == [(1, 128, 4), (128,)]
    assert shapes(*[1] * 40, *[2] * 89) == [(1, 256, 2), (256,)]


def test_bad_words_in_a_short_text() -> None:
    """The padding of a short word matches any token, but no place before the text."""
    processor = lp.NoBadWordsLogitsProcessor([[3, 4, 5, 6], [7], [4, 8], [3, 4, 9]])
    scores = draw_scores(0, 1, False)
    for ids in ([[4]], [[3, 4]], [[2, 4]], [[2, 3, 4]], [[3, 4, 5]]):
        tokens = torch.tensor(ids)
        expected = processor(tokens, scores.clone())
        history = History(torch.tensor([tokens.shape[1]]), torch.tensor([[*ids[0], 3, 4]]), None)
        ((apply_rule, operands),) = rules([processor])
        torch.testing.assert_close(apply_rule(scores, history, *operands), expected, rtol=0, atol=0)
