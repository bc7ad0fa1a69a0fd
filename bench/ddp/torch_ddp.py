"""The counterpart of ddp_step.cpp: measures the same figures with PyTorch's DDP over gloo.

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


def measure(steps, step):
    """Returns (median, 99th percentile) in milliseconds."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times), sorted(times)[len(times) * 99 // 100]


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
    alone = measure(steps, local_step)[0] if rank == 0 else 0
    dist.barrier()
    together = measure(steps, local_step)[0]
    dist.barrier()
    ddp, p99 = measure(steps, ddp_step)
    if rank == 0:
        print(json.dumps({"alone_ms": alone, "together_ms": together, "ddp_ms": ddp,
                          "ddp_p99_ms": p99}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
