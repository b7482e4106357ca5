"""Run a function on several ranks, one process each with gloo on a CPU, in bounded time whatever a rank does.

Processes are forked from a server that has imported PyTorch once, so that a test takes a fraction of a second.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

# Inductor of torch 2.11 asks for CUDA as it is imported. By NVML that leaves a process from which one can fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed.tensor", "torch._inductor.compile_fx", "tatten.integrations.transformers", "tiny_models"]
)


class RankError(AssertionError):
    """A failure of a rank: its own error, that it died, or that it was still running at the end."""


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, seconds: float = 300.0, timeout: float = 120.0) -> list[Any]:
    """`[fn(*args) on rank 0, ..., on rank n - 1]`, as `try_ranks`; raises RankError if any of them is one."""
    results = try_ranks(n, fn, *args, seconds=seconds, timeout=timeout)
    bad = {rank: x for rank, x in enumerate(results) if isinstance(x, RankError)}
    if bad:
        raise RankError("\n".join(f"rank {rank}: {x}" for rank, x in bad.items()))
    return results


def try_ranks(n: int, fn: Callable[..., Any], *args: Any, seconds: float = 300.0, timeout: float = 120.0) -> list[Any]:
    """Return the result of `fn(*args)` on each rank of one gloo process group, or a RankError in its place.

    Args:
        fn: a function of a module, without gradients; it asks `torch.distributed` for its rank.
        seconds: after this the ranks that still run are killed.
        timeout: that of the process group, in seconds: how long a collective waits for a peer.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(n):
            receiver, sender = _context.Pipe(duplex=False)
            job = (rank, n, f"{folder}/store", timeout, sender, fn, args)
            process = _context.Process(target=_main, args=job, daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        deadline = time.monotonic() + seconds
        try:
            return [_result(pipe, process.sentinel, deadline) for pipe, process in zip(pipes, processes, strict=True)]
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join(timeout=10)


def run_torchrun(n: int, script: str, *options: str, seconds: float = 300.0) -> str:
    """Return the output of a script under torchrun on n ranks; raises RankError if it fails or is not done in time.

    torchrun starts ranks in sessions of their own. If it were killed, it would leave them behind, with pipes open that
    a reader waits for. So it is asked to end, which makes it end them, and output goes to a file.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(n), script]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([*command, *options], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            status: object = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = f"still running after {seconds:g} s"
        finally:
            process.terminate()
            try:
                process.wait(40)  # torchrun gives ranks 30 s
            except subprocess.TimeoutExpired:
                process.kill()
        out.seek(0)
        if status != 0:
            raise RankError(f"torchrun: {status}\n{out.read()[-5000:]}")
        return out.read()


def _result(pipe: Connection, sentinel: int, deadline: float) -> Any:
    if not wait([pipe, sentinel], timeout=max(0.0, deadline - time.monotonic())):
        return RankError("still running")
    try:
        return pickle.loads(pipe.recv_bytes()) if pipe.poll() else RankError("died")
    except EOFError:
        return RankError("died")


def _main(
    rank: int, n: int, store: str, timeout: float, sender: Connection, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    from tatten.passes import internal

    internal.RAISES = True  # as for the tests themselves
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n))
    try:
        limit = datetime.timedelta(seconds=timeout)
        rendezvous = dist.FileStore(store, n)
        dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=n, timeout=limit)
        # A rank that sends nothing could end before the others have connected to it.
        rendezvous.set(f"ready {rank}", "")
        rendezvous.wait([f"ready {i}" for i in range(n)], limit)
        with torch.no_grad():
            result = fn(*args)
    except BaseException as error:  # of a failed `pytest.raises`, too, and SystemExit
        result = RankError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    sender.send_bytes(pickle.dumps(result))  # by value: shared memory would end with this process
    sender.close()
    if not isinstance(result, RankError):
        # Under load a peer may still be connecting to this rank for another group. `try_ranks` kills it in the end.
        time.sleep(timeout)
    os._exit(0)  # no tear-down that waits for peers
