"""gpt-fast's loop (github.com/meta-pytorch/gpt-fast), from a clone or a copy of its `model.py` and `generate.py`.

gpt-fast has a model of its own, a static cache, and a step that samples inside CUDA graphs of Inductor. Its host waits
for no token and looks for no end.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from transformers import PreTrainedModel

FILES = "model.py", "generate.py"
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "layers",
}


def reason_against(folder: Path | None, model: PreTrainedModel) -> str | None:
    """Return the reason why gpt-fast can't be measured, or None if it can."""
    if folder is None:
        return "no `--gpt-fast` folder"
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        return f"{folder} has no {missing[0]}"
    return None if model.config.model_type == "llama" else "gpt-fast has no such model"


def version(folder: Path) -> str:
    """Return git's hash of `model.py`, which tells versions apart that attend in other ways."""
    content = (folder / "model.py").read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def options() -> Iterator[None]:
    """Set the options of Inductor that gpt-fast sets for the whole process, in this block alone."""
    with inductor_config.patch({"coordinate_descent_tuning": True, "triton.unique_kernel_names": True}):
        yield


def load(folder: Path, device: torch.device) -> types.ModuleType:
    """Import gpt-fast's `generate.py`, whose step is compiled as its `main` does, without its tokenizer.

    On a CPU, where Inductor's template of flex attention fails for the step (torch 2.13), Dynamo alone compiles it.
    """
    spec = importlib.util.spec_from_file_location("gpt_fast_generate", folder / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = {name: sys.modules.pop(name, None) for name in ("model", "tokenizer")}
    sys.modules["tokenizer"] = types.SimpleNamespace(get_tokenizer=None)  # type: ignore[assignment]
    sys.path.insert(0, str(folder))
    path = list(sys.path)
    try:
        with options():  # which it sets as it is imported
            spec.loader.exec_module(module)
    finally:
        sys.path[:] = path[1:]
        sys.modules |= {name: x for name, x in before.items() if x is not None}
    how = {"mode": "reduce-overhead"} if device.type == "cuda" else {"backend": "eager"}
    module.decode_one_token = torch.compile(module.decode_one_token, fullgraph=True, **how)
    return module


def with_weights_of(model: PreTrainedModel, module: types.ModuleType) -> Any:
    """Return gpt-fast's model in another's shape, sharing its weights; those of queries, keys and values are copied."""
    config = model.config
    arguments = sys.modules[module.Transformer.__module__].ModelArgs(
        block_size=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        n_layer=config.num_hidden_layers,
        n_head=config.num_attention_heads,
        n_local_heads=config.num_key_value_heads,
        dim=config.hidden_size,
        intermediate_size=config.intermediate_size,
    )
    with torch.device("meta"):
        transformer = module.Transformer(arguments)

    def renamed(name: str) -> str:
        for old, new in NAMES.items():
            name = name.replace(old, new)
        return name

    transformer.load_state_dict({renamed(name): x for name, x in model.state_dict().items()}, assign=True)
    return transformer.eval().requires_grad_(False)


def decoder(
    folder: Path, model: PreTrainedModel, batch: int, used: int, capacity: int
) -> Callable[[int], list[Tensor]]:
    """Return a function that generates a number of tokens after `used` others.

    The cache is empty: a step reads the same bytes whatever they are. Tokens are sampled, without top-k.
    """
    module = load(folder, model.device)
    transformer = with_weights_of(model, module)
    with torch.device(model.device):
        transformer.setup_caches(batch, capacity)

    def generate(tokens: int) -> list[Tensor]:
        token = torch.zeros(batch, 1, dtype=torch.int, device=model.device)
        position = torch.tensor([used], dtype=torch.int, device=model.device)
        with options():
            return module.decode_n_tokens(transformer, token, position, tokens, temperature=0.8)[0]

    return generate
