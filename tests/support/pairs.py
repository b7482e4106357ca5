"""Pairwise cover of parameters, in place of their product: most faults need two values to meet, and few need three."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any


def pairs(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Tuples with a value of each parameter, such that each value meets each value of every other parameter.

    They are found greedily and are the same each time: about as many as the two longest parameters have pairs, and the
    first of them cover most.
    """
    choose = random.Random(0)
    unmet = [
        {(i, a), (j, b)}
        for i, j in combinations(range(len(parameters)), 2)
        for a in range(len(parameters[i]))
        for b in range(len(parameters[j]))
    ]
    cases = []
    while unmet:
        case = dict(sorted(choose.choice(unmet)))
        for i in sorted(set(range(len(parameters))) - case.keys()):
            gains = [sum({(i, a), x} in unmet for x in case.items()) for a in range(len(parameters[i]))]
            case[i] = choose.choice([a for a, gain in enumerate(gains) if gain == max(gains)])
        unmet = [pair for pair in unmet if not pair <= case.items()]
        cases.append(tuple(values[case[i]] for i, values in enumerate(parameters)))
    return cases
