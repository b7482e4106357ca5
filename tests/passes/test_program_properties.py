"""Random programs of views, copies, writes, masks and attention give compiled what they give in eager mode."""

from __future__ import annotations

from collections import Counter

import fuzz
import pytest
from hypothesis import given
from programs import Outcome, Program, check, programs


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """What became of the programs so far."""
    return []


@fuzz.settings(60)
@given(program=programs())
def test_programs_compile_to_what_they_say(outcomes: list[Outcome], program: Program) -> None:
    outcomes.append(check(program))


def test_the_programs_reach_the_rewrites(outcomes: list[Outcome]) -> None:
    """At least half of what is drawn is rewritten, into each op, and little is lost to what PyTorch can't compile."""
    assert outcomes, "run the test above, too"
    ops = Counter(op for outcome in outcomes for op in outcome.rewritten)
    reasons = Counter(reason for outcome in outcomes for reason in outcome.declined)
    print(f"{len(outcomes)} programs: rewritten {dict(ops)}, declined {dict(reasons)}")
    assert set(ops) == {"tatten.decode_attention.default", "tatten.bifurcated_attention.default"}
    assert sum(bool(outcome.rewritten) for outcome in outcomes) * 2 >= len(outcomes), reasons
    not_ours = [outcome.not_ours for outcome in outcomes if outcome.not_ours]
    assert len(not_ours) * 10 <= len(outcomes), Counter(not_ours)


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_programs_under_inductor(cpp_wrapper: bool) -> None:
    """Inductor compiles what tatten leaves of a program; it takes seconds for each."""

    @fuzz.settings(2)
    @given(program=programs(inner=("inductor",), cpp_wrapper=cpp_wrapper))
    def run(program: Program) -> None:
        check(program)

    run()
