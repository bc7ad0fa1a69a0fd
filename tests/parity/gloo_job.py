"""Starts the processes of a job that torch.distributed joins over gloo: the common part of the tests that compare
losses with PyTorch.

A test script starts itself in each process, with FLAG as its first argument: it then calls print_losses() and ends.
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
    """Starts the processes. Yields a function that waits for them and returns the losses that print_losses() has
    printed. Kills the processes that still run at the end."""
    processes = []
    for rank in range(world_size):
        # The store is a file, because a port could be taken by another test.
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size),
                       "PARITY_STORE": f"file://{folder}/store"}
        processes.append(subprocess.Popen([sys.executable, script, FLAG, *arguments], env=environment,
                                          stdout=subprocess.PIPE, text=True))
    try:
        # The output of rank 0 fits into the buffer of a pipe, so no process blocks in print().
        yield lambda: json.loads([process.communicate(timeout=timeout_s)[0] for process in processes][0])
    finally:
        for process in processes:
            process.kill()
            process.wait()


def print_losses(train, cases):
    """Runs in each process of the job. Calls train() for each case; rank 0 prints {case: losses} as JSON."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=os.environ["PARITY_STORE"], rank=int(os.environ["RANK"]),
                                   world_size=int(os.environ["WORLD_SIZE"]))
    losses = {case: train(case) for case in cases}
    if distributed.get_rank() == 0:
        print(json.dumps(losses))
    distributed.destroy_process_group()


def losses_of_cadre(command, world_size, program, *arguments, losses, timeout_s):
    """Starts the program on world_size ranks, whose arguments contain the path `losses`, and returns the losses
    that it has written there, one on each line. Ends this process if the program fails."""
    words = [command, "run", "--nproc-per-node", world_size, "--no-python", program, *arguments]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return [float(line) for line in losses.read_text().split()]


def difference(a, b):
    """Returns the largest relative difference of two lists of losses."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))
