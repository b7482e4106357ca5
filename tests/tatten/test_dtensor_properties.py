"""SDPA over random sharded DTensors on several gloo ranks, eager and compiled: what float64 has, or a documented error.

`TATTEN_FUZZ_N` is the number of programs for each number of ranks, `TATTEN_FUZZ_SEED` draws others. What fails is
printed as `programs=[Program(...)]`; `run_ranks(ranks, run, [Program(...)])` runs it again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tatten

SEED = int(os.environ.get("TATTEN_FUZZ_SEED", "0"))
PROGRAMS = int(os.environ.get("TATTEN_FUZZ_N", "8"))
AT_ONCE = 4  # programs that share the start of the ranks, which takes longer than most of them

COMPILED = "eager", "aot_eager"


@dataclass(frozen=True)
class Program:
    """One call of SDPA; `seed` fills its tensors.

    Attributes:
        mask: "none", "bool", "bias", or what the bias has besides: "-inf" or "floor", the dtype's least number.
        mask_dims: its shape, as letters of the scores' `BHLS`, or 1.
        cut: whether the mask is replicated, and each rank takes its part; it can't from what is sharded inside.
        holes: whether nobody sees the last keys of each rank, which hold NaN.
        outer, inner: placement of all tensors on a mesh dim of size 1 before, or after, that of the sequence.
        mode: "plain" is eager mode; "eager" and "aot_eager" are the inner compilers.
        inference: inference mode, which hands the call on in one piece, rather than `no_grad`.
    """

    batch: int
    kv_heads: int
    group: int
    q_len: int
    length: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    mask: str
    mask_dims: str
    cut: bool
    holes: bool
    outer: int | None
    inner: int | None
    mode: str
    inference: bool
    dynamic: bool | None
    seed: int

    @property
    def has_kernel(self) -> bool:
        """True if PyTorch has a fused kernel for it on a CPU."""
        return self.head_dim == self.value_dim and (self.mask == "none" or len(self.mask_dims) in (2, 4))

    def tensors(self, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query, key, value and mask, without the holes' NaN."""
        rng = torch.Generator().manual_seed(self.seed)
        sizes = {"B": self.batch, "H": self.kv_heads * self.group, "L": self.q_len, "S": self.length, "1": 1}
        query, key, value = (
            torch.randn(shape, generator=rng, dtype=torch.float64).to(self.dtype)
            for shape in (
                (self.batch, sizes["H"], self.q_len, self.head_dim),
                (self.batch, self.kv_heads, self.length, self.head_dim),
                (self.batch, self.kv_heads, self.length, self.value_dim),
            )
        )
        if self.mask == "none":
            return query, key, value, None
        shape = [sizes[letter] for letter in self.mask_dims]
        seen = torch.rand(shape, generator=rng) < 0.6
        if self.holes:
            seen &= ~self.hole(ranks)
        if self.mask == "bool":
            return query, key, value, seen
        bias = torch.randn(shape, generator=rng, dtype=torch.float64).to(self.dtype)
        if self.mask == "-inf":
            bias = bias.masked_fill(~seen, -math.inf)
        if self.mask == "floor":  # but for one key in each row
            seen.scatter_(-1, torch.randint(shape[-1], (*shape[:-1], 1), generator=rng), True)
            bias = bias.masked_fill(~seen, torch.finfo(self.dtype).min)
        return query, key, value, bias

    def hole(self, ranks: int) -> Tensor:
        """Which keys are unused: the last third of each rank's, and all of the last rank's."""
        each = math.ceil(self.length / ranks)
        place = torch.arange(self.length)
        return (place % each >= each - each // 3) | (place >= each * (ranks - 1))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    head_dim = draw(st.sampled_from([8, 4, 1]))
    mask = draw(st.sampled_from(["none", "bool", "bias", "-inf", "floor"]))
    last = draw(st.sampled_from(["S", "S", "S", "1"]))
    dims = "".join(draw(st.sampled_from([letter, "1"])) for letter in "BHL") + last
    program = Program(
        batch=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        q_len=draw(st.integers(1, 4)),
        length=draw(st.integers(1, 14)),
        head_dim=head_dim,
        value_dim=draw(st.sampled_from([head_dim, head_dim, 3])),
        dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
        mask=mask,
        mask_dims=dims[draw(st.integers(0, 2)) :],
        cut=draw(st.booleans()),
        holes=mask in ("bool", "-inf") and last == "S" and draw(st.booleans()),
        outer=draw(st.sampled_from([None, -1, 0, 1, 2])),
        inner=draw(st.sampled_from([None, -1, 0, 1, 2])),
        mode=draw(st.sampled_from([*["plain"] * 8, *COMPILED])),
        inference=draw(st.booleans()),
        dynamic=draw(st.sampled_from([None, True])),
        seed=draw(st.integers(0, 2**31)),
    )
    if program.mode in COMPILED or not (program.has_kernel or program.inference):
        # PyTorch's rules are asked for the pieces of such calls: on more mesh dims slow, and some are missing.
        program = dataclasses.replace(program, outer=None, inner=None)
    return program


def run(batch: list[Program]) -> list[tuple[Program, str, bytes]]:
    """Return the error of each program on this rank, and the bits of its result."""
    tatten.enable_dtensor_sdpa()
    return [(program, *answer(program)) for program in batch]


def answer(program: Program) -> tuple[str, bytes]:
    ranks = dist.get_world_size()
    query, key, value, mask = program.tensors(ranks)
    want = in_float64(query, key, value, mask)
    if program.holes:
        key, value = (x.masked_fill(program.hole(ranks)[:, None], math.nan) for x in (key, value))
    mesh = mesh_of(program.outer is not None, program.inner is not None)

    def place(x: Tensor, over_sequence: Placement, *dims: int) -> DTensor:
        """`dims`: those that the mesh dims of size 1 may shard."""
        outer, inner = (
            [] if dim is None else [Shard(dim) if dim in dims else Replicate()]
            for dim in (program.outer, program.inner)
        )
        return distribute_tensor(x, mesh, [*outer, over_sequence, *inner])

    q, k, v = place(query, Replicate(), 0, 1), place(key, Shard(2), 0, 1, 2), place(value, Shard(2), 0, 1, 2)
    m = None
    if mask is not None:
        whole = program.cut or program.outer == 2 or mask.shape[-1] != program.length
        m = place(mask, Replicate() if whole else Shard(mask.dim() - 1))
    fn = attend
    if program.mode in COMPILED:
        torch._dynamo.reset()
        fn = torch.compile(attend, backend="tatten", dynamic=program.dynamic, options={"inner": program.mode})
    try:
        with torch.inference_mode(program.inference):
            out = fn(q, k, v, m)
    except (NotImplementedError, torch._dynamo.exc.TorchDynamoException) as error:
        # A dynamic q_len above 1 is declined, as `q_len_dynamic`.
        merged = program.inference if program.mode == "plain" else not (program.dynamic and program.q_len > 1)
        documented = not (merged or program.has_kernel) and "torch.inference_mode()" in str(error)
        return "" if documented else f"raised {error}", b""
    if out.placements != q.placements:
        return f"placed {out.placements}", b""
    local = out.to_local()
    error = (local.double() - want).abs().max().item()
    # A weight, the products and each state of a merge are rounded; weights sum up to 1.
    bound = 16 * torch.finfo(program.dtype).eps * max(1.0, value.nan_to_num().abs().max().item())
    bits = local.contiguous().view(torch.uint8).numpy().tobytes()
    return "" if error <= bound else f"is {error:.3g} off, {bound:.3g} allowed", bits


@functools.cache
def mesh_of(outer: bool, inner: bool) -> DeviceMesh:
    return init_device_mesh("cpu", (*[1] * outer, dist.get_world_size(), *[1] * inner))


def attend(query: DTensor, key: DTensor, value: DTensor, mask: DTensor | None) -> DTensor:
    out = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    assert isinstance(out, DTensor)
    return out


def in_float64(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    bias = mask if mask is None or mask.dtype == torch.bool else mask.double()
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query.double(), key.double(), value.double(), bias, enable_gqa=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@seed(SEED)
@settings(
    max_examples=1 + math.ceil(PROGRAMS / AT_ONCE),  # the first is the simplest there is
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
@given(batch=st.lists(programs(), min_size=1, max_size=AT_ONCE))
def test_random_programs(ranks: int, batch: list[Program]) -> None:
    for results in zip(*run_ranks(ranks, run, batch), strict=True):
        program = results[0][0]
        said = [wrong for _, wrong, _ in results]
        assert not any(said), f"{program}: {said}"
        assert len({bits for _, _, bits in results}) == 1, f"{program}: ranks differ"
