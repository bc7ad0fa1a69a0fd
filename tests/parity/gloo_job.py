"""A script's own processes, joined over gloo by torch.distributed: what the comparisons of losses with PyTorch
have in common.

The script starts itself with FLAG as its first word in each process: there it calls print_losses() and ends.
"""

import contextlib
import json
import os
import subprocess
import sys

import torch
from torch import distributed

FLAG = "--gloo-rank"


@contextlib.contextmanager
def running(script, world_size, folder, arguments, timeout_s):
    """Starts the processes. Yields a function that waits for them and returns what print_losses() has printed;
    at the end none of them is left."""
    processes = []
    for rank in range(world_size):
        # The store is a file, not a port that another test might take.
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size),
                       "PARITY_STORE": f"file://{folder}/store"}
        processes.append(subprocess.Popen([sys.executable, script, FLAG, *arguments], env=environment,
                                          stdout=subprocess.PIPE, text=True))
    try:
        # What rank 0 prints fits a pipe, so no process waits for a reader.
        yield lambda: json.loads([process.communicate(timeout=timeout_s)[0] for process in processes][0])
    finally:
        for process in processes:
            process.kill()
            process.wait()


def print_losses(train, cases):
    """In a process of the job: rank 0 prints {case: train(case)} as JSON."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=os.environ["PARITY_STORE"], rank=int(os.environ["RANK"]),
                                   world_size=int(os.environ["WORLD_SIZE"]))
    losses = {case: train(case) for case in cases}
    if distributed.get_rank() == 0:
        print(json.dumps(losses))
    distributed.destroy_process_group()


def difference(a, b):
    """The largest relative difference of two lists of losses."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))
