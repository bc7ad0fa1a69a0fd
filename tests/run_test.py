#!/usr/bin/env python3
"""Runs a test for CTest and records the time that it takes.

    run_test.py RECORD SHARDS ONE_IN PROGRAM [argument...]

The script writes to RECORD (a JSON file) the wall and CPU seconds of the whole test and the seconds
of each GoogleTest. With SHARDS above 1 the program, one of GoogleTest's, runs as several processes
at once, each with a shard of its tests: for tests that mostly wait for each other's deadlines. With
ONE_IN above 1 and CADRE_CASES_SEED in the environment, as .ci/run sets it, one in ONE_IN of the tests
run, chosen by the seed; without the seed all of them run. When a shard ends, its output is printed
without the tests that passed, so that a failure is at the top of the log; the exit code is the first
one that is not 0. If the script is ended by a signal, it ends its processes.
"""

import ctypes
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import threading
import time

ENDED = re.compile(r"^\[(?:       OK|  FAILED|  SKIPPED) \] (\S+?)(?:, where .*)? \((\d+) ms\)$", re.M)
PR_SET_PDEATHSIG = 1
# So many consecutive seeds choose the same tests. The programs choose cases by the residues of the seed modulo small
# numbers; if its residue chose the tests, too, some cases would never run.
SEEDS_OF_A_SHARE = 1000


def end_with_parent():
    """Kills the processes of the test: if a test takes too long, CTest kills only this script."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def without_passed(lines):
    """Returns the lines without those of tests that passed. Keeps the lines of a test that was
    running when the process ended."""
    kept, held = [], None
    for line in lines:
        if line.startswith("[ RUN      ]"):
            held = [line]
        elif held is None:
            if not line.startswith("[-------") and line.strip():
                kept.append(line)
        else:
            held.append(line)
            if line.startswith(("[       OK ]", "[  FAILED  ]", "[  SKIPPED ]")):
                kept += [] if line.startswith("[       OK ]") else held
                held = None
    return kept + (held or [])


def shares_of(count, one_in, seed):
    """Returns for each of `count` processes the variables by which GoogleTest runs its part of the tests: together
    one in `one_in` of them, chosen by the seed, or all if there is no seed."""
    if seed is None:
        one_in, seed = 1, 0
    total = count * one_in
    if total == 1:
        return [{}]
    chosen = int(seed) // SEEDS_OF_A_SHARE % one_in
    return [{"GTEST_TOTAL_SHARDS": str(total), "GTEST_SHARD_INDEX": str(index * one_in + chosen)}
            for index in range(count)]


def main():
    if len(sys.argv) < 5:
        print(__doc__, file=sys.stderr)
        return 2
    record, count, one_in, command = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    start = time.monotonic()
    shards = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env={**os.environ, **share}, preexec_fn=end_with_parent)
              for share in shares_of(count, one_in, os.environ.get("CADRE_CASES_SEED"))]

    def end(*_):
        for shard in shards:
            shard.terminate()
        sys.exit(1)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)

    codes, outputs = [0] * count, [""] * count

    def follow(index):
        for raw in shards[index].stdout:
            line = raw.decode(errors="replace")
            outputs[index] += line
            if count == 1:
                print(line, end="", flush=True)
        codes[index] = shards[index].wait()
        if count > 1:
            print(f"== shard {index + 1} of {count}: exit code {codes[index]} after "
                  f"{time.monotonic() - start:.0f} s", *without_passed(outputs[index].splitlines()),
                  sep="\n", flush=True)
    followers = [threading.Thread(target=follow, args=(index,)) for index in range(count)]
    for follower in followers:
        follower.start()
    for follower in followers:
        follower.join()

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    tests = {name: int(ms) / 1000 for output in outputs for name, ms in ENDED.findall(output)}
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"wall": time.monotonic() - start,
                                  "cpu": used.ru_utime + used.ru_stime, "tests": tests}))
    return next((1 if code < 0 else code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
