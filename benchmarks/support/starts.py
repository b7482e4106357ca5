"""Seconds until a new process has its first tokens, with empty caches on disk, and with those of a former process."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIRST = "first tokens after "  # begins the line that each process prints


def starts(script: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start two processes for each candidate, with caches on disk that only these two share."""
    options = f"--section first_tokens --device {args.device} --model {args.model} --layers {args.layers}"
    options += f" --capacity {args.capacity} --used {args.used} --only"
    for name in args.only:
        seconds: dict[str, dict[str, float]] = {}
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
            for disk in ("cold", "warm"):
                command = [sys.executable, str(script), *options.split(), name]
                start = time.perf_counter()
                done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
                process, lines = time.perf_counter() - start, done.stdout.splitlines()
                first = next(float(x.removeprefix(FIRST)) for x in lines if x.startswith(FIRST))
                seconds[disk] = {"first_tokens_s": first, "process_s": process}
                print(f"  {name}, {disk} disk: {first:.1f} s, {process:.1f} s with the process", flush=True)
        yield {"section": "start", "model": args.model, "layers": args.layers, "candidate": name, **seconds}
