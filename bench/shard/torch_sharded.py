"""The peer of sharded_step.cpp: the same step with PyTorch's DDP, ZeroRedundancyOptimizer or FSDP2 over
gloo, with fused AdamW.

    torchrun --nproc-per-node 2 torch_sharded.py ddp|zero|fsdp2 [steps [layers [width [batch]]]]
"""

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

WARM_UP = 4


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))


def make_optimizer(way, model):
    if way == "zero":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def main():
    way, given = sys.argv[1], [int(argument) for argument in sys.argv[2:]]
    steps, layers, width, batch = given + [20, 6, 1024, 64][len(given):]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer(width) for _ in range(layers)))
    torch.manual_seed(1 + dist.get_rank())
    if way == "fsdp2":
        for layer in model:
            fully_shard(layer)
        model = fully_shard(model)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(way, model)
    x = torch.randn(batch, width)
    times = []
    for number in range(steps + WARM_UP):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = (model(x) - 1).pow(2).mean()
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
