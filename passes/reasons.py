"""Reasons why attention stays as it is, each with a code for counters and reports, and advice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(str, Enum):
    """Codes of declines. `help` advises users what they can do."""

    help: str

    def __new__(cls, code: str, help: str) -> Reason:
        member = str.__new__(cls, code)
        member._value_ = code
        member.help = help
        return member

    ARGUMENTS = "arguments", "call F.scaled_dot_product_attention with plain tensors and literal flags"
    PLACEMENT = (
        "placement",
        "shard keys, values and the mask's columns over the sequence, and replicate the query over those mesh dims",
    )
    REQUIRES_GRAD = "requires_grad", "run decoding under torch.no_grad() or torch.inference_mode()"
    DROPOUT = "dropout", "decode with model.eval(), so that dropout_p is 0.0"
    IS_CAUSAL = (
        "is_causal",
        "nothing for a prefill, which PyTorch does well; where there are more keys than queries pass a mask, since "
        "is_causal=True aligns the triangle to the top left",
    )
    Q_LEN = (
        "q_len",
        "nothing for a prefill or a long chunk, which PyTorch does well; raise options['max_q_len'] to include it",
    )
    Q_LEN_DYNAMIC = (
        "q_len_dynamic",
        "decode with a fixed number of queries per step, or with a bound, such as torch._check(tokens.shape[1] <= 16)",
    )
    EMPTY = "empty", "nothing: there is no attention to compute"
    NESTED = "nested", "decode without torch.utils.checkpoint and other higher-order operators around attention"
    RANK = "rank", "pass 4-D tensors [batch, heads, length, head_dim]"
    DTYPE = "dtype", "use float16, bfloat16, float32 or float64, the same for query, key and value"
    DEVICE = "device", "put query, key, value and mask on one device, a CPU or a CUDA GPU"
    HEADS = "heads", "give key and value the same number of heads, a divisor of the number of query heads"
    BATCH = "batch", "give key and value the batch size of the query, or both a batch of one"
    SEGMENTS = "segments", "expand and concatenate key and value in the same way"
    SMALL = "small", "nothing: with so little to read, another kernel would cost more than it saves"
    HEAD_DIM = "head_dim", "give query and key the same head_dim; on CUDA, a constant that the kernel takes"
    KV_LENGTH = "kv_length", "give key and value the same length"
    MASK_SHAPE = "mask_shape", "use a mask that broadcasts to [batch, q_heads, q_length, kv_length]"
    MASK_DTYPE = (
        "mask_dtype",
        "use a bool mask, or an additive one in float32 or the query's dtype; autocast by `with torch.autocast(...)`",
    )
    UNBACKED = (
        "unbacked",
        "tell the compiler that the size is at least 2 (torch._check(size >= 2)), or mark it by mark_dynamic in place "
        "of mark_unbacked: whether a mask broadcasts is asked when the graph is captured",
    )
    SCALE = (
        "scale",
        "give scales and soft caps as floats that are finite and not 0, and known when the graph is captured",
    )
    WRITTEN = (
        "written_between",
        "repeat, expand and concatenate after the cache is written, not before; don't reshape it in place",
    )
    PROJECTION = (
        "projection",
        "project latents by one nn.Linear without bias whose weight is a parameter as it is: merge LoRA into it "
        "(merge_and_unload of PEFT), and leave it unquantised",
    )
    PIECES = (
        "pieces",
        "put keys together of one piece that each head has for itself and one that all heads share, side by side: "
        "torch.cat((own, shared.expand(-1, heads, -1, -1)), dim=-1)",
    )
    PROJECTION_USED = (
        "projection_used",
        "cache the latents, not the keys and values that are projected from them; use those for one attention alone",
    )
    LATENT_SMALL = "latent_small", "nothing: with so little to project, attending to latents would cost more"
    DEQUANTISED = (
        "dequantised",
        "keep keys and values both in float8_e4m3fn or both in int8, with one scale per tensor, head or token, and "
        "pass `x.to(dtype) * scale` to attention as it is",
    )
    PAGES = (
        "pages",
        "gather keys and values by one integer table `[batch, max_pages]` from pools `[pages, page, kv_heads, "
        "head_dim]` of their dtype, with 1, 2, 4, ... or 256 keys in a page, and flatten the pages: "
        "`pool[table].flatten(1, 2)`",
    )
    PAGES_USED = (
        "pages_used",
        "let nothing but one call of attention read keys and values that are gathered through a block table: the op "
        "never has them in memory",
    )
    PICKS = (
        "picks",
        "keep the indices of a top-k as they are, scatter one value to them in a new tensor, and join it with other "
        "masks by `&` or `masked_fill`",
    )
    INDEX_SCORES = (
        "index_scores",
        "score index keys in float32 by `w @ relu(q @ k.T * c)`: products, relu, numbers above 0 and a sum over heads, "
        "with keys `[batch, length, dim]` that all index heads share",
    )
    INDEX_USED = (
        "index_used",
        "let nothing but the weighted sum read an indexer's products: the op never has them in memory",
    )
    INDEX_SMALL = "index_small", "nothing: with so few index keys, a call of the op would cost more than it saves"
    BATCH_INVARIANT = (
        "batch_invariant",
        "leave options['batch_invariant'] out, keep soft caps on a GPU, and concatenate each sequence's own keys last",
    )
    NO_GAIN = "no_gain", "nothing: as it is compiled, attention already reads each key and value once"
    WEIGHTS_USED = (
        "weights_used",
        "let nothing but the product with values read scores or weights (output_attentions=False, for one): the ops "
        "never have them in memory",
    )
    IN_PLACE = (
        "in_place",
        "compute weights without ops that change scores in place, or call F.scaled_dot_product_attention",
    )
    RELATIVE = (
        "relative",
        "do no more to scores than to multiply them by a number, to cap them, to add masks and position biases that "
        "don't depend on them, and to join one column of sinks that is dropped again: the ops know no other form",
    )
    MASK_VALUE = "mask_value", "replace the scores of masked keys by torch.finfo(dtype).min of a wide dtype, or by -inf"
    NO_SDPA = (
        "no_sdpa",
        "use F.scaled_dot_product_attention; with transformers, attn_implementation='sdpa' where the model supports "
        "it; call tatten.rewrite before run_decompositions, which takes SDPA apart",
    )
    BEYOND_SDPA = (
        "beyond_sdpa",
        "call tatten.decode_attention(softcap=, sinks=), since SDPA has neither; with transformers, from a function "
        "given to AttentionInterface.register",
    )
    FLEX_ATTENTION = (
        "flex_attention",
        "use F.scaled_dot_product_attention with a mask tensor, or for a soft cap or sinks "
        "tatten.decode_attention(softcap=, sinks=); with transformers, attn_implementation='sdpa' where the model "
        "supports it",
    )
    TORCH_FUNC = (
        "torch_func",
        "call attention outside torch.vmap, torch.func.grad and other transforms of torch.func; instead of vmap, merge "
        "the mapped dim with the batch",
    )
    STREAMS = "streams", "decode in one stream, or compile the part of each stream by itself"
    INTERNAL = (
        "internal",
        "nothing in your program: tatten itself failed and left attention as it was; please open an issue of tatten "
        "with this report",
    )
    MULTIHEAD = (
        "multihead",
        "project with nn.Linear and call F.scaled_dot_product_attention on the heads; nn.MultiheadAttention has no "
        "cache of keys and values",
    )


# Reasons for attention that isn't an SDPA call.
OTHER_ATTENTION = {Reason.NO_SDPA, Reason.BEYOND_SDPA, Reason.FLEX_ATTENTION, Reason.MULTIHEAD}


@dataclass(frozen=True)
class Decline:
    """A reason, and its detail for one call."""

    reason: Reason
    detail: str
