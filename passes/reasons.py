"""Why attention was left as it is. Each reason has a code, which counters and reports use, and what would help."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(str, Enum):
    """Codes of declines; `help` says what a user can do about each."""

    help: str

    def __new__(cls, code: str, help: str) -> Reason:
        member = str.__new__(cls, code)
        member._value_ = code
        member.help = help
        return member

    ARGUMENTS = "arguments", "call F.scaled_dot_product_attention with tensors and literal flags"
    PLACEMENT = (
        "placement",
        "shard keys, values and the mask's columns over the sequence, and replicate the query over the same mesh dims",
    )
    REQUIRES_GRAD = "requires_grad", "run decoding under torch.no_grad() or torch.inference_mode()"
    DROPOUT = "dropout", "decode with model.eval(), so that dropout_p is 0.0"
    IS_CAUSAL = "is_causal", "with fewer queries than keys is_causal=True is aligned top left; pass a mask instead"
    Q_LEN = (
        "q_len",
        "this is a prefill or a long chunk, which PyTorch does well; raise options['max_q_len'] to include it",
    )
    Q_LEN_DYNAMIC = "q_len_dynamic", "decode with a static number of queries per step"
    EMPTY = "empty", "nothing: there is no attention to compute"
    NESTED = "nested", "decode without torch.utils.checkpoint and other higher-order operators around attention"
    RANK = "rank", "pass 4-D tensors [batch, heads, length, head_dim]"
    DTYPE = "dtype", "use one of float16, bfloat16, float32, float64 for query, key and value alike"
    DEVICE = "device", "run on a CPU or a CUDA device, with query, key and value on the same one"
    HEADS = "heads", "make the number of kv heads divide the number of query heads, in the same way for key and value"
    BATCH = "batch", "give key and value the batch size of the query, or a batch of one for all"
    SEGMENTS = "segments", "share and concatenate key and value in the same way"
    SMALL = "small", "nothing: for this little work, another kernel would cost more than it saves"
    HEAD_DIM = "head_dim", "give key and query one head_dim"
    KV_LENGTH = "kv_length", "give key and value one length"
    MASK_SHAPE = "mask_shape", "broadcast the mask to [batch, q_heads, q_length, kv_length]"
    MASK_DTYPE = (
        "mask_dtype",
        "use a bool mask, or an additive one in float32 or the query's dtype; for autocast, `with torch.autocast(...)`",
    )
    SCALE = "scale", "pass scale as a float"
    WRITTEN = (
        "written_between",
        "repeat, expand and concatenate after the cache is written, not before; reshape nothing of it in place",
    )
    NO_GAIN = "no_gain", "nothing: SDPA reads every key and value once already"
    NO_SDPA = (
        "no_sdpa",
        "use F.scaled_dot_product_attention; with transformers, attn_implementation='sdpa' where the model supports it",
    )
    BEYOND_SDPA = (
        "beyond_sdpa",
        "call tatten.decode_attention(softcap=, sinks=), which has both, where SDPA has neither; with transformers, "
        "from a function given to AttentionInterface.register",
    )
    FLEX_ATTENTION = (
        "flex_attention",
        "use F.scaled_dot_product_attention with the mask as a tensor, and for a soft cap or sinks "
        "tatten.decode_attention(softcap=, sinks=); with transformers, attn_implementation='sdpa' where the model "
        "supports it",
    )
    MULTIHEAD = (
        "multihead",
        "project with nn.Linear, and call F.scaled_dot_product_attention on the heads; nn.MultiheadAttention keeps no "
        "cache of keys and values",
    )


# Of attention that is no SDPA call.
OTHER_ATTENTION = {Reason.NO_SDPA, Reason.BEYOND_SDPA, Reason.FLEX_ATTENTION, Reason.MULTIHEAD}


@dataclass(frozen=True)
class Decline:
    """One refusal: the code, and what was found at this place."""

    reason: Reason
    detail: str
