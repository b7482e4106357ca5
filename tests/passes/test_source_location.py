"""Source locations as the user writes them: modules as `named_modules` has them, and lines of the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import capture
from torch import nn

from tatten.passes.findings import _module_path, source_location

pytestmark = pytest.mark.drawn(1)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(8, 8)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8)})

    def forward(self, x):
        result = self.base_layer(x)
        for adapter in self.lora_A.keys():  # noqa: SIM118  (as PEFT does)
            result = result + self.lora_B[adapter](self.lora_A[adapter](x))
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = Lora()

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q_proj(x), x, x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.rest = nn.Sequential(nn.Identity(), nn.ModuleDict({"cross attn": Attention()})["cross attn"])

    def forward(self, x):
        return self.rest(self.self_attn(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        self.heads = nn.ModuleDict({"by name": Attention()})

    def forward(self, x):
        return self.heads["by name"](self.model(x))


class Adapted(nn.Module):
    """As PEFT's: whatever the wrapper has not is looked up in what it wraps, so that Dynamo traces `__getattr__`."""

    inner: str

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        setattr(self, self.inner, inner)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == self.inner:
                raise
            return getattr(getattr(self, self.inner), name)

    def forward(self, x):
        return getattr(self, self.inner)(x)


class LoraModel(Adapted):
    inner = "model"


class PeftModel(Adapted):
    inner = "base_model"


def modules(fn, *args) -> list[str]:
    gm = capture(fn, *args)
    found = []
    for node in gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        location = source_location(node)
        assert location.file == __file__
        assert location.code == "return F.scaled_dot_product_attention(self.q_proj(x), x, x)"
        found.append(location.module)
    return found


X = torch.randn(1, 2, 3, 8)
ATTENTION = [
    "model.layers.0.self_attn",
    "model.layers.0.rest.1",
    "model.layers.1.self_attn",
    "model.layers.1.rest.1",
    "heads.by name",
]


def test_modules_of_a_model() -> None:
    model = Model()
    assert modules(model, X) == ATTENTION
    assert modules(model.forward, X) == ATTENTION
    assert set(ATTENTION) < {name for name, _ in model.named_modules()}


def test_modules_of_a_wrapped_model() -> None:
    peft = PeftModel(LoraModel(Model()))
    want = ["base_model.model." + name for name in ATTENTION]
    assert modules(peft, X) == want
    assert set(want) < {name for name, _ in peft.named_modules()}
    assert modules(nn.Sequential(torch.compile(peft)), X) == ["0." + name for name in want]


def test_modules_of_a_variable() -> None:
    draft, pair = Model(), [Model(), Model()]
    assert modules(lambda x: draft(x), X) == ["draft." + name for name in ATTENTION]
    assert modules(lambda models, x: models[1](x), pair, X) == ["models.1." + name for name in ATTENTION]
    by_name = {"a b": draft}
    assert modules(lambda x: by_name["a b"](x), X) == ["by_name.a b." + name for name in ATTENTION]


def test_modules_of_a_decorated_forward() -> None:
    def decorated(*args: Any, **kwargs: Any) -> Any:
        return Model.forward(*args, **kwargs)

    class Decorated(Model):
        forward = decorated

    assert modules(Decorated(), X) == [*ATTENTION]


@pytest.mark.parametrize(
    ("path", "want"),
    [
        ("L['self']", ""),
        ("L['self'].model.layers.0", "model.layers.0"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        (
            "L['self'].__dict__['_modules']['base_model'].__dict__['_modules']['model'].layers.0",
            "base_model.model.layers.0",
        ),
        ("G['step']._orig_mod.layers[3]", "step.layers.3"),
        ("L['self']._modules['_orig_mod'].layers[3]", "layers.3"),
        ("L['fn'].0.lora_A.default", "0.lora_A.default"),
        ("L['args'][0].model.layers[3].self_attn", "model.layers.3.self_attn"),
        ("L['args'][1].layers[3]", "args.1.layers.3"),
        ("L['args'][10].layers[3]", "args.10.layers.3"),
    ],
)
def test_paths(path: str, want: str) -> None:
    assert _module_path(path) == want


def test_lines_of_torch_are_not_the_users() -> None:
    softmax = nn.Softmax(-1)
    gm = capture(lambda x: softmax(x), X)
    (node,) = gm.graph.find_nodes(op="call_function", target=F.softmax)
    assert (source_location(node).file, source_location(node).code) == (
        __file__,
        "gm = capture(lambda x: softmax(x), X)",
    )
