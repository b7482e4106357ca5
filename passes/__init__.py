"""What happens to the graph: find SDPA calls, decide, rewrite. Pure graph code, no kernels."""

from tatten.passes.rewrite import Declined, GraphReport, Rewritten, rewrite

__all__ = ["Declined", "GraphReport", "Rewritten", "rewrite"]
