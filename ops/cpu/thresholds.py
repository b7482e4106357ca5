"""Sizes at which the ops on a CPU switch strategy.

They are read at each call: tests lower them (`tests/support/fuzz.py`), so that small tensors take every path.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Thresholds:
    """Thresholds, as measured on a 2-core Xeon with AMX."""

    # Sequences with different spans go to the kernel one by one, if joining them would read this much more for each.
    run_bytes: int = 1 << 18
    # With fewer bytes of K and V for each extra split, the merge costs more than an idle core.
    split_bytes: int = 1 << 20
    # With this many rows or more, the kernel first copies keys and values in low precision into the layout of AMX.
    packed_rows: int = 64
    # The bytes of a block of latents, in the dtype of sums, for each core, so that it stays in the cache.
    block_bytes: int = 1 << 21
    # With a soft cap, scores are written to memory: sequences of more bytes of K and V than this attend alone.
    capped_bytes: int = 1 << 19
    # Reading keys that `m` sequences share in one call, with its merge, costs as much as reading `m + 4` times this.
    shared_bytes: int = 1 << 19


CPU = Thresholds()
