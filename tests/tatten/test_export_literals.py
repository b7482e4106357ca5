"""Exported programs with attention written out: the numbers in their code, of which export makes inputs."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch.export import export

import tatten
from tatten.passes.reasons import Reason

pytestmark = pytest.mark.drawn(2)


class Attention(torch.nn.Module):
    """Attention written out, with numbers that its forms keep in different places."""

    def __init__(self, form) -> None:
        super().__init__()
        self.form = form
        self.attribute = torch.tensor(3.0)
        self.register_buffer("buffer", torch.tensor(3.0))

    def forward(self, q, k, v, mask):
        return self.form(self, q @ k.mT, mask).softmax(-1) @ v


def filled(module, s, mask):
    return torch.where(mask, s, torch.tensor(torch.finfo(s.dtype).min, dtype=s.dtype))


def divided(module, s, mask):
    return (s / torch.tensor([math.sqrt(8)])).div_(torch.tensor(2)).masked_fill_(~mask, torch.tensor(-math.inf))


def changed(module, s, mask):
    number = torch.tensor(2.0)
    number += 1
    return (s * number).masked_fill(~mask, -math.inf)


def by_attribute(module, s, mask):
    return s * module.attribute


def by_copy_of_attribute(module, s, mask):
    return s * module.attribute.clone()


def by_buffer(module, s, mask):
    return s * module.buffer


def by_several(module, s, mask):
    """Export lets the graph's value of a copied literal share the memory of the literal."""
    numbers = torch.tensor([2.0, 3.0])
    numbers += 1
    return s * numbers[None, :, None, None]


def arguments():
    torch.manual_seed(0)
    mask = torch.arange(12) < torch.tensor([5, 12]).view(2, 1, 1, 1)
    return torch.randn(2, 2, 1, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8), mask


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("form", [filled, divided], ids=lambda x: x.__name__)
def test_literals(form, strict: bool) -> None:
    module, args = Attention(form), arguments()
    program = export(module, args, strict=strict)
    with tatten.recording() as report:
        rewritten = tatten.rewrite(program)
    assert len(report.rewritten) == 1, report
    assert not any("softmax" in str(node.target) for node in rewritten.graph.nodes)
    torch.testing.assert_close(rewritten.module()(*args), module(*args))
    assert any("softmax" in str(node.target) for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(rewritten, file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(*args), module(*args))


@pytest.mark.parametrize(
    "form", [changed, by_attribute, by_copy_of_attribute, by_buffer, by_several], ids=lambda x: x.__name__
)
def test_what_is_no_literal(form) -> None:
    program = export(Attention(form), arguments())
    with tatten.recording() as report:
        assert tatten.rewrite(program) is program
    assert [x.decline.reason for x in report.declined] == [Reason.RELATIVE]
