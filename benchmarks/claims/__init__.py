"""The claims of docs/benchmarks/, each with the figure that has to bear it out.

A claim that a new run does not support is mended in the page and here together: `said` is the page's own words.
"""

from __future__ import annotations

from claims import attention, batches, model_steps, pages, several_gpus, shared_prefixes, sparse

CLAIMS = [
    *model_steps.CLAIMS,
    *attention.CLAIMS,
    *sparse.CLAIMS,
    *shared_prefixes.CLAIMS,
    *pages.CLAIMS,
    *batches.CLAIMS,
    *several_gpus.CLAIMS,
]
