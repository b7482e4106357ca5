"""The options that every benchmark's command line has, and the lines about the machine that every run prints."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch


def arguments(doc: str | None, devices: Sequence[str] = ("cpu", "cuda")) -> argparse.ArgumentParser:
    """Return a parser with `--device`, by default the first of `devices`, and `--json`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=devices[0], choices=devices)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def machine(device: str) -> str:
    """Return the line about the device and PyTorch's version that a benchmark prints first."""
    return f"{device_name(device)}, torch {torch.__version__}"


def command(argv: Sequence[str] | None = None) -> str:
    """Return the command that runs this again from the repository's root, without the path of its figures."""
    argv = list(sys.argv if argv is None else argv)
    if "--json" in argv:
        at = argv.index("--json")
        del argv[at : at + 2]
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    program = f"torchrun --nproc-per-node {ranks}" if ranks else "python"
    return f"{program} benchmarks/{Path(argv[0]).name} {shlex.join(argv[1:])}".rstrip()


def first_line(error: BaseException) -> str:
    """Return an error in one line, for a table's footnote."""
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
