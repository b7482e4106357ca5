"""Private PyTorch APIs: each is used in one file, whose `test_private_api.py` fails clearly when the API moves."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMPORTED = re.compile(r"^\s*from (torch\S*) import ([^#\n]+)", re.MULTILINE)
DOTTED = re.compile(r"(?<![\w.])torch(?:\.\w+)+")
# Which kernel SDPA was dispatched to is asked in one place, and the kernels are called in others.
DISPATCHED = {"torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"}
# A name of a module stands for its members, of which these files use different ones.
MODULES = {"torch._inductor", "torch._dynamo.exc"}
DOCUMENTED = {"torch._check"}  # whatever its name says
CHECKS = "ops/inductor/check.py"  # that the interfaces which `ir.py` uses are there
DISPATCHED |= {f"torch.ops.aten._scaled_dot_product_{kernel}_attention" for kernel in ("flash", "cudnn")}


def private_names(source: str) -> set[str]:
    """Dotted names of what is imported or used, up to two parts from the first private one on."""
    names = {
        f"{module}.{name.split(' as ')[0].strip()}"
        for module, found in IMPORTED.findall(source)
        for name in found.split(",")
    }
    names |= set(DOTTED.findall(IMPORTED.sub("", source)))
    found = (re.match(r"(torch(?:\.[a-zA-Z]\w*)*\.(?!__)_\w+(?:\.[a-zA-Z_]\w*)?)", name) for name in names)
    return {re.sub(r"\.default$", "", match[1]) for match in found if match}


@pytest.mark.parametrize(
    "source, names",
    [
        ("bool(torch._C._is_alias_of(a, b))", {"torch._C._is_alias_of"}),
        ("torch.ops.aten._safe_softmax.default", {"torch.ops.aten._safe_softmax"}),
        (
            "from torch._ops import OpOverload, OpOverloadPacket",
            {"torch._ops.OpOverload", "torch._ops.OpOverloadPacket"},
        ),
        ("from torch.fx import _utils", {"torch.fx._utils"}),
        ("torch.library.fallthrough_kernel; from torch.library import opcheck; torch.__file__", set()),
    ],
)
def test_what_counts_as_private(source: str, names: set[str]) -> None:
    assert private_names(source) == names


def test_each_is_used_in_one_file() -> None:
    files = defaultdict(set)
    for folder in ("ops", "passes", "tatten"):
        for path in (ROOT / folder).rglob("*.py"):
            if not path.is_relative_to(ROOT / "tatten/ops") and not path.is_relative_to(ROOT / "tatten/passes"):
                for name in private_names(path.read_text()):
                    files[name].add(str(path.relative_to(ROOT)))
    assert len(files) > 20
    allowed = DISPATCHED | MODULES | DOCUMENTED
    assert {name: found for name, found in files.items() if len(found - {CHECKS}) > 1 and name not in allowed} == {}
