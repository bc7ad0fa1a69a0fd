"""The counterpart of cadre_all_reduce.cpp in PyTorch over gloo: the same inputs, barriers, checks and output.

    gloo_all_reduce.py SECONDS BYTES...     (rank and world size: from the environment)
"""

import json
import resource
import sys
import time

import torch
import torch.distributed as dist

MIN_RUNS, MAX_RUNS = 5, 3000


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def time_once(data, fresh, expected):
    data.copy_(fresh)
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(data)
    elapsed = time.perf_counter() - start
    step = max(1, data.numel() // 64)
    assert torch.equal(data[::step], expected[::step]), "the sum is wrong"
    return elapsed * 1e6


def measure(num_bytes, seconds):
    ranks, count = dist.get_world_size(), num_bytes // 4
    pattern = torch.arange(count).remainder(7).float()
    fresh = pattern + (dist.get_rank() + 1)
    expected = pattern * ranks + ranks * (ranks + 1) / 2
    data = torch.empty(count)
    warm_up_start = time.perf_counter()
    for _ in range(3):
        time_once(data, fresh, expected)
    each = max((time.perf_counter() - warm_up_start) / 3, 1e-6)
    runs = torch.tensor([min(max(int(seconds / each), MIN_RUNS), MAX_RUNS)])
    dist.broadcast(runs, 0)

    cpu_before = cpu_seconds()
    times = torch.tensor([time_once(data, fresh, expected) for _ in range(int(runs))],
                         dtype=torch.float64)
    cpu = torch.tensor([cpu_seconds() - cpu_before], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    if dist.get_rank() == 0:
        times = times.sort().values
        print(json.dumps({
            "bytes": num_bytes, "dtype": "float32", "memory": "private",
            "median_us": times[len(times) // 2].item(),
            "p99_us": times[len(times) * 99 // 100].item(),
            "runs": len(times), "cpu_us": cpu.item() * 1e6 / len(times)}), flush=True)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for num_bytes in sys.argv[2:]:
        measure(int(num_bytes), float(sys.argv[1]))
    dist.destroy_process_group()


main()
