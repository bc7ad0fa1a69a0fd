#!/usr/bin/env python3
"""Counts the resources of processes in /proc: threads, descriptors, sockets, shared memory.

    bench/groups/resources.py PID...    (the processes of any job, rank 0 first)

Shared memory means mappings of memfds and of files in /dev/shm. "Committed" is the memory that the kernel has
allocated for them; a segment that several processes map is counted once.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
import ranks as job

# A thread that was joined, or a connection that was closed, stays in /proc for a moment.
SETTLE_S = 0.3
KIB, MIB = 1 << 10, 1 << 20


@dataclasses.dataclass
class Held:
    """The resources that one process holds."""
    threads: int
    descriptors: int
    sockets: int
    mapped: int  # bytes of shared memory in its address space
    segments: dict  # maps (device, inode) to the bytes that are allocated for the segment


def descriptors_of(pid):
    """Returns {descriptor: what it refers to}."""
    found = {}
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor was closed since it was listed
            found[number] = os.readlink(f"/proc/{pid}/fd/{number}")
    return found


def allocated(path):
    info = os.stat(path)
    return (info.st_dev, info.st_ino), info.st_blocks * 512


def shared_mappings(pid):
    """Returns [(address range, bytes)] of the mappings of shared memory."""
    found = []
    for line in open(f"/proc/{pid}/maps"):
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1][3] == "s" and re.match(r"/memfd:|/dev/shm/", fields[5]):
            begin, end = (int(word, 16) for word in fields[0].split("-"))
            found.append((f"{begin:x}-{end:x}", end - begin))
    return found


def held_by(pid):
    descriptors = descriptors_of(pid)
    mappings = shared_mappings(pid)
    segments = dict(allocated(f"/proc/{pid}/fd/{number}") for number, target in descriptors.items()
                    if re.match(r"/memfd:|/dev/shm/", target))
    # Adds the segments whose descriptor is closed. Not every user may read map_files.
    with contextlib.suppress(PermissionError):
        segments |= dict(allocated(f"/proc/{pid}/map_files/{addresses}") for addresses, _ in mappings)
    return Held(threads=len(os.listdir(f"/proc/{pid}/task")), descriptors=len(descriptors),
                sockets=sum(target.startswith("socket:") for target in descriptors.values()),
                mapped=sum(num_bytes for _, num_bytes in mappings),
                segments=segments)


def held_in_stages(command, num_ranks):
    """Returns {stage: [Held of each rank]} of a program whose ranks print the name of a stage and wait for a line."""
    stages = {}
    with job.started(command, num_ranks, pipe_input=True) as processes:
        watchdog = threading.Timer(job.TIME_LIMIT_S, lambda: [process.kill() for process in processes])
        watchdog.start()
        try:
            while all(lines := [process.stdout.readline().strip() for process in processes]):
                if len(set(lines)) != 1:
                    raise RuntimeError(f"the ranks of {command[0]} are at different stages: {lines}")
                time.sleep(SETTLE_S)
                stages[lines[0]] = [held_by(process.pid) for process in processes]
                for process in processes:
                    process.stdin.write("\n")
                    process.stdin.flush()
            job.outputs_of(processes)
        finally:
            watchdog.cancel()
    return stages


def cells(held):
    """Returns the cells of a row. Threads, descriptors and sockets: the maximum over all ranks except 0, and in
    brackets that of rank 0, which hosts the store's server, if it differs. Then MiB mapped by a process, KiB committed
    by all."""
    row = []
    for field in ("threads", "descriptors", "sockets"):
        first, *others = (getattr(one, field) for one in held)
        most = max(others, default=first)
        row.append(str(most) if first == most else f"{most} ({first})")
    row.append(f"{max(one.mapped for one in held) / MIB:,.2f}")
    segments = {}
    for one in held:
        segments |= one.segments
    return row + [f"{sum(segments.values()) / KIB:,.0f}"]


HEADER = ["threads", "descriptors", "of them sockets", "shared memory mapped, MiB",
          "shared memory committed by all ranks, KiB"]


def table_of(runs):
    """Returns one row for each stage of {title: stages}."""
    rows = [[title, stage, *cells(held)] for title, stages in runs.items()
            for stage, held in stages.items()]
    return harness.table(["program", "stage", *HEADER], rows)


if __name__ == "__main__":
    print(harness.table(HEADER, [cells([held_by(int(pid)) for pid in sys.argv[1:]])]))
