"""A script that compiles calls of the ops for a made-up H200, and prints the code that Inductor generates.

It is run by `compile_in_subprocess`, in an interpreter of its own.
"""

import json
import logging
import sys

import fake_h200

fake_h200.install()  # before torch is imported

import torch  # noqa: E402

from tatten.ops.inductor import lowering  # noqa: E402
from tatten.ops.inductor.custom_pass import with_lowerings  # noqa: E402
from tatten.ops.inductor.lowering import register_lowerings  # noqa: E402

counted = []
ops, bf16 = torch.ops.tatten, torch.bfloat16
Q, KV, MASK = ((2, 32, 1, 128), bf16), ((2, 8, 4096, 128), bf16), ((2, 1, 1, 4096), torch.bool)


def two_layers(q, k, v, mask):
    blocks = ops.block_mask.default(mask)
    a, _ = ops.decode_attention.default(q, k, v, mask, None, 0.1, blocks)
    b, _ = ops.decode_attention.default(a * 2, k, v, mask, None, 0.1, blocks)
    return b + 1


def layers_of_one_length(q, k, v, counted):
    lens = (counted.view(2, 1) + 1).view(2)
    a, _ = ops.decode_attention.default(q, k, v, None, lens, 0.1)
    return ops.decode_attention.default(a, k, v, None, lens, 0.1)[0]


def layers_of_first_keys(q, k, v):
    k = (k * 2).narrow(2, 0, 64)
    a, _ = ops.decode_attention.default(q, k, v.narrow(2, 0, 64))
    return ops.decode_attention.default(a, k, v.narrow(2, 0, 64))[0]


def views(x, packed, k, v):
    a, _ = ops.decode_attention.default(x.view(2, 1, 32, 128).transpose(1, 2), k, v)
    own = packed.narrow(2, 0, 4096).view(2, 1, 32, 128).transpose(1, 2)
    b, _ = ops.decode_attention.default(own, k, v)
    return a, b, ops.decode_attention.default(packed.narrow(2, 2048, 4096).view(2, 1, 32, 128).transpose(1, 2), k, v)[0]


def invariant(q, k, v, mask):
    return ops.decode_attention.default(q, k, v, mask, batch_invariant=True)[0]


def segments(q, k, v, k2, v2):
    # Tensors that only one of the launches reads, and that nothing needs afterwards.
    out, _ = ops.bifurcated_attention.default(q, [k + 1, k2 + 1], [v + 1, v2 + 1], [None, None], [None, None], 0.1)
    return out * 3


def capped_segments(q, sinks, k, v, k2, v2):
    given = {"softcap": 30.0, "sinks": sinks}
    return ops.bifurcated_attention.default(q, [k, k2], [v, v2], [None] * 2, [None] * 2, 0.1, **given)[0]


def windowed_segments(q, k, v, k2, v2):
    return ops.bifurcated_attention.default(q, [k, k2], [v, v2], [None] * 2, [None] * 2, 0.1, window=400)[0]


def masked_segments(q, mask, *kv):
    # Only the first launch after it reads the block list.
    return ops.bifurcated_attention.default(q, kv[::2], kv[1::2], [mask, None, None], [None] * 3, 0.1)[0]


def merge(out, lse):
    return ops.merge_states.default(out, lse)


def plain(q, k, v):
    return ops.decode_attention.default(q, k, v)[0]


def rows(index, q, k, v, k2, v2):
    groups = ops.row_groups.default(index, 3, 1)
    return ops.bifurcated_attention.default(q, [k, k2], [v, v2], [None] * 2, [None] * 2, 0.1, [groups, None])[0]


def shared(q, k, v, k2, v2):
    return ops.bifurcated_attention.default(q, [k, k2], [v, v2], [None] * 2, [None] * 2, 0.1)[0]


def cudnn(q, k, v):
    return ops.decode_attention.default(q, k, v, provider="cudnn")[0]


def latents(q, q_rope, c, k_rope):
    return ops.latent_attention.default(q, q_rope, c, k_rope, scale=0.1)[0]


def views_of_latents(q, q_rope, packed):
    # The second one begins at an odd number: whether it is aligned depends on where memory is.
    def attend(q, latent, k_rope):
        return ops.latent_attention.default(q, q_rope, latent, k_rope, scale=0.1)[0]

    latent, k_rope = packed.narrow(3, 0, 512), packed.narrow(3, 512, 64)
    return attend(q.narrow(3, 64, 512), latent, k_rope), attend(q.narrow(3, 1, 512), latent, k_rope)


def latent_layers(q, q_rope, c, k_rope, mask):
    blocks = ops.block_mask.default(mask)
    for _ in range(2):
        q = ops.latent_attention.default(q, q_rope, c, k_rope, mask, None, scale=0.1, block_mask=blocks)[0] * 2
    return q


def keys_as_values(q, k, k2):
    return ops.bifurcated_attention.default(q, [k, k2], [k, k2], [None] * 2, [None] * 2, 0.1)[0]


def latents_within(first, keys, last, q, q_rope, k_rope):
    # Inductor has the latents where the concatenation has them, 8 bytes behind a multiple of 16.
    latent = keys.sum(1, dtype=bf16)
    everything = torch.cat([first * 1, latent, last + 1])
    q = q + everything.sum()
    return ops.latent_attention.default(q, q_rope, latent.view(1, 1, 512, 512), k_rope, scale=0.1)[0], everything


def masked_latents(q, q_rope, c, k_rope, mask):
    return ops.latent_attention.default(q, q_rope, c, k_rope, mask, scale=0.1)[0]


def picks(q, k, v, mask, indices):
    return ops.decode_attention.default(q, k, v, mask, indices=indices, index_block=128)[0] * 2


def pages(q, kv, table, lens):
    key, value = kv.unbind(1)
    given = {"kv_lens": lens, "block_table": table}
    a, _ = ops.decode_attention.default(q, key, value, **given)
    return ops.decode_attention.default(a * 2, key, value, window=100, **given)[0]


def many_pages(q, kv, table, lens):
    return ops.decode_attention.default(q, *kv.unbind(1), kv_lens=lens, block_table=table)[0]


def attend_to_mixed(softcap, q, kv, table, starts, lens):
    key, value = kv.unbind(1)
    a, _ = ops.paged_attention.default(q, key, value, table, starts, lens, softcap=softcap)
    return ops.paged_attention.default(a * 2, key, value, table, starts, lens, window=100, softcap=softcap)[0]


def attend_to_shared_mixed(softcap, q, kv, table, starts, lens):
    key, value = kv.unbind(1)
    given = {"softcap": softcap, "shared_pages": ops.shared_pages.default(table, lens, 600, 16, 1)}
    a, _ = ops.paged_attention.default(q, key, value, table, starts, lens, **given)
    return ops.paged_attention.default(a * 2, key, value, table, starts, lens, **given)[0]


def mixed_shared(q, kv, table, starts, lens):
    return attend_to_shared_mixed(5.0, q, kv, table, starts, lens)


def mixed_shared_on_hopper(q, kv, table, starts, lens):
    return attend_to_shared_mixed(None, q, kv, table, starts, lens)


def mixed(q, kv, table, starts, lens):
    return attend_to_mixed(5.0, q, kv, table, starts, lens)  # no kernel in Gluon takes a soft cap


def mixed_on_hopper(q, kv, table, starts, lens):
    return attend_to_mixed(None, q, kv, table, starts, lens)


def paged_latents(q, q_rope, pool, table, lens):
    latent, key_rope = pool.split((512, 64), dim=3)
    given = {"kv_lens": lens, "scale": 0.1, "block_table": table}
    return ops.latent_attention.default(q, q_rope, latent, key_rope, **given)[0] * 2


def attend_to_shared(softcap, q, kv, table, lens):
    key, value = kv.unbind(1)
    given = {"kv_lens": lens, "block_table": table, "shared_pages": ops.shared_pages.default(table, lens, 600, 16, 1)}
    given["softcap"] = softcap
    a, _ = ops.decode_attention.default(q, key, value, **given)
    return ops.decode_attention.default(a * 2, key, value, **given)[0]


def shared_pages(q, kv, table, lens):
    return attend_to_shared(5.0, q, kv, table, lens)


def shared_pages_on_hopper(q, kv, table, lens):
    return attend_to_shared(None, q, kv, table, lens)


def picked_latents(q, q_rope, c, k_rope, mask, indices):
    return ops.latent_attention.default(q, q_rope, c, k_rope, mask, scale=0.1, indices=indices)[0] * 2


def project(sums, weight):
    return ops.project_heads.default(sums * 2, weight.narrow(1, 128, 128))


def index_scores(q, keys, weights, mask):
    return ops.index_scores.default(q * 2, keys, weights, scale=0.1, attn_mask=mask).topk(64).indices


def selection(scores):
    return ops.top_picks.default(scores * 2, 2048)


def stored_and_read(new, cache, at):
    # Inductor writes the copy in place.
    cache = torch.ops.aten.index_copy.default(cache * 2, 2, at, new)
    return cache, cache.float() * 3


def counters(x, *counts):
    # As AOTAutograd leaves additions in place: the additions, and then copies.
    return x * 2, *torch.ops.aten._foreach_add.Scalar(counts, 1)


def rotary(q, k, v, cos, sin, key, value, at):
    def rotated(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    key = torch.ops.aten.index_copy.default(key * 2, 2, at, rotated(k))
    value = torch.ops.aten.index_copy.default(value * 2, 2, at, v)
    return ops.decode_attention.default(rotated(q), key, value)[0], key, value


def linears(x, *weights):
    a, b, c = ops.skinny_linear.default(x * 2, weights)
    (d,) = ops.skinny_linear.default(a.squeeze(0), weights[:1], 2, torch.float32)
    return d.sum(0).to(bf16), b, c


def fused_linears(x, norm, *weights):
    """The options of `fused_linear`, one after the other."""
    a, _, _ = ops.fused_linear.default(x * 2, weights[:3], norm_weight=norm, eps=1e-5, prefetch=True)
    (b,) = ops.fused_linear.default(a, weights[:1], residual=x)
    (c,) = ops.fused_linear.default(b, weights[3:], norm_weight=norm, eps=1e-5, gate="silu", prefetch=True)
    return c


def find_rows(n, index):
    return ops.row_groups.default(index, n, 1)


cases = {
    "two layers": (two_layers, [Q, KV, KV, MASK]),
    "layers of one length": (layers_of_one_length, [Q, KV, KV, ((2,), torch.int64)]),
    "layers of first keys": (layers_of_first_keys, [Q, KV, KV]),
    "views": (views, [((2, 1, 4096), bf16), ((2, 1, 6144), bf16), KV, KV]),
    "invariant": (invariant, [Q, KV, KV, MASK]),
    "segments": (segments, [((8, 8, 1, 64), bf16), *[((2, 8, 500, 64), bf16)] * 2, *[((8, 8, 300, 64), bf16)] * 2]),
    "capped segments": (
        capped_segments,
        [((8, 8, 1, 64), bf16), ((8,), bf16), *[((2, 8, 500, 64), bf16)] * 2, *[((8, 8, 300, 64), bf16)] * 2],
    ),
    "windowed segments": (
        windowed_segments,
        [((8, 8, 1, 64), bf16), *[((2, 8, 500, 64), bf16)] * 2, *[((8, 8, 300, 64), bf16)] * 2],
    ),
    "masked segments": (
        masked_segments,
        [
            ((8, 8, 1, 64), bf16),
            ((8, 1, 1, 40), torch.bool),
            *[((8, 8, length, 64), bf16) for length in (40, 40, 300, 300, 200, 200)],
        ],
    ),
    "merge": (merge, [((4, 2, 8, 1, 64), bf16), ((4, 2, 8, 1), torch.float32)]),
    "rows": (
        rows,
        [((7,), torch.int32), ((7, 8, 1, 64), bf16), *[((3, 8, 500, 64), bf16)] * 2, *[((7, 8, 300, 64), bf16)] * 2],
    ),
    "picks": (picks, [Q, KV, KV, MASK, ((2, 8, 1, 8), torch.int32)]),
    "mixed": (
        mixed,
        [
            ((300, 32, 128), bf16),
            ((600, 2, 16, 8, 128), bf16),
            *[(shape, torch.int32) for shape in ((2, 256), (3,), (2,))],
        ],
    ),
    "mixed on Hopper": (
        mixed_on_hopper,
        [
            ((300, 32, 128), bf16),
            ((600, 2, 16, 8, 128), bf16),
            *[(shape, torch.int32) for shape in ((2, 256), (3,), (2,))],
        ],
    ),
    **{
        name: (
            case,
            [
                ((300, 32, 128), bf16),
                ((600, 2, 16, 8, 128), bf16),
                *[(shape, torch.int32) for shape in ((8, 256), (9,), (8,))],
            ],
        )
        for name, case in (("mixed shared", mixed_shared), ("mixed shared on Hopper", mixed_shared_on_hopper))
    },
    "pages": (pages, [Q, ((600, 2, 16, 8, 128), bf16), ((2, 256), torch.int32), ((2,), torch.int32)]),
    **{
        name: (
            case,
            [
                ((64, 32, 1, 128), bf16),
                ((600, 2, 16, 8, 128), bf16),
                ((64, 64), torch.int32),
                ((64,), torch.int32),
            ],
        )
        for name, case in (("many pages", many_pages), ("many shared pages", shared_pages_on_hopper))
    },
    "shared pages of 8/8 heads": (
        shared_pages_on_hopper,
        [((64, 8, 1, 128), bf16), ((600, 2, 16, 8, 128), bf16), ((64, 64), torch.int32), ((64,), torch.int32)],
    ),
    "mixed shared of 8/8 heads": (
        mixed_shared_on_hopper,
        [
            ((300, 8, 128), bf16),
            ((600, 2, 16, 8, 128), bf16),
            *[(shape, torch.int32) for shape in ((64, 64), (65,), (64,))],
        ],
    ),
    "paged latents": (
        paged_latents,
        [
            ((2, 128, 1, 512), bf16),
            ((2, 128, 1, 64), bf16),
            ((600, 64, 1, 576), bf16),
            ((2, 64), torch.int32),
            ((2,), torch.int32),
        ],
    ),
    "shared pages": (
        shared_pages,
        [
            ((8, 32, 1, 128), bf16),
            ((600, 2, 16, 8, 128), bf16),
            ((8, 256), torch.int32),
            ((8,), torch.int32),
        ],
    ),
    "shared pages on Hopper": (
        shared_pages_on_hopper,
        [
            ((8, 32, 1, 128), bf16),
            ((600, 2, 16, 8, 128), bf16),
            ((8, 256), torch.int32),
            ((8,), torch.int32),
        ],
    ),
    "picked latents": (
        picked_latents,
        [
            ((2, 128, 1, 512), bf16),
            ((2, 128, 1, 64), bf16),
            ((2, 1, 8192, 512), bf16),
            ((2, 1, 8192, 64), bf16),
            ((2, 1, 1, 8192), torch.bool),
            ((2, 1, 1, 1024), torch.int32),
        ],
    ),
    "project": (project, [((2, 16, 1, 512), torch.float32), ((16, 256, 512), bf16)]),
    "index scores": (
        index_scores,
        [((2, 1, 64, 128), bf16), ((2, 8192, 128), bf16), ((2, 1, 64), torch.float32), ((2, 1, 8192), torch.bool)],
    ),
    **{
        name: (linears, [((rows, 1, 4096), bf16), *[((n, 4096), bf16) for n in (4096, 1024, 1024)]])
        for name, rows in (("linears", 8), ("linears of one row", 1))
    },
    "fused linears": (
        fused_linears,
        [((1, 1, 512), bf16), ((512,), bf16), *[((n, 512), bf16) for n in (512, 64, 64, 700, 700)]],
    ),
    "symbolic rows": (find_rows, ["n", ((7,), torch.int32)]),
    "symbolic lengths": (plain, [Q, *[((2, 8, "s", 128), bf16)] * 2]),
    "plain": (plain, [Q, KV, KV]),
    "float64": (plain, [(shape, torch.float64) for shape, _ in (Q, KV, KV)]),
    "prefix": (
        shared,
        [((256, 32, 1, 128), bf16), *[((1, 8, 8192, 128), bf16)] * 2, *[((256, 8, 256, 128), bf16)] * 2],
    ),
    "provider": (cudnn, [Q, KV, KV]),
    "wrong": (plain, [Q, ((2, 5, 64, 64), bf16), ((2, 5, 64, 64), bf16)]),
    **{
        f"{heads} heads": (
            latents,
            [
                ((2, heads, 1, 512), bf16),
                ((2, heads, 1, 64), bf16),
                ((2, 1, 4096, 512), bf16),
                ((2, 1, 4096, 64), bf16),
            ],
        )
        for heads in (16, 128)
    },
    "unrounded": (
        latents,
        [((2, 16, 1, 512), torch.float32), ((2, 16, 1, 64), bf16), ((2, 1, 4096, 512), bf16), ((2, 1, 4096, 64), bf16)],
    ),
    "latent layers": (
        latent_layers,
        [
            ((2, 128, 1, 512), bf16),
            ((2, 128, 1, 64), bf16),
            ((2, 1, 4096, 512), bf16),
            ((2, 1, 4096, 64), bf16),
            ((2, 1, 1, 4096), torch.bool),
        ],
    ),
    "latents within": (
        latents_within,
        [
            ((4,), bf16),
            ((512 * 512, 3), bf16),
            ((4,), bf16),
            ((1, 128, 1, 512), bf16),
            ((1, 128, 1, 64), bf16),
            ((1, 1, 512, 64), bf16),
        ],
    ),
    "keys as values": (
        keys_as_values,
        [((256, 32, 1, 128), bf16), ((1, 8, 8192, 128), bf16), ((256, 8, 256, 128), bf16)],
    ),
    "masked latents": (
        masked_latents,
        [
            ((2, 128, 1, 512), bf16),
            ((2, 128, 1, 64), bf16),
            ((2, 1, 4096, 512), bf16),
            ((2, 1, 4096, 64), bf16),
            ((2, 1, 1, 4096), torch.bool),
        ],
    ),
    "views of latents": (
        views_of_latents,
        [((2, 128, 1, 576), bf16), ((2, 128, 1, 64), bf16), ((2, 1, 4096, 576), bf16)],
    ),
    "large": (plain, [((64, 32, 1, 128), bf16), *[((64, 8, 2048, 128), bf16)] * 2]),
    "selection": (selection, [((2, 1, 131072), torch.float32)]),
    "counters": (counters, [((8,), bf16), *[((), torch.int64)] * 2, ((1, 1), torch.int64)]),
    "stored and read": (stored_and_read, [((1, 8, 1, 64), bf16), ((1, 8, 96, 64), bf16), ((1,), torch.int64)]),
    "rotary": (
        rotary,
        [
            ((1, 32, 1, 128), bf16),
            *[((1, 8, 1, 128), bf16)] * 2,
            *[((1, 1, 1, 128), bf16)] * 2,
            *[((1, 8, 1024, 128), bf16)] * 2,
            ((1,), torch.int64),
        ],
    ),
}
said = []


class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())


logging.getLogger("tatten").addHandler(Said())
logging.getLogger("tatten").setLevel(logging.INFO)
generated = []
ahead_of_time = lowering.ahead_of_time
before, runs = json.loads(sys.argv[1])
if before:
    fake_h200.generated_code(*cases[before])
register_lowerings(counted.append)
for case, lowered, options in runs:
    lowering.ahead_of_time = (lambda: True) if options.pop("package", False) else ahead_of_time
    said.clear()
    code = fake_h200.generated_code(*cases[case], **(with_lowerings(options) if lowered else options))
    generated.append([code, [*said]])
print(json.dumps(generated))
