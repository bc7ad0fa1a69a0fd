"""Divides reference.Gpt with parallelize_module of torch.distributed.tensor, and has the functions that its training
needs."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel,
                                               SequenceParallel, parallelize_module)
from torch.nn import functional as F

import reference


class SeparateHeads(nn.Module):
    """Replaces the layer before attention by three layers (query, key, value), which DTensor can divide by heads. A
    chunk of the single layer would not consist of whole heads."""

    def __init__(self, layer):
        super().__init__()
        for name, weight, bias in zip("qkv", layer.weight.chunk(3), layer.bias.chunk(3)):
            part = nn.Linear(weight.shape[1], weight.shape[0])
            part.weight.data.copy_(weight)
            part.bias.data.copy_(bias)
            self.add_module(name, part)

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)


class DividedBlock(nn.Module):
    """A block like reference.Block that computes only the heads of one rank."""

    def __init__(self, block):
        super().__init__()
        self.head_width = block.attn_c_attn.in_features // block.heads
        self.ln_1, self.attn, self.attn_c_proj = block.ln_1, SeparateHeads(block.attn_c_attn), block.attn_c_proj
        self.ln_2, self.mlp_c_fc, self.mlp_c_proj = block.ln_2, block.mlp_c_fc, block.mlp_c_proj

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
                             for part in self.attn(self.ln_1(x)))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attn_c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_c_proj(F.gelu(self.mlp_c_fc(self.ln_2(x)), approximate="tanh"))


class DividedGpt(nn.Module):
    """The layers of a reference.Gpt, whose ranks have parts of the matrices, heads and vocabulary, and under sequence
    parallelism parts of the sequence between them. The logits are a DTensor, for loss_parallel()."""

    loss = staticmethod(reference.Gpt.loss)

    def __init__(self, gpt, mesh, is_sequence_parallel):
        super().__init__()
        self.wte, self.wpe, self.ln_f = gpt.wte, gpt.wpe, gpt.ln_f
        self.enter_head = nn.Identity()  # here DTensor gathers the input of the tied head
        for i in range(gpt.layers):
            self.add_module(f"h_{i}", DividedBlock(getattr(gpt, f"h_{i}")))
        self.layers = gpt.layers
        parallelize_module(self, mesh, plan_of_gpt(is_sequence_parallel))

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for i in range(self.layers):
            x = getattr(self, f"h_{i}")(x)
        return F.linear(self.enter_head(self.ln_f(x)), self.wte.weight)


def plan_of_gpt(is_sequence_parallel):
    outside, positions = (Shard(1), Shard(0)) if is_sequence_parallel else (Replicate(), Replicate())
    to_whole = PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),))
    plan = {"wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
            "wpe": RowwiseParallel(input_layouts=Replicate(), output_layouts=positions),
            "h_*.attn": to_whole,
            "h_*.attn.*": ColwiseParallel(),
            "h_*.attn_c_proj": RowwiseParallel(output_layouts=outside),
            "h_*.mlp_c_fc": ColwiseParallel(input_layouts=outside),
            "h_*.mlp_c_proj": RowwiseParallel(output_layouts=outside),
            "enter_head": to_whole}
    if is_sequence_parallel:
        plan |= {name: SequenceParallel() for name in ("h_*.ln_1", "h_*.ln_2", "ln_f")}
    return plan


def reduce_gradients(model):
    """Sums the gradients of parameters that the ranks have whole. DTensor does this at the first use of a gradient,
    Cadre in backward."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_grad_norm_(model, max_norm):
    """Clips as torch.nn.utils does, which does not accept a mixture of DTensors and tensors."""
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = torch.stack([whole(gradient).norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
