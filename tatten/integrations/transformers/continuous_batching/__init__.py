"""Continuous batching of transformers (`generate_batch`) on attention that reads pages in place."""

from tatten.integrations.transformers.continuous_batching.replaced import install, uninstall

__all__ = ["install", "uninstall"]
