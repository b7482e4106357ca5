"""`generate` of a model on the ranks of a mesh, and a sharded prefix with samples of its prompts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers
from tiny_models import PROMPT
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tatten.integrations.transformers import SharedPrefixCache, cache_kwargs

NEW, N = 5, 2  # new tokens, and samples of each prompt


def generate(model: transformers.PreTrainedModel, ids: Tensor, mask: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Tokens, and the logits of all steps."""
    torch.manual_seed(0)
    kwargs = {"max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True} | kwargs
    out = model.generate(ids, attention_mask=mask, **kwargs)
    return out.sequences, torch.stack(out.logits)


def one_dim() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("kv",))


def forked(model: transformers.PreTrainedModel, ids: Tensor, mask: Tensor, mesh: DeviceMesh) -> SharedPrefixCache:
    """Samples of prompts that were prefilled in two parts."""
    cache = SharedPrefixCache(model.config, mesh=mesh)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for part in (slice(0, 7), slice(7, PROMPT - 1)):
        seen = mask[:, : part.stop]
        model(ids[:, part], attention_mask=seen, position_ids=positions[:, part], **cache_kwargs(cache))
    return cache.fork(N, NEW)
