"""Say which claims of the pages about benchmarks the figures of a run do not support.

    python benchmarks/verify.py folder                      # of the JSON that record.py wrote
    python benchmarks/verify.py folder --machines one two   # only the claims of these machines

Exits with status 1 if a claim fails: its figure is beyond its bound, or can't be computed because a file, a row or a
column is missing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from pathlib import Path

from claims import CLAIMS
from claims.claim import Claim
from record import STEPS
from support.results import ResultsError, read


def failure(claim: Claim, folder: Path) -> str | None:
    """Return why the run does not support the claim, or None if it does."""
    path = folder / f"{claim.file}.json"
    try:
        rows = read(path)["rows"]
    except ResultsError as error:
        return str(error)
    if len(rows) < claim.rows:
        return f"{path} has {len(rows)} rows, a complete run has {claim.rows}"
    try:
        figure = claim.figure(rows)
    except KeyError as error:
        return f"{path}: a row lacks {error}"
    except (TypeError, ValueError, ZeroDivisionError, statistics.StatisticsError) as error:
        return f"{path} does not give the figure: {error}"
    return None if claim.holds(figure) else f"{figure:.3f}, {claim.bound} is claimed: “{claim.said}”"


def verify(claims: Iterable[Claim], folder: Path) -> dict[str, str]:
    """Return the claims that fail, by name, with the reason."""
    return {claim.name: why for claim in claims if (why := failure(claim, folder)) is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder with the run's JSON")
    parser.add_argument("--machines", nargs="*", choices=list(STEPS), default=list(STEPS))
    args = parser.parse_args()
    files = {step.name for machine in args.machines for step in STEPS[machine]}
    claims = [claim for claim in CLAIMS if claim.file in files]
    failed = verify(claims, args.run)
    for name, why in failed.items():
        print(f"FAILS  {name}: {why}")
    print(f"{len(claims) - len(failed)} of {len(claims)} claims hold")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
