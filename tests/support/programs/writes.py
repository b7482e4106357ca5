"""Every way to write to a tensor: in place, through views and aliases, by `out=`, by functions that hold buffers.

They are continuous in what is stored: a rounding of attention's result is not blown up by a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

from programs.builder import Builder

WRITES: Sequence[str] = (
    "{x}.mul_(0.5)",
    "{x}.add_(1.0)",
    "{x} += 0.25",
    "{x} *= 0.5",
    "{x}.zero_()",
    "{x}.fill_(0.5)",
    "{x}[0] = 0.25",
    "{x}[..., 1:2] = 0.75",
    "{x}[..., -1] *= 2.0",
    "{x}[:, :1].fill_(0.125)",
    "{x}[{x}.size(0) - 1].neg_()",
    "{x}.__setitem__(0, 0.5)",
    "{x}.__imul__(0.5)",
    "{x}.copy_({x}.flip(0))",
    "{x}.copy_(torch.zeros_like({x}))",
    "{x}.narrow(-1, 0, 1).copy_({x}.narrow(-1, 1, 1))",
    "{x}.index_copy_(0, torch.tensor([0]), {x}[:1] * 2)",
    "{x}.index_fill_(0, torch.tensor([0]), 0.5)",
    "{x}.index_add_(0, torch.tensor([0]), {x}[:1])",
    "{x}.index_put_((torch.tensor([0]),), {x}[:1] * 0.5)",
    "{x}.index_put_((torch.tensor([0]),), {x}[:1], accumulate=True)",
    "{x}.scatter_(-1, torch.zeros_like({x}[..., :1], dtype=torch.int64), 0.5)",
    "{x}.scatter_add_(-1, torch.zeros_like({x}, dtype=torch.int64), {x}.clone())",
    "{x}.masked_fill_(torch.arange({x}.size(-1)) % 2 == 0, 0.5)",
    "{x}.masked_scatter_(torch.ones_like({x}, dtype=torch.bool), {x}.flip(0).contiguous())",
    "{x}[torch.arange({x}.size(-1)).expand({x}.shape) % 3 == 0] = 0.5",
    "{x}.clamp_(-0.5, 0.5)",
    "{x}.lerp_(torch.zeros_like({x}), 0.5)",
    "{x}.addcmul_({x}, {x})",
    "{x}.relu_()",
    "{x}.detach().mul_(0.5)",
    "{x}.data.mul_(0.5)",
    "{x}.view(-1)[2:].mul_(2)",
    "{x}.flatten()[1:].fill_(0.5)",  # a copy or a view
    "{x}.transpose(0, 1).mul_(0.5)",
    "{x}.unsqueeze(0).squeeze(0).add_(0.5)",
    "{x}.unbind(0)[0].mul_(0.5)",
    "{x}.split(1)[0].mul_(0.5)",
    "{x}.chunk(2)[0].add_(0.5)",
    "{x}.diagonal().fill_(0.5)",
    "{x}.expand_as({x}).mul_(0.5)",
    "{x}[:][:].movedim(0, -1).mul_(0.25)",
    "{x}.as_strided((1,), (1,), {x}.storage_offset()).fill_(3.0)",
    "torch.mul({x}, 2.0, out={x})",
    "torch.add({x}.flip(0), 1.0, out={x})",
    "torch.clamp({x}, -1.0, 1.0, out={x})",
    "torch.cat([{x}.flip(0)], out={x})",
    "torch.cat([{x}[:1] * 2, {x}[1:] * 0.5], dim=0, out={x})",
    "torch.stack([y * 2 for y in {x}], out={x})",
    "torch.stack(tensors=[y.clone() for y in {x}.flip(0)], dim=0, out={x})",
    "torch.index_select({x} * 2, 0, torch.arange({x}.size(0)).flip(0), out={x})",
    "torch.where(torch.arange({x}.size(-1)) % 2 == 0, {x} * 0.5, 1.0, out={x})",
    "torch.full({x}.shape, 0.5, out={x})",
    "torch.ones({x}.shape, out={x})",
    "torch.relu_({x})",
    "torch.fill_({x}, 0.5)",
    "torch.ops.aten.mul_.Tensor({x}, torch.tensor(0.5, dtype={x}.dtype))",
    "torch.ops.aten.copy_({x}, {x} * 2)",
    "torch.ops.aten.mul.out({x}, torch.tensor(0.5, dtype={x}.dtype), out={x})",
    "torch._foreach_add_([{x}], 1.0)",
    "torch._foreach_mul_([{x}, {x}.clone()], 0.5)",
    "torch._foreach_copy_([{x}], [{x}.flip(0)])",
    "torch.nn.init.constant_({x}, 0.5)",
    "F.relu({x}, inplace=True)",
    "F.relu({x}, True)",
    "F.leaky_relu({x}, 0.1, True)",
    "F.hardtanh({x}, -0.5, 0.5, inplace=True)",
    "F.dropout({x}, 0.0, True, True)",
    "F.embedding(torch.tensor([0, 1]), {x}.view(-1, {x}.size(-1)), max_norm=0.5)",
    "F.embedding(torch.tensor([0]), {x}.view(-1, {x}.size(-1)), None, 0.5)",
    "F.embedding_bag(torch.tensor([[0, 1]]), {x}.view(-1, {x}.size(-1)), max_norm=0.5)",
    "F.batch_norm(torch.arange(2.0 * {x}.numel()).view(2, -1).to({x}.dtype), {x}.view(-1), None, training=True)",
    "F.batch_norm(torch.arange(2.0 * {x}.numel()).view(2, -1).to({x}.dtype), {x}.view(-1),"
    " torch.ones_like({x}.view(-1)), None, None, True)",
    "F.instance_norm(torch.arange(3.0 * {x}.numel()).view(1, -1, 3).to({x}.dtype), {x}.view(-1),"
    " torch.ones_like({x}.view(-1)))",
    "torch.batch_norm(torch.arange(2.0 * {x}.numel()).view(2, -1).to({x}.dtype), None, None, {x}.view(-1),"
    " torch.ones_like({x}.view(-1)), True, 0.1, 1e-5, False)",
    "{x}.numpy().fill(0.5)",
    "{x}.numpy()[..., 0] = 0.5",
    "torch.from_numpy({x}.numpy()).mul_(0.5)",
    "custom_scale_({x}, 0.5)",
    "custom_index_copy({x}, {x}[:1] * 2)",
    "torch.ops.fuzz.scale_({x}, 2.0)",
    "torch.ops.fuzz.index_copy.default(x={x}, y={x}[:1] * 2)",
    "fill({x}, 0.5)",
    "{x}.set_({x}.clone())",
    "setattr({x}, 'data', {x} * 2)",
    "moved = {x}.roll(-1, dims=-2)\nmoved[:, :, torch.tensor([-1])] = {x}[:, :, :1] * 0.5\n{x}.copy_(moved)",
)
# What changes a tensor's sizes or strides and not what it holds.
RESHAPED_IN_PLACE: Sequence[str] = (
    "{x}.unsqueeze_(0).squeeze_(0)",
    "{x}.transpose_(0, 1).transpose_(0, 1)",
    "{x}.transpose_(1, 2)",
    "{x}.swapaxes_(0, 1)",
)
MASK_WRITES: Sequence[str] = (
    "{x}[..., 0] = {x}[..., 1]",
    "{x}[..., -1] = {x}[..., 0]",
    "{x}.copy_({x}.flip(-1))",
    "torch.index_select({x}.clone(), -1, torch.arange({x}.size(-1)).flip(0), out={x})",
    "{x}[..., :1].copy_({x}[..., -1:])",
    "custom_index_copy({x}, {x}[:1].flip(-1))",
)


def write(b: Builder, among: Sequence[str] = ()) -> None:
    """Write to one of these tensors, or to any that the program has, maybe through another name for it."""
    names = [name for name in among or b.tensors if b.tensor(name).dim() and b.tensor(name).dtype.is_floating_point]
    if not names:
        return
    x = b.pick(names[::-1])  # shrinks towards the latest
    if b.chance(15):
        x = (
            b.let(
                "alias", f"{x}{b.pick(['[:]', '.detach()', '.transpose(0, 1)', '.view(-1)', '[0]', '.unsqueeze(0)'])}"
            )
            or x
        )
    templates = RESHAPED_IN_PLACE if b.chance(3) else WRITES
    b.step(b.pick(templates).format(x=x))


def write_mask(b: Builder, mask: str) -> None:
    b.step(b.pick(MASK_WRITES).format(x=mask))
