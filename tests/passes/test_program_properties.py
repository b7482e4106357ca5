"""Random programs of views, copies, writes, masks and attention give compiled what they give in eager mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import fuzz
import pytest
from hypothesis import given
from programs import Outcome, Program, check, dynamic_programs, programs, wrapped_programs

from tatten.ops.cpu import flash

OPS = {"tatten.decode_attention.default", "tatten.bifurcated_attention.default"}
WAYS = {"_flash", "_attend_in_splits", "_attend_in_groups"}


@pytest.fixture
def ways() -> Iterator[Counter[str]]:
    """Counts of the branches that small tensors take only where thresholds are lowered."""
    gone: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(flash, name)

        def count(*args: Any) -> Any:
            gone[name] += 1
            return function(*args)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name in WAYS:
            patch.setattr(flash, name, counted(name))
        yield gone


@pytest.mark.slow
def test_programs_mean_the_same_compiled(ways: Counter[str]) -> None:
    """And at least half of them are rewritten, into each op, and little is lost to what PyTorch can't compile."""
    outcomes: list[Outcome] = []

    @fuzz.settings(60)
    @given(program=programs())
    def run(program: Program) -> None:
        outcomes.append(check(program))

    run()
    print(f"ways of the ops: {dict(ways)}")
    assert _ops(outcomes, at_least=2) == OPS
    assert set(ways) == WAYS


def _ops(outcomes: list[Outcome], at_least: int, deviations: int = 0) -> set[str]:
    """The ops that programs were rewritten into: one of so many programs, if no more than a tenth fail in PyTorch.

    A share that is near the bound is missed by so many standard deviations of a binomial count, by chance.
    """
    ops = Counter(op for outcome in outcomes for op in outcome.rewritten)
    reasons = Counter(reason for outcome in outcomes for reason in outcome.declined)
    not_ours = Counter(outcome.not_ours for outcome in outcomes if outcome.not_ours)
    print(f"{len(outcomes)} programs: rewritten {dict(ops)}, declined {dict(reasons)}, {not_ours}")
    share = 1 / at_least
    by_chance = deviations * (len(outcomes) * share * (1 - share)) ** 0.5
    assert sum(bool(outcome.rewritten) for outcome in outcomes) >= len(outcomes) * share - by_chance, reasons
    assert not_ours.total() * 10 <= len(outcomes), not_ours
    return set(ops)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "n", "at_least", "deviations"), [(dynamic_programs, 30, 2, 0), (wrapped_programs, 40, 4, 3)]
)
def test_programs_of_any_size_and_under_functorch(
    made: Callable[..., Any], n: int, at_least: int, deviations: int
) -> None:
    """Sizes and numbers that are inputs of the graph, and attention under `vmap`, `functional_call` and `grad`."""
    outcomes: list[Outcome] = []

    @fuzz.settings(n)
    @given(program=made())
    def run(program: Program) -> None:
        outcomes.append(check(program))

    run()
    assert _ops(outcomes, at_least, deviations)


@fuzz.settings(2)
@given(program=dynamic_programs())
def test_a_few_programs_of_any_size(program: Program) -> None:
    check(program)


@fuzz.settings(3)
@given(program=wrapped_programs())
def test_a_few_programs_under_functorch(program: Program) -> None:
    check(program)


@fuzz.settings(6)
@given(program=programs())
def test_a_few_programs_mean_the_same_compiled(program: Program) -> None:
    check(program)


@pytest.mark.slow
@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_programs_mean_the_same_under_inductor(cpp_wrapper: bool) -> None:
    """Inductor compiles what tatten leaves of a program; that takes seconds for each."""

    @fuzz.settings(2)
    @given(program=programs(inner=("inductor",), cpp_wrapper=cpp_wrapper))
    def run(program: Program) -> None:
        check(program)

    run()


@pytest.mark.slow
@fuzz.settings(2)
@given(program=dynamic_programs(inner=("inductor",)))
def test_programs_of_any_size_under_inductor(program: Program) -> None:
    check(program)
