"""The counterpart of restart_barrier.cpp in PyTorch: in each of two attempts it joins over gloo and runs a barrier."""

import os
import signal
import time

import torch.distributed as dist


def note(what):
    with open(os.environ["RESTART_TIMES"], "a") as file:
        file.write(f"{what} {time.monotonic_ns()}\n")


dist.init_process_group("gloo")
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() != 1:
        signal.pause()
    note("killed")
    os.kill(os.getpid(), signal.SIGKILL)
if dist.get_rank() == 0:
    note("running")
dist.destroy_process_group()
