"""Runs a training in a child process and observes it: the time at which each step's line was
printed, the losses, the CPU time, and the memory of the workers."""

import dataclasses
import os
import pathlib
import re
import resource
import subprocess
import sysconfig
import threading
import time

import harness

STEP = re.compile(r"step\s+(\d+)/\d+\s+loss (\S+)")


def write_text(path, limit):
    """Returns the beginning of the sources of Python's standard library, one file after the other."""
    size = 0
    with open(path, "wb") as text:
        for source in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
            size += text.write(source.read_bytes()[:limit - size])
    return size


@dataclasses.dataclass
class Training:
    times: dict    # maps each step to the time at which its line was printed, in seconds
    losses: list   # as printed
    cpu_s: float
    memory: list   # the bytes of each worker before the last step; a page of n processes counts as 1/n

    def seconds(self, first, last):
        """Returns the seconds from the end of step `first` to the end of step `last`."""
        return self.times[last] - self.times[first]

    def p99_ms(self, first, last):
        """Returns the 99th percentile, in ms, of the times of the steps after step `first`."""
        spent = sorted(self.seconds(step - 1, step) for step in range(first + 1, last + 1))
        return 1000 * spent[len(spent) * 99 // 100]


def proportional_bytes(process):
    """Returns the resident memory of a process, in which a page of n processes counts as 1/n; 0 if it has ended."""
    try:
        lines = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def run_steps(command, steps, time_limit_s, ranks=0):
    """Runs a training of `steps` steps. `ranks` is the number of workers whose memory is measured."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=harness.ROOT,
                               env={**os.environ, "OMP_NUM_THREADS": "1", **harness.memory_settings()})
    watchdog = threading.Timer(time_limit_s, harness.kill_tree, (process.pid,))
    watchdog.start()
    output, times, memory = [], {}, []
    try:
        for line in process.stdout:
            now = time.monotonic()
            output.append(line)
            if match := STEP.search(line):
                times[int(match[1])] = now
                if ranks and int(match[1]) == steps - 1:
                    sizes = sorted(map(proportional_bytes, harness.descendants(process.pid)), reverse=True)
                    memory = sizes[:ranks]
        code = process.wait()
    finally:
        watchdog.cancel()
        if process.poll() is None:
            harness.kill_tree(process.pid)
            process.wait()
    if code != 0 or steps not in times:
        raise RuntimeError(f"{command[0]} ended with {code}:\n{''.join(output[-15:])}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Training(times, [float(match[2]) for match in map(STEP.search, output) if match], cpu, memory)
