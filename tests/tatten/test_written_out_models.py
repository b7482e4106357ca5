"""Decode steps of models of transformers under attn_implementation="eager", which writes attention out.

Here are those whose attention, masks or layers differ from the others', which take 4 s each. All classes take about
20 minutes, and print a line each; with `--dynamic` for any size:

    PYTHONPATH=tests/support OMP_NUM_THREADS=1 python tests/tatten/test_written_out_models.py
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import every_model
import pytest
import torch
from torch import Tensor

import tatten
from tatten.integrations.transformers import cache_kwargs
from tatten.passes.findings import Rewritten
from tatten.passes.reasons import Reason
from tatten.report import Report

BATCH, PROMPT, STEPS = 2, 6, 2  # the second step is compiled anew, for any length

# What is found, and how many attentions of it a step has. The others of a step are left, for the reason given.
DECODERS = {
    "llama": ("bias", 2, None),
    "gpt2": ("bias", 2, None),
    "bert": ("bias", 2, None),
    "gptj": ("bias", 2, None),
    "codegen": ("bias", 2, None),
    "gpt_neo": ("mask, bias", 2, None),
    "falcon": ("bias", 2, None),
    "bloom": ("bias, bias", 2, None),
    "gpt_neox_japanese": ("bias", 2, None),
    "mpt": ("bias, mask", 2, None),
    "ctrl": ("bias", 2, None),
    "big_bird": ("bias", 2, None),
    "roformer": ("bias", 2, None),
    "rembert": ("bias", 2, None),
    "xglm": ("bias, lower bound", 2, None),
    "trocr": ("bias", 2, None),
    "gemma2": ("bias, soft cap 50", 2, None),
    "gemma3_text": ("bias", 2, None),
    "gpt_oss": ("bias, sinks", 2, None),
    "flint": ("bias, sinks", 2, None),
    "hy_v4": ("bias, sinks", 2, None),
    "deepseek_v4": ("bias, sinks", 2, None),
    "granite_swa": ("bias, logsumexp", 2, None),
    "deepseek_v3": ("bias", 2, None),
    "deepseek_v32": ("bias", 2, None),
    "diffllama": ("bias", 4, None),
    "inkling_text": ("bias, bias", 2, None),
    "mllama": ("bias", 2, None),
    "minimax": ("bias", 1, None),
    "qwen3_next": ("bias", 1, None),
    "bamba": ("bias", 1, None),
    "prophetnet": (None, 0, Reason.WEIGHTS_USED),  # its layers are graphs of their own, which return weights
}
SEQ2SEQ = {
    "bart": ("bias", 4, None),
    "t5": ("bias, bias", 4, None),
    "longt5": ("bias, bias", 4, None),
    "led": ("bias", 4, None),
    "fsmt": ("mask", 4, None),
    "bigbird_pegasus": ("bias", 4, None),
    "prophetnet": ("bias", 1, Reason.WEIGHTS_USED),
}


def tokens(n: int, seed: int) -> Tensor:
    return torch.randint(3, every_model.VOCABULARY, (BATCH, n), generator=torch.Generator().manual_seed(seed))


def cache_of(output: Any) -> Any:
    """The cache that a model returned, by the name that this version of transformers has for it."""
    (name,) = cache_kwargs(None)
    return output[name]


@torch.no_grad()
def decode(name: str, seq2seq: bool, dynamic: bool | None = None) -> tuple[Tensor, Tensor, Report]:
    """Logits of steps after a padded prompt, with a dynamic cache: of eager, and of the backend with its report."""
    model, _ = every_model.build_pair(name, ("eager", "eager"), seq2seq)
    seen = torch.ones(BATCH, PROMPT + STEPS, dtype=torch.int64)
    seen[0, :2] = 0
    start: dict[str, Any] = {"attention_mask": seen[:, :PROMPT], "use_cache": True}
    if seq2seq:
        start["encoder_outputs"] = model.get_encoder()(tokens(PROMPT, 0), attention_mask=seen[:, :PROMPT])
    given = "decoder_input_ids" if seq2seq else "input_ids"
    prompt = cache_of(model(**{given: tokens(PROMPT, 1)}, **start))

    def logits(run: Callable[..., Any]) -> Tensor:
        cache, out = copy.deepcopy(prompt), []
        for i in range(STEPS):
            mask = seen[:, : PROMPT + (0 if seq2seq else i + 1)]
            found = run(**{given: tokens(1, 2 + i)}, **{**start, "attention_mask": mask, **cache_kwargs(cache)})
            out.append(found.logits)
            cache = cache_of(found)
        return torch.stack(out)

    torch._dynamo.reset()
    with tatten.recording() as report:
        got = logits(torch.compile(model, backend="tatten", options={"inner": "eager"}, dynamic=dynamic))
    return logits(model), got, report


def forms(report: Report) -> set[str]:
    notes = [x.note.split(";")[0] for x in attentions(report)]
    return {note.removeprefix("attention written out").removeprefix(", with ") for note in notes}


def attentions(report: Report) -> list[Rewritten]:
    """The rewritten attention, without the scores of indexers, which gain at a dynamic number of keys alone."""
    return [x for x in report.rewritten if x.attention]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, seq2seq", [(name, False) for name in DECODERS] + [(name, True) for name in SEQ2SEQ], ids=str
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_decode_step(name: str, seq2seq: bool, dynamic: bool | None) -> None:
    form, calls, reason = (SEQ2SEQ if seq2seq else DECODERS)[name]
    reasons = {reason} if reason else set()
    if dynamic and seq2seq and name == "prophetnet":  # its layers' own graphs don't know how many queries there are
        form, calls, reasons = None, 0, {*reasons, Reason.Q_LEN_DYNAMIC}
    want, got, report = decode(name, seq2seq, dynamic)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert forms(report) - {""} == ({form} if calls else set())
    assert len(attentions(report)) in ({calls, STEPS * calls} if dynamic else {STEPS * calls})
    assert {x.decline.reason for x in report.declined} == reasons


def main() -> None:
    every = [(name, False) for name in every_model.NAMES] + [(name, True) for name in every_model.SEQ2SEQ_NAMES]
    for name, seq2seq in every:
        shown = f"{name:28} {'seq2seq' if seq2seq else 'decoder'} "
        try:
            want, got, report = decode(name, seq2seq, True if "--dynamic" in sys.argv else None)
        except Exception as error:
            print(shown, f"not run: {error!r:.120}", flush=True)
            continue
        left = sorted({f"{x.decline.reason.value}: {x.decline.detail}" for x in report.declined})
        found = f"{len(attentions(report))} rewritten {sorted(forms(report))}, {len(report.declined)} left {left}"
        print(shown, f"{(got - want).abs().max():.1e} from eager, {found}", flush=True)


if __name__ == "__main__":
    main()
