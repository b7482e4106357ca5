"""The tile space of a launch: keys and packed queries of all sequences, cut into tiles and numbered for programs."""

from __future__ import annotations

from dataclasses import dataclass

from tatten.ops.cuda.kernels.tile_scheduler import MOST_CHUNKS
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.validation import BLOCK_KEYS

_MOST_CHUNKS: int = MOST_CHUNKS.value


@dataclass(frozen=True)
class TileSpace:
    """The tile space of a launch, from which the combine finds its partials.

    Attributes:
        groups: the number of groups with their own lengths: each kv_row is one, or all of them together.
        work_tiles: the work tiles of each group: kv_rows times kv heads times blocks of packed queries.
        kv_len: the number of keys; lengths may be shorter.
        kv_heads: the heads of K and V.
        seqs_per_kv: the sequences that share a kv_row, or the most of a row group.
        q_blocks: the blocks of packed queries of a kv_row and kv head.
        programs: the number of programs launched.
        block_m: the packed queries of a work tile.
        block_n: the keys of a tile.
        window: the sliding window, if any, that the tiles are narrowed to.
        has_lens: each group has its own length in `kv_lens`.
        has_block_list: the tiles of a group are those blocks of a mask that are listed.
        row_groups: the largest number of row groups, which take the place of kv_rows; 0 without them. The device counts
            the real number. `groups` is equal to it if each row group has its own block list; else it is 1, and
            `work_tiles` is that of one row group.
        max_and_sum: partial states have maximum and sum instead of their lse, see
            `tatten.ops.cuda.kernels.online_softmax.store_lse`.
        chunk: the tiles of the smallest chunk, if work tiles are cut by their own length alone; else 0. A chunk as long
            as the longest work tile leaves all of them whole.
        margin: the most tiles by which a work tile counts as longer at each end, see
            `tatten.ops.cuda.kernels.tile_scheduler`.
        lanes: the number of lanes, see `tatten.ops.cuda.kernels.tile_scheduler`. It divides the number of work tiles of
            a kv_row and, for the decode kernel, the number of programs.
    """

    groups: int
    work_tiles: int
    kv_len: int
    kv_heads: int
    seqs_per_kv: int
    q_blocks: int
    programs: int
    block_m: int
    block_n: int
    window: int | None = None
    has_lens: bool = False
    has_block_list: bool = False
    row_groups: int = 0
    max_and_sum: bool = False
    chunk: int = 0
    margin: int = 0
    lanes: int = 1

    @property
    def constants(self) -> tuple[int, int, int, int, bool, int, bool]:
        """The constants that kernels are compiled for, in the order of `tatten.ops.cuda.kernels.tile_scheduler`."""
        groups = power_of_2(self.groups)
        return self.block_m, self.block_n, groups, self.chunk, self.max_and_sum, self.margin, self.lanes > 1

    @property
    def split(self) -> bool:
        """True if several programs may share a work tile."""
        if self.chunk:
            return not self.stays_whole
        # Work tiles of one group have equally many tiles, even if only the device knows how many.
        divides = self.groups == 1 and not self.row_groups and self.work_tiles % self.programs == 0
        return self.kv_len > self.block_n and not divides

    @property
    def stays_whole(self) -> bool:
        """True if each work tile is one chunk, however many tiles it has."""
        return self.chunk > 0 and self.most_chunks == 1

    @property
    def most_chunks(self) -> int:
        """The most chunks of a work tile. A longer work tile may have fewer, of more tiles each."""
        return max(1, min(ceil_div(ceil_div(self.kv_len, self.block_n), self.chunk), _MOST_CHUNKS))

    @property
    def slots(self) -> int:
        """The number of partial states for which memory is allocated."""
        if not self.split:
            return 0
        most_groups = max(self.groups, self.row_groups)
        return most_groups * self.work_tiles * self.most_chunks if self.chunk else 2 * self.programs

    def int64_tiles(self, batch: int) -> bool:
        """Return True if the number of tiles of `batch` sequences, times programs, needs 64 bits."""
        groups = batch if self.row_groups else self.groups
        total_tiles = groups * self.work_tiles * (max(1, ceil_div(self.kv_len, self.block_n)) + 2 * self.margin)
        return total_tiles * self.programs >= 1 << 31

    def most_partials(self, batch: int, wide: bool) -> int:
        """Estimate the largest number of partial states of one work tile of `batch` sequences.

        `wide`: a state is so wide that unused room for one costs more than another pass.
        """
        if self.chunk:
            return _MOST_CHUNKS  # for any batch, so that the order of sums doesn't depend on it
        if self.groups > 1 and not wide:
            return 32  # a ragged work tile may have all of them
        groups = ceil_div(batch, self.seqs_per_kv) if self.row_groups else self.groups
        average, rest = divmod(self.programs, groups * self.work_tiles)
        return average if not rest and groups == 1 and not self.row_groups else average + 2

    @property
    def block_list_stride(self) -> int:
        """The distance between the block lists of two groups, or of two kv_rows if there are row groups."""
        if not self.has_block_list or (self.row_groups and self.groups == 1):
            return 0
        return 2 * (ceil_div(self.kv_len, BLOCK_KEYS) + 1)
