"""The counterpart of sharded_step.cpp: measures the same step with PyTorch's DDP,
ZeroRedundancyOptimizer or FSDP2 over gloo, with fused AdamW. hsdp2 is FSDP2 with shards inside a host.

    torchrun --nproc-per-node 2 torch_sharded.py ddp|zero|fsdp2|hsdp2 mlp|gpt [steps [layers [width [batch]]]]
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

WARM_UP = 4
VOCABULARY, CONTEXT, HEAD_WIDTH = 256, 64, 64


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_1 = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.project = torch.nn.Linear(width, width)
        self.norm_2 = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        heads = self.qkv(self.norm_1(x)).view(*x.shape[:2], 3, max(x.shape[2] // HEAD_WIDTH, 1), -1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            *heads.permute(2, 0, 3, 1, 4).unbind(0), is_causal=True)
        h = x + self.project(mixed.transpose(1, 2).reshape(x.shape))
        return h + self.down(torch.nn.functional.gelu(self.up(self.norm_2(h))))


class Gpt(torch.nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Embedding(CONTEXT, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, x):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def make_optimizer(way, model):
    if way == "zero":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def main():
    way, name, given = sys.argv[1], sys.argv[2], [int(argument) for argument in sys.argv[3:]]
    steps, layers, width, batch = given + [20, 6, 1024, 64][len(given):]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    is_gpt = name == "gpt"
    model = Gpt(layers, width) if is_gpt else torch.nn.Sequential(*(Layer(width) for _ in range(layers)))
    torch.manual_seed(1 + dist.get_rank())
    if way in ("fsdp2", "hsdp2"):
        num_shards = dist.get_world_size() if way == "fsdp2" else int(os.environ["LOCAL_WORLD_SIZE"])
        num_replicas = dist.get_world_size() // num_shards
        mesh = (dist.device_mesh.init_device_mesh("cpu", (num_shards,)) if num_replicas == 1 else
                dist.device_mesh.init_device_mesh("cpu", (num_replicas, num_shards), mesh_dim_names=("dp", "shard")))
        for unit in model.blocks if is_gpt else model:
            fully_shard(unit, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(way, model)
    x = torch.randint(VOCABULARY, (batch, CONTEXT)) if is_gpt else torch.randn(batch, width)

    def loss_of(output):
        if not is_gpt:
            return (output - 1).pow(2).mean()
        return torch.nn.functional.cross_entropy(output.reshape(-1, VOCABULARY), x.roll(-1, 1).reshape(-1))

    times = []
    for number in range(steps + WARM_UP):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        if number >= WARM_UP:
            times.append((time.perf_counter() - start) * 1000)
    if dist.get_rank() == 0:
        print(json.dumps({"step_ms": statistics.median(times),
                          "step_p99_ms": sorted(times)[len(times) * 99 // 100],
                          "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
