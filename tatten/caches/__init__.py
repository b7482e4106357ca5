"""Caches of keys and values: one for sequences that share a prefix, and one sharded over devices."""
