"""The peer of ddp_step.cpp: the same three medians with PyTorch's DDP over gloo.

    torchrun --nproc-per-node 2 torch_ddp.py [steps [layers [width [batch]]]]
"""

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist


def make_mlp(layers, width):
    parts = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts)


def median_ms(steps, step):
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


def main():
    given = [int(argument) for argument in sys.argv[1:]]
    steps, layers, width, batch = given + [20, 6, 1024, 64][len(given):]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    plain, wrapped = make_mlp(layers, width), make_mlp(layers, width)
    model = torch.nn.parallel.DistributedDataParallel(wrapped, gradient_as_bucket_view=True)
    plain.load_state_dict(wrapped.state_dict())
    x = torch.randn(batch, width)

    def local_step():
        plain.zero_grad()
        plain(x).pow(2).mean().backward()

    def ddp_step():
        wrapped.zero_grad()
        model(x).pow(2).mean().backward()

    for _ in range(4):
        local_step()
        ddp_step()
    dist.barrier()
    alone = median_ms(steps, local_step) if rank == 0 else 0
    dist.barrier()
    together = median_ms(steps, local_step)
    dist.barrier()
    ddp = median_ms(steps, ddp_step)
    if rank == 0:
        print(json.dumps({"alone_ms": alone, "together_ms": together, "ddp_ms": ddp}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
