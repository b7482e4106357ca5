"""Caches of keys and values: a prefix that sequences share, and a cache sharded over devices."""
