"""The end of a launch that runs beside the previous one (programmatic dependent launch)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def end_after_previous_launch():
    """Keep this launch from ending before the previous one does.

    The next launch waits for this one alone, but reads the results of both. One program is enough to wait, since a
    launch ends with its last program, and waiting makes the previous launch's writes visible. If every program waited,
    waiting programs would fill the SMs, and the others could start only after the previous launch.
    """
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.extra.cuda.gdc_wait()
