"""The counterpart of cadre_groups.cpp in PyTorch over gloo: the same steps, checks, stages and output.

    gloo_groups.py times|resources NUM_GROUPS     (rank and world size: from the environment)
"""

import json
import sys
import time

import torch
import torch.distributed as dist


def now_us():
    return time.perf_counter() * 1e6


def all_reduce_8_bytes(group=None):
    ranks = dist.get_world_size(group)
    value = torch.tensor([dist.get_rank(group) + 1])
    dist.all_reduce(value, group=group)
    assert value.item() == ranks * (ranks + 1) // 2, "the sum is wrong"


def free_last_group(groups, times):
    """Closes a group: torch tears it down when no reference is left, so it is removed from the list."""
    dist.barrier()
    closing = now_us()
    dist.destroy_process_group(groups[-1])
    groups.pop()
    times["close_us"].append(now_us() - closing)


def add_group(times, kept, keep):
    dist.barrier()
    start = now_us()
    group = dist.new_group()
    created = now_us()
    all_reduce_8_bytes(group)
    used = now_us()
    times["create_us"].append(created - start)
    times["first_use_us"].append(used - start)
    dist.barrier(group)
    again = now_us()
    all_reduce_8_bytes(group)
    times["second_use_us"].append(now_us() - again)
    kept.append(group)
    del group
    if not keep:
        free_last_group(kept, times)


def fresh_times():
    return {name: [] for name in ("create_us", "first_use_us", "second_use_us", "close_us")}


def summary(times):
    """Returns [median, p99] of the slowest rank's times."""
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    slowest = slowest.sort().values
    return [slowest[len(slowest) // 2].item(), slowest[len(slowest) * 99 // 100].item()]


def measure(num_groups, keep):
    kept = []
    add_group(fresh_times(), kept, keep)  # warm-up
    times = fresh_times()
    for _ in range(num_groups):
        add_group(times, kept, keep)
    while kept:
        free_last_group(kept, times)
    figures = {name: summary(seen) for name, seen in times.items()}
    if dist.get_rank() == 0:
        print(json.dumps({"kept": keep, "groups": num_groups, **figures}), flush=True)


def pause(stage):
    print(stage, flush=True)
    sys.stdin.readline()


def hold(num_groups):
    all_reduce_8_bytes()
    pause("world")
    groups = [dist.new_group() for _ in range(num_groups)]
    pause("idle groups")
    for group in groups:
        all_reduce_8_bytes(group)
    pause("used groups")
    del group
    while groups:
        dist.destroy_process_group(groups[-1])
        groups.pop()
    dist.barrier()
    pause("groups closed")


def main():
    what, num_groups = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    if what == "resources":
        pause("nothing")
    dist.init_process_group("gloo")
    if what == "resources":
        hold(num_groups)
    else:
        measure(num_groups, True)
        measure(num_groups, False)
    dist.destroy_process_group()


main()
