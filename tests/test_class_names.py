"""Each class of the package has a name of its own, so that a reader who searches for one finds one."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PUBLIC_TWICE = {"SharedPrefixCache", "ShardedKVCache"}  # beside those of transformers' interface


def test_class_names_are_unique() -> None:
    places = defaultdict(list)
    for folder in ("tatten", "passes", "ops"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT)
            if name.parts[:2] in (("tatten", "ops"), ("tatten", "passes")):
                continue  # the symbolic links
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(name))
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in PUBLIC_TWICE} == {}
