"""The rates of a GPU, and the thresholds where one way to compute becomes faster than another.

Plans estimate with them. `tatten.ops.cuda.tuning.gpu_rates` returns those of a device. The defaults are those of an
H200, on which they were measured unless a comment says otherwise. The module of a GPU in `tatten.ops.cuda.tuning` names
the fields that differ there.

Tiles are chosen in `tatten.ops.cuda.heuristics`: they belong to the kernels. The thresholds of merges across ranks are
in `tatten.ops.distributed`, and do not depend on the GPU, because all ranks have to choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LevelsTile:
    """A tile of the levels kernel, and estimates for it.

    Attributes:
        block_m, block_n: the packed queries of a work tile, and the keys of a tile.
        warps: the warps of a program.
        per_sm: the programs that share an SM.
        flops_per_us: floating-point operations of the GPU per us.
        l2_bytes_per_us: bytes from the L2 per us.
        block_us: the time of a block of `block_n` keys after the one before it.
        level_us: the time of the first block's loads.
    """

    block_m: int
    block_n: int
    warps: int
    per_sm: int
    flops_per_us: float
    l2_bytes_per_us: float
    block_us: float
    level_us: float


@dataclass(frozen=True)
class GpuRates:
    """Rates, times and thresholds of one model of GPU; `_us` are microseconds."""

    # Memory, and launches of attention.
    # Bytes per us that all SMs read: `read_rate` of `benchmarks/support/timing.py` gave 4.34e6 to 4.49e6.
    read_bytes_per_us: float = 4.4e6
    # The least time of a program for a tile, however narrow the tile is.
    least_tile_us: float = 0.8
    # The time of a tile for a program alone, as a share of its time beside programs on all SMs.
    tile_alone: float = 0.4
    # The same for each of several programs that leave a tenth of the GPU or more free: it reads a tenth slower.
    tile_beside_few: float = 1.1
    # The time of one more launch, besides that of its keys: to start, to wait for its first loads, and to store.
    launch_us: float = 5.0
    # The time that the combine's launch adds to a decode kernel.
    combine_us: float = 2.6
    # The extra time of an output state that may have partial states.
    partial_state_us: float = 8e-4
    # The least number of whole states for which a program of the combine takes several: one at a time mostly waits.
    many_states: int = 1024

    # The cut of a launch of the decode kernel.
    # The most tiles of a work tile that may stay whole: all programs would wait for a longer one among short ones.
    most_whole_tiles: int = 8
    # Waves of programs with `batch_invariant`, each as many as fit on the GPU: chunks differ in size, and a free SM
    # takes the next.
    waves: int = 32

    # The most bytes of keys and values for which `shortened` pays, which leaves fewer bytes in flight: 1 x 4096 takes
    # 10.2 us instead of 10.6, 1 x 32768 37.9 instead of 37.7, and 1 x 131072 127.8 instead of 124.7.
    short_tiles_most_bytes: float = 64e6

    # TMA.
    # The least bytes of keys and values that are read by TMA. Fewer are read before the host makes its next call, and
    # descriptors take the host 10 us of that time. Up to 500 MB a GPU reads as fast without TMA.
    tma_least_bytes: float = 128e6
    # The most bytes of keys and values that generated code reads without TMA if the op would use it: 64 x 2048 tokens
    # took 139 us and not 125, 16 x 8192 tokens 127.0 and not 126.2, and smaller ones no longer. With more bytes the GPU
    # keeps the host waiting anyway, and Python code launches the kernels of the op.
    most_bytes_without_tma: float = 500e6

    # The prefix kernel, on Hopper.
    # Its time for 128 packed queries by 128 keys of head_dim 128.
    prefix_tile_us: float = 2.2
    # The bytes per us that an SM reads beside it: it is bound by arithmetic.
    sm_bytes_per_us: float = 40e3
    # It is faster than the decode kernel for more packed queries and keys than these.
    prefix_over_queries: int = 32
    prefix_over_keys: int = 64
    # The same for up to 64 packed queries, which leave half of its tile empty.
    half_prefix_over_keys: int = 2048

    # Levels of a tree.
    # Floating-point operations per us of a launch for a level alone.
    level_flops_per_us: float = 700e6
    # The tiles of the levels kernel. The first one shrinks with the packed queries.
    levels_tiles: tuple[LevelsTile, ...] = (
        LevelsTile(64, 32, 4, 2, 450e6, 5e6, 0.6, 0.0),
        LevelsTile(128, 64, 8, 2, 700e6, 8e6, 0.8, 3.0),
    )
    # The least queries that share a row of the finest level: with fewer, ancestors are read again for too few.
    levels_least_queries: int = 32

    # Graph passes.
    # Bytes per us of keys and values that SDPA moves, and the time of a segment beyond SDPA's own: calls, a kernel, its
    # share of the merge. `benchmarks/shared_prefix.py --calibrate` fits both.
    sdpa_bytes_per_us: float = 4.7e6
    segment_us: float = 1.3
    # Floating-point operations per us of large products in 16 bits: `product_rate` of `benchmarks/support/timing.py`
    # gave 7.9e8 to 8.1e8.
    product_flops_per_us: float = 8e8
    # Up to this many queries of a head, `project_heads` multiplies them with `W_uk` faster than `bmm`: of 128 heads on
    # an H100, 8 took 7.1 and 8.9 us, 64 took 10.4 and 11.8, and 128 took 18 and 15.
    project_most_rows: int = 64
