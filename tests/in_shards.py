#!/usr/bin/env python3
"""Runs a GoogleTest program as several processes at once, each with a shard of its tests.

    in_shards.py COUNT PROGRAM [argument...]

For tests that mostly wait for each other's deadlines. When a shard ends, what it printed is shown
without the tests that passed, so that a failure stands at the top of a log; the exit code is the
first one that is not 0. Ends its processes when it is ended.
"""

import os
import signal
import subprocess
import sys
import threading
import time


def without_passed(lines):
    """The lines, less those of tests that passed; a test cut short by the end keeps its lines."""
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


def main():
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    count = int(sys.argv[1])
    start = time.monotonic()
    shards = [subprocess.Popen(
        sys.argv[2:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "GTEST_TOTAL_SHARDS": str(count), "GTEST_SHARD_INDEX": str(index)})
        for index in range(count)]

    def end(*_):
        for shard in shards:
            shard.terminate()
        sys.exit(1)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)

    codes = [0] * count

    def follow(index):
        output = shards[index].communicate()[0].decode(errors="replace")
        codes[index] = shards[index].returncode
        print(f"== shard {index + 1} of {count}: exit code {codes[index]} after "
              f"{time.monotonic() - start:.0f} s", *without_passed(output.splitlines()),
              sep="\n", flush=True)
    followers = [threading.Thread(target=follow, args=(index,)) for index in range(count)]
    for follower in followers:
        follower.start()
    for follower in followers:
        follower.join()
    return next((1 if code < 0 else code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
