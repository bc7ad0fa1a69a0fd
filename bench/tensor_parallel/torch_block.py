"""The counterpart of `tensor_parallel_step block`: the same block, divided by parallelize_module of
torch.distributed.tensor over gloo.

    torchrun --nproc-per-node 2 torch_block.py [--sequence] [steps [width [tokens]]]
"""

import json
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, SequenceParallel,
                                               parallelize_module)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "tests/parity"))
from dtensor_gpt import reduce_gradients

WARM_UP = 3
MAX_SEQUENCE, HEAD_WIDTH = 1024, 64


class Attention(nn.Module):
    """Orders the output features of qkv by heads, as cadre::SelfAttention does."""

    def __init__(self, width):
        super().__init__()
        self.head_width = width // max(width // HEAD_WIDTH, 2)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_width))
        mixed = nn.functional.scaled_dot_product_attention(
            *(heads.select(3, i).transpose(1, 2) for i in range(3)), is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        h = x + self.attention(self.norm_1(x))
        return h + self.down(nn.functional.gelu(self.up(self.norm_2(h))))


def plan_of(is_sequence_parallel):
    outside = Shard(1) if is_sequence_parallel else Replicate()
    plan = {name: ColwiseParallel(input_layouts=outside) for name in ("attention.qkv", "up")}
    plan |= {name: RowwiseParallel(output_layouts=outside) for name in ("attention.output", "down")}
    if is_sequence_parallel:
        plan |= {name: SequenceParallel() for name in ("norm_1", "norm_2")}
    return plan


def norm_of_gradients(block):
    total = 0.0
    for parameter in block.parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        total += whole.double().square().sum().item()
    return total ** 0.5


def main():
    words = sys.argv[1:]
    is_sequence_parallel = words[:1] == ["--sequence"]
    given = [int(word) for word in words[is_sequence_parallel:]]
    steps, width, tokens = given + [10, 512, 1024][len(given):]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    block = Block(width)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(block, mesh["tp"], plan_of(is_sequence_parallel))
    torch.manual_seed(1)
    length = min(tokens, MAX_SEQUENCE)
    whole = torch.randn(tokens // length, length, width)
    x = whole.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone() if is_sequence_parallel else whole.clone()
    x.requires_grad_()
    times = []
    for number in range(steps + WARM_UP):
        start = time.perf_counter()
        block.zero_grad()
        x.grad = None
        loss = (block(x) - 1).square().sum() / whole.numel()
        loss.backward()
        reduce_gradients(block)
        if number >= WARM_UP:
            times.append((time.perf_counter() - start) * 1000)
    total = loss.detach().double()
    if is_sequence_parallel:
        dist.all_reduce(total)
    norm = norm_of_gradients(block)
    if dist.get_rank() == 0:
        print(json.dumps({"step_ms": statistics.median(times),
                          "step_p99_ms": sorted(times)[len(times) * 99 // 100],
                          "loss": total.item(), "gradient_norm": norm}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
