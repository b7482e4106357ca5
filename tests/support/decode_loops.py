"""Small models for tests of the decode loop, and a loop that launches ahead on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import GQA
from transformers import CompileConfig, PreTrainedConfig, PreTrainedModel

from tatten.integrations.transformers import DecodeLoop

EAGER = CompileConfig(backend="tatten", mode=None, options={"inner": "eager"})
SMALL = GQA | {
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


class Launching(DecodeLoop):
    """Launches ahead on a CPU too, where nothing is gained, as it does on a GPU."""

    def _steps_ahead(self, cache: Any, ours: bool, call: Any, on_gpu: bool) -> int:
        return super()._steps_ahead(cache, ours, call, True)


def with_weights(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.2)  # no token repeats for long, so that wrong keys change the text
    return model.eval()
