"""Mutation testing: each of the `mutants` runs against the tests that cover it; one that no test fails on survived.

    make mutants SEED=0 N=200

Prints where each is, what was changed into what, and which test failed. Each runs in a fork of a process that has
imported PyTorch but not tatten, and sees a copy of the package with the fault in its file; so do its ranks.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mutants import ROOT, Mutant, sample

PACKAGE = {"tatten": "tatten", "ops": "tatten/ops", "passes": "tatten/passes"}  # folders, and where they are installed
TESTS = [
    "tests/passes",
    *(f"tests/ops/test_{name}.py" for name in ("merge", "block_mask", "decode_attention", "bad_input")),
    *(f"tests/ops/test_{name}.py" for name in ("bifurcated_attention", "finite_floors")),
    *(f"tests/ops/test_{name}_properties.py" for name in ("merge", "op")),
    "tests/tatten/caches",
    "tests/tatten/integrations",
    "tests/tatten/test_dtensor_sdpa.py",
]
LEFT_OUT = "not inductor and not triton and not interpreted and not example"  # slow
BUDGET = 120.0  # seconds of tests for each mutant, as they took under coverage


class Run:
    """A pytest plugin: only the tests named, in their order; what failed; and with `coverage` what each test runs."""

    def __init__(self, seconds: dict[str, float] | None = None, coverage: Any = None) -> None:
        self.seconds, self.coverage = seconds, coverage
        self.taken: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.seconds is not None:
            order = list(self.seconds)
            items[:] = sorted((x for x in items if x.nodeid in self.seconds), key=lambda x: order.index(x.nodeid))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.coverage is not None:
            self.coverage.switch_context(nodeid)
        if self.seconds is not None:
            signal.alarm(20 + 5 * int(self.seconds[nodeid]))  # the end of this process

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.taken[report.nodeid] = self.taken.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(f"import of {report.nodeid}")


def run_tests(tree: str, tests: list[str], plugin: Run, to_the_end: bool = False) -> Run:
    """Run tests in this process, a fork, with the package as it stands in `tree`, up to the first that fails."""
    import hypothesis
    import pytest
    import ranks

    hypothesis.settings.register_profile("first failure", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
    hypothesis.settings.load_profile("first failure")  # not the smallest one
    ranks._context = multiprocessing.get_context("fork")  # of this process, which has imported everything
    sys.path.insert(0, tree)
    os.environ["PYTHONPATH"] = tree
    options = ["-q", "-p", "no:cacheprovider", "--tb=line", "-k", LEFT_OUT, *([] if to_the_end else ["-x"])]
    with plugin.coverage.collect() if plugin.coverage else contextlib.nullcontext():
        code = pytest.main([*tests, *options], plugins=[plugin])
    if plugin.coverage:
        plugin.coverage.save()
        plugin.coverage = None
    if code and not plugin.failed:
        plugin.failed.append(f"{code!r}, as when a conftest cannot be imported")
    return plugin


def in_forks(jobs: Iterator[tuple[Any, float, Callable[[], Any]]], processes: int) -> Iterator[tuple[Any, Any]]:
    """Run functions in forks, a few at a time: `(name, result)` as they end, the result a string where there is none.

    Args:
        jobs: for each its name, after how many seconds it is killed, and the function.
    """
    running: list[tuple[Any, float, Any, Any]] = []
    context = multiprocessing.get_context("fork")
    while True:
        while len(running) < processes and (job := next(jobs, None)) is not None:
            name, seconds, function = job
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(sender, function))
            process.start()
            sender.close()
            running.append((name, time.monotonic() + seconds, process, receiver))
        if not running:
            return
        ends = [end for _, _, process, receiver in running for end in (process.sentinel, receiver)]
        multiprocessing.connection.wait(ends, timeout=1.0)
        for entry in list(running):
            name, deadline, process, receiver = entry
            if not receiver.poll() and process.is_alive() and time.monotonic() < deadline:
                continue
            result = None
            with contextlib.suppress(EOFError):
                result = receiver.recv() if receiver.poll() else None
            if result is None:
                process.join(1.0)
                result = "timed out" if process.exitcode in (None, -signal.SIGALRM) else "crashed"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks as well
            process.join()
            running.remove(entry)
            yield name, result


def _child(sender: Any, function: Callable[[], Any]) -> None:
    os.setsid()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    sender.send(function())


def measure(tree: str, processes: int) -> dict[str, Any]:
    """How long each test takes, and which tests run each line of the package."""
    import coverage

    files = [path for name in TESTS for path in (sorted((ROOT / name).glob("test_*.py")) or [ROOT / name])]
    seconds: dict[str, float] = {}
    lines: dict[str, dict[int, set[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:

        def job(file: Path) -> Callable[[], Run]:
            cov = coverage.Coverage(f"{folder}/data", True, source=[tree], config_file=False, messages=False)
            cov.set_option("run:patch", ["_exit"])  # how ranks end
            return lambda: run_tests(tree, [str(file)], Run(coverage=cov), to_the_end=True)

        for file, run in in_forks(((path, 900.0, job(path)) for path in files), processes):
            print(f"{file.name}: {run if isinstance(run, str) else f'{len(run.taken)} tests {run.failed}'}", flush=True)
            seconds |= {} if isinstance(run, str) else {x: t for x, t in run.taken.items() if x not in run.failed}
        for path in Path(folder).iterdir():
            data = coverage.CoverageData(str(path))
            data.read()
            for file in data.measured_files():
                per_line = lines.setdefault(os.path.relpath(os.path.realpath(file), os.path.realpath(tree)), {})
                for line, tests in data.contexts_by_lineno(file).items():
                    per_line.setdefault(line, set()).update(name for name in tests if name)
    return {"seconds": seconds, "lines": {f: {i: sorted(x) for i, x in per.items()} for f, per in lines.items()}}


def measured_once(tree: str, processes: int) -> dict[str, Any]:
    """`measure`, kept in build/ for as long as neither code nor tests change."""
    files = sorted(path for folder in (*PACKAGE, "tests") for path in (ROOT / folder).rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    kept = ROOT / f"build/mutants-{digest[:16]}.json"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(measure(tree, processes)))
    measured: dict[str, Any] = json.loads(kept.read_text())
    return measured


def covering(mutant: Mutant, measured: dict[str, Any]) -> dict[str, float]:
    """The tests that run the statement; or the function, where Dynamo traced it; or the file. With their seconds."""
    lines = measured["lines"].get(installed(mutant.file), {})
    for place in (mutant.lines if mutant.function else (), mutant.function, map(int, lines)):
        tests = {test for line in place for test in lines.get(str(line), ()) if test in measured["seconds"]}
        if tests:
            return in_turn({test: measured["seconds"][test] for test in tests})
    return {}


def in_turn(seconds: dict[str, float]) -> dict[str, float]:
    """The first of the parameters of each test, fastest first, then the second of each, as long as the budget lasts."""
    turns: dict[str, int] = {}
    rows = []
    for name in sorted(seconds, key=lambda name: (seconds[name], name)):
        function = name.partition("[")[0]
        turns[function] = turns.get(function, -1) + 1
        rows.append((turns[function], seconds[name], name))
    rows.sort()
    spent = itertools.accumulate(taken for _, taken, _ in rows)
    return {name: taken for (_, taken, name), total in zip(rows, spent, strict=True) if total - taken < BUDGET}


def installed(file: str) -> str:
    folder, _, rest = file.partition("/")
    return f"{PACKAGE[folder]}/{rest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants")
    parser.add_argument("--tests", nargs="*", help="what to run instead of the tests that cover each mutant")
    args = parser.parse_args()
    mutants = dict(enumerate(sample(args.n, args.seed)))
    warm_up()
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = f"{folder}/plain"
        # With what the links `tatten/ops` and `tatten/passes` lead to.
        shutil.copytree(ROOT / "tatten", f"{tree}/tatten", ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(tree, quiet=1)
        if args.tests:
            ((_, run),) = in_forks(iter([("", 900.0, lambda: run_tests(tree, args.tests, Run(), to_the_end=True))]), 1)
            chosen = in_turn({name: seconds for name, seconds in run.taken.items() if name not in run.failed})
            print(f"{len(chosen)} tests, {sum(chosen.values()):.0f} s, without {run.failed}", flush=True)
        else:
            measured = measured_once(tree, args.processes)

        def job(number: int, mutant: Mutant) -> tuple[int, float, Callable[[], Run]]:
            seconds = chosen if args.tests else covering(mutant, measured)
            own = f"{folder}/{number}"
            shutil.copytree(tree, own)
            (Path(own) / installed(mutant.file)).write_text(mutant.source())
            tests = sorted({str(ROOT / name.partition("::")[0]) for name in seconds})
            return number, 900.0, lambda: run_tests(own, tests, Run(seconds)) if tests else Run()

        jobs = (job(i, mutant) for i, mutant in mutants.items() if args.only is None or i in args.only)
        for number, run in in_forks(jobs, args.processes):
            shutil.rmtree(f"{folder}/{number}")
            how = run if isinstance(run, str) else f"killed by {run.failed[0]}" if run.failed else "SURVIVED"
            ran = "" if isinstance(run, str) else f" ({len(run.taken)} tests, {sum(run.taken.values()):.0f} s)"
            print(f"{number:3d} {mutants[number]}\n      {how}{ran}", flush=True)
            word = how.partition(" by ")[0]
            counts[word] = counts.get(word, 0) + 1
    print(counts)


def warm_up() -> None:
    """Import what tests need, but not tatten."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import hypothesis.stateful  # noqa: F401
    import torch._dynamo.testing
    import torch._functorch.aot_autograd
    import torch.distributed.tensor
    import transformers.models.llama.modeling_llama  # noqa: F401
    import triton.language  # noqa: F401

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    assert not any(name.partition(".")[0] == "tatten" for name in sys.modules)


if __name__ == "__main__":
    main()
