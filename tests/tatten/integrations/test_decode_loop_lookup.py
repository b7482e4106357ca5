"""`decode_loop` with prompt lookup: the tokens of greedy decoding, in fewer steps."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from decode_loops import EAGER, Kept, Launching, build, prompts
from torch import Tensor

pytestmark = pytest.mark.drawn(8)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("ends", [[1], list(range(1, 20)), None], ids=["one", "many", "none"])
@pytest.mark.parametrize("drafts, ngram", [(1, None), (3, 1), (7, 3)])
def test_prompt_lookup(drafts: int, ngram: int | None, ends: list[int] | None, ahead: int) -> None:
    """Tokens are those of greedy decoding, whatever is looked up; texts that repeat take fewer steps."""
    loop, model = Launching(ahead), build("llama")
    again = repeating(drafts)
    for ids, new in ((prompts(1)[0], 60), (again, 60), (again[:, :1], 25), (again, 1), (again, 2)):
        arguments = {"max_new_tokens": new, "do_sample": False, "eos_token_id": ends}
        expected, streamer, plain = model.generate(ids, **arguments), Kept(), Kept()
        lookup = {"prompt_lookup_num_tokens": drafts, "max_matching_ngram_size": ngram}
        more = {"custom_generate": loop, "compile_config": EAGER, "streamer": streamer}
        result = model.generate(ids, **arguments, **lookup, **more)
        assert loop.reason is None
        assert torch.equal(result, expected)
        model.generate(ids, **arguments, streamer=plain)
        assert [*chain(*streamer.tokens)] == [*chain(*plain.tokens)]
        if new == 60 and ends is None:
            assert loop.launched_steps < 55


def repeating(seed: int) -> Tensor:
    """A prompt of 24 tokens that repeats itself, so that drafts are accepted."""
    return torch.randint(2, 120, (1, 6), generator=torch.Generator().manual_seed(seed)).repeat(1, 4)
