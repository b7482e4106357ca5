"""A model whose text repeats itself, so that drafts are accepted, and a smaller model that chooses the same tokens."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel


def repeats(model: PreTrainedModel) -> None:
    """Change weights so that each token is followed by the next one of its 32: a text that repeats itself.

    Layers compute as much as before, but add little to the residual.
    """
    for name, x in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            x.mul_(1e-3)
    tokens = torch.arange(model.config.vocab_size, device=model.device)
    model.lm_head.weight[tokens // 32 * 32 + (tokens + 1) % 32] = model.model.embed_tokens.weight[tokens].clone()


def draft_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a draft model of the first sixteenth of the layers, at least one, which shares their weights.

    After `repeats`, it chooses the same tokens.
    """
    layers = max(1, len(model.model.layers) // 16)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):
        draft = type(model)(config).eval()
    shared_weights = {name: x for name, x in model.state_dict().items() if name in draft.state_dict()}
    draft.load_state_dict(shared_weights, assign=True)
    draft.model.rotary_emb = model.model.rotary_emb
    return draft
