"""Graph passes: find attention calls, decide about each, and rewrite them. Pure graph code, no kernels."""

from tatten.passes.findings import Declined, GraphReport, Rewritten
from tatten.passes.rewrite import rewrite

__all__ = ["Declined", "GraphReport", "Rewritten", "rewrite"]
