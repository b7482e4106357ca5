"""`pairs`, from which tests take their parameters."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairs import pairs


@pytest.mark.parametrize("sizes, most", [((17, 2, 2, 3), 53), ((3, 3, 3, 3), 13), ((4, 5), 20), ((3,), 0)])
def test_each_two_values_meet(sizes: tuple[int, ...], most: int) -> None:
    cases = pairs(*map(range, sizes))
    assert len(set(cases)) == len(cases) <= most
    for i, j in combinations(range(len(sizes)), 2):
        assert {(case[i], case[j]) for case in cases} == set(product(range(sizes[i]), range(sizes[j])))
    assert pairs(*map(range, sizes)) == cases
