"""Rollouts for TRL's GRPOTrainer: the completions and the training of its own, each prompt prefilled once."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedTokenizerFast

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets")  # comes with it

from tatten.integrations.transformers.continuous_batching import supported  # noqa: E402
from tatten.integrations.trl import ForkedRollouts, SharedPrefixRollouts  # noqa: E402

pytestmark = pytest.mark.usefixtures("collections_skip_older_objects")
N, NEW, VOCABULARY = 4, 6, 99
TEXTS = ["11 12 13 14 15 16 17", "21 22 23", "31 32 33 34 35", "41"]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
ENDS = list(range(1, 9))  # tokens that end a completion: about one in twelve
BATCHES: dict[str, Any] = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"page_size": 4, "num_blocks": 200, "max_batch_tokens": 64},
}
TESTED = transformers.__version__.startswith(supported.VERSIONS)
batching = pytest.mark.skipif(not TESTED, reason="transformers is not a version that batches were tested with")


def trainer(folder: Path, prompts: list[Any], rollouts: Any, attention: str = "sdpa", **options: Any) -> Any:
    """A trainer of a tiny model, the same each time, that records what it is rewarded for as `completions`."""
    model = tiny_models.build("llama", attention).train()
    model.generation_config.eos_token_id = ENDS
    special = {"pad_token": "PAD", "eos_token": "END", "unk_token": "UNK"}
    vocabulary = {word: i for i, word in enumerate([*special.values(), *map(str, range(3, VOCABULARY))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="UNK"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.chat_template = "{% for message in messages %}50 {{ message['content'] }} 51 {% endfor %}"
    completions: list[list[int]] = []

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        completions.extend(completion_ids)
        return [float(sum(ids) % 7) for ids in completion_ids]

    config = trl.GRPOConfig(
        str(folder),
        num_generations=N,
        max_completion_length=NEW,
        per_device_train_batch_size=2 * N,
        learning_rate=1e-2,
        max_steps=3,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **options,
    )
    made = trl.GRPOTrainer(
        model,
        reward,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )
    made.completions = completions
    return made


class Prefilled:
    """Counts the tokens that a model gets in calls with more than one for each sequence."""

    def __init__(self, model: torch.nn.Module):
        self.tokens: list[int] = []
        model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None and ids.shape[1] > 1 and not torch.is_grad_enabled():
            self.tokens.append(ids.numel())


@pytest.mark.slow
def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions, losses and weights of three steps. The second rollout, of changed weights, compiles nothing."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    everywhere = CompileConfig(backend="tatten", mode=None)
    everywhere._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    graphs: list[int] = []

    class Counted(SharedPrefixRollouts):
        def __call__(self, *args: Any) -> Any:
            drawn = super().__call__(*args)
            graphs.append(counters["stats"]["unique_graphs"])
            return drawn

    own = trainer(tmp_path, TEXTS, None, pad_to_multiple_of=8)
    own.train()
    ours = trainer(tmp_path, TEXTS, Counted(everywhere), pad_to_multiple_of=8)
    ours.train()
    assert len(own.completions) == 3 * 2 * N
    assert ours.completions == own.completions
    assert {len(ids) for ids in own.completions} >= {1, NEW}
    assert graphs[0] > 0
    assert graphs[1:] == graphs[:1] * 2
    for name in ("loss", "entropy", "grad_norm"):
        logged = [[entry[name] for entry in x.state.log_history if name in entry] for x in (own, ours)]
        assert len(logged[0]) == 3
        assert logged[0] == pytest.approx(logged[1], rel=1e-4, abs=1e-6)
    for theirs, mine in zip(own.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


parts_of_batches = pytest.mark.parametrize(
    "of", [[0] * N + [1] * N, [3, 3, 0, 2, 2, 2, 0], [3, 3]], ids=["groups", "parts", "one token"]
)


@parts_of_batches
@pytest.mark.parametrize("prompts", [TEXTS, CHATS], ids=["text", "chat"])
def test_completions(prompts: list[Any], of: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches have whole groups, as in one process, or parts of them, as in processes that share a group."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rollouts = SharedPrefixRollouts()
    made = trainer(tmp_path, prompts, rollouts, generation_kwargs={"top_k": 20})
    batch = [prompts[i] for i in of]
    prompt_ids, images, fields = made._tokenize_prompts(batch)
    torch.manual_seed(1)
    want, logprobs = made._generate_single_turn(prompt_ids, images, fields, N)
    prefilled = Prefilled(made.model)
    for _ in range(2):  # the second into the memory of the first
        torch.manual_seed(1)
        got = rollouts(batch, made)
        assert got == {"prompt_ids": prompt_ids, "completion_ids": want, "logprobs": logprobs}
    # A call of one token for each prompt is not counted.
    new = max(map(len, prompt_ids)) - 1
    assert prefilled.tokens == [len(set(of)) * new] * 2 * (new > 1)


def test_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the last rollout is that of other keys; and a model that is trained need not use a cache."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rollouts = SharedPrefixRollouts()
    for dtype in (torch.float32, torch.bfloat16):
        made = trainer(tmp_path, TEXTS, rollouts)
        made.model.to(dtype).generation_config.use_cache = False
        prompt_ids, images, fields = made._tokenize_prompts(TEXTS)
        torch.manual_seed(1)
        want, _ = made._generate_single_turn(prompt_ids, images, fields, N)
        torch.manual_seed(1)
        got = rollouts(TEXTS, made)["completion_ids"]
        assert got == want or dtype == torch.bfloat16


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rollouts = SharedPrefixRollouts()
    made = trainer(tmp_path, TEXTS, rollouts)
    for name, value, message in (
        ("use_vllm", True, "generate with transformers, got use_vllm=True"),
        ("is_fsdp_enabled", True, "have all weights on each rank, got FSDP"),
        ("environment_factories", {}, "have no environments, got an `environment_factory`"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(made, name, value)
            with pytest.raises(ValueError, match=f"`trainer` must {message}"):
                rollouts(TEXTS, made)
    for name, value, message in (
        ("max_new_tokens", None, "have a `max_completion_length`, which sets the cache's capacity, got None"),
        ("num_beams", 2, "draw its completions one by one, got num_beams=2"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(made.generation_config, name, value)
            with pytest.raises(ValueError, match=f"`trainer` must {message}"):
                rollouts(TEXTS, made)
    made.processing_class.model_input_names = ["input_ids", "attention_mask", "token_type_ids"]
    with pytest.raises(ValueError, match=r"`prompts` must be text .*, got \['token_type_ids'\] as well"):
        rollouts(TEXTS, made)


@pytest.mark.parametrize("page", ["caches", pytest.param("continuous_batching", marks=batching)])
def test_the_code_of_pages(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers of the pages are made, of a tiny model, on a CPU."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trl, "GRPOConfig", functools.partial(trl.GRPOConfig, use_cpu=True, bf16=False))
    made = trainer(tmp_path, TEXTS, None)
    made.model.save_pretrained("model")
    made.processing_class.save_pretrained("model")
    names = {
        "name": "model",
        "model": AutoModelForCausalLM.from_pretrained("model"),
        "dataset": made.train_dataset,
        "reward_func": lambda completions, **kwargs: [1.0] * len(completions),
    }
    text = (Path(__file__).parents[3] / f"docs/{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    [code] = [code for code in blocks if "from trl import" in code]
    exec(code, names)
    assert names["trainer"].rollout_func is not None


def completions(made: Any, batch: list[Any]) -> list[list[int]]:
    """Those that a trainer draws, by its rollouts or by itself."""
    torch.manual_seed(1)
    if made.rollout_func is not None:
        drawn: list[list[int]] = made.rollout_func(batch, made)["completion_ids"]
    else:
        drawn, _ = made._generate_single_turn(*made._tokenize_prompts(batch), N)
    assert made.model.training
    return drawn


@batching
@pytest.mark.drawn(2)
@parts_of_batches
@pytest.mark.parametrize("prompts", [TEXTS, CHATS], ids=["text", "chat"])
def test_forks(prompts: list[Any], of: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without chance, completions are those without forks. From one seed, they are those of forks on eager."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    batch = [prompts[i] for i in of]
    drawn, prefilled = {}, {}
    for name, rollouts, attention in (
        ("own", None, "sdpa"),
        ("own on tatten", None, "tatten"),
        ("forked", ForkedRollouts(), "tatten"),
        ("forked on eager", ForkedRollouts(), "eager"),
    ):
        made = trainer(tmp_path, prompts, rollouts, attention, **BATCHES)
        tokens = Prefilled(made.model)
        for made.generation_config.top_k in (1, 20):
            drawn[name, made.generation_config.top_k] = completions(made, batch)
            prefilled.setdefault(name, sum(tokens.tokens))
    assert drawn["own on tatten", 1] == drawn["forked", 1] == drawn["forked on eager", 1] == drawn["own", 1]
    assert drawn["own on tatten", 20] == drawn["own", 20]
    assert drawn["forked", 20] == drawn["forked on eager", 20]

    ids = {i: made._tokenize_prompts([prompts[i]])[0][0] for i in of}
    saved = sum((of.count(i) - 1) * (len(x) - 1) for i, x in ids.items())  # each sample reads the last token itself
    assert prefilled["own on tatten"] - prefilled["forked"] == saved
    assert saved or max(map(len, ids.values())) == 1


@batching
def test_training_on_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps on completions without chance: losses and weights as without forks, on SDPA."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    greedy = {"top_k": 1}
    own = trainer(tmp_path, TEXTS, None, generation_kwargs=greedy, **BATCHES)
    forked = trainer(tmp_path, TEXTS, ForkedRollouts(), "tatten", generation_kwargs=greedy, **BATCHES)
    for made in (own, forked):
        made.train()
    assert len(own.completions) == 3 * 2 * N
    assert forked.completions == own.completions
    for theirs, ours in zip(own.model.parameters(), forked.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@batching
def test_what_forks_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    made = trainer(tmp_path, TEXTS, ForkedRollouts())
    with pytest.raises(ValueError, match="`trainer` must have use_transformers_continuous_batching=True, got False"):
        made.rollout_func(TEXTS, made)
    made = trainer(tmp_path, TEXTS, ForkedRollouts(), **BATCHES)
    monkeypatch.setattr(made, "use_vllm", True)
    with pytest.raises(ValueError, match="`trainer` must generate with transformers"):
        made.rollout_func(TEXTS, made)
    monkeypatch.setattr(made, "use_vllm", False)
    monkeypatch.setattr(made.model, "generate_batch", lambda *args, **kwargs: {})
    with pytest.raises(RuntimeError, match="`generate_batch` returned no completion for 4 samples: see its log"):
        made.rollout_func(TEXTS, made)


@batching
def test_a_failed_rollout_leaves_the_model_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate_batch` puts the model into evaluation."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    made = trainer(tmp_path, TEXTS, ForkedRollouts(), **BATCHES)
    monkeypatch.setattr(made.model, "generate_batch", lambda *args, **kwargs: made.model.eval() and {})
    with pytest.raises(RuntimeError, match="`generate_batch` returned no completion"):
        made.rollout_func(TEXTS, made)
    assert made.model.training
