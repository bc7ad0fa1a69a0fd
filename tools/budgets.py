#!/usr/bin/env python3
"""Compares the CPU seconds of a build and its tests with tools/budgets.txt.

    tools/budgets.py BUILD [--check]

Prints the CPU seconds of compiling with the slowest units, the seconds of each test program and the
ten slowest tests, as recorded by tools/compile and tests/run_test.py. With --check it marks what took
more than its budget: each test program, all tests together (from the start of the first one to the end
of the last one), and the compilation of what `make run` needs and of everything. It exits with 1 when
one of them took more than TOLERANCE times its budget: one machine may need twice the CPU seconds of
another for the same work, and a compiler cache leaves less to do. The time of all tests together is that
of one run of CTest only if BUILD/test_seconds was removed before it, as .ci/run does.
"""

import argparse
import json
import pathlib
import re
import sys

TEXT = pathlib.Path(__file__).resolve().parent / "budgets.txt"
NUM_SLOWEST = 10
TOLERANCE = 2
# The objects that `make run` compiles: the command, the library and the trainer.
OF_RUN = re.compile(r"/cadre_(core|cli|torch|train)(_objects|_pch)?\.dir/|/cadre_command\.dir/")


def read(kind):
    """Returns {name: CPU seconds} of the lines `KIND [NAME] SECONDS` of this kind; the name "" is
    the default."""
    found = {}
    for line in TEXT.read_text().splitlines():
        words = line.partition("#")[0].split()
        if words and words[0] == kind:
            found[words[1] if len(words) == 3 else ""] = float(words[-1])
    return found


def budget_of(kind, name):
    budgets = read(kind)
    return budgets[name] if name in budgets else budgets[""]


class Budgets:
    """Compares figures with their budgets, and keeps the names of those that are far above."""

    def __init__(self, checks):
        self.checks = checks
        self.exceeded = []

    def remark(self, kind, name, seconds):
        """Returns the text to print after a figure: empty unless it is above its budget."""
        budget = budget_of(kind, name)
        if not self.checks or seconds <= budget:
            return ""
        if seconds > TOLERANCE * budget:
            self.exceeded.append(name)
        return f"  above its budget of {budget:.0f} in tools/budgets.txt"


def print_compiling(log, budgets):
    """Prints the CPU seconds of compiling. Of several compilations of one object the last one
    counts."""
    seconds = {}
    for line in log.read_text().splitlines():
        user, system, _, name = line.split()
        seconds[name] = float(user) + float(system)
    total = sum(seconds.values())
    of_run = sum(used for name, used in seconds.items() if OF_RUN.search(name))
    print(f"compiling: {total:.0f} CPU seconds, {len(seconds)} objects{budgets.remark('compile', 'all', total)}")
    print(f"compiling for make run: {of_run:.0f} CPU seconds{budgets.remark('compile', 'run', of_run)}")
    print("the slowest objects:")
    for name in sorted(seconds, key=seconds.get, reverse=True)[:NUM_SLOWEST]:
        print(f"  {seconds[name]:6.1f}  {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()

    budgets = Budgets(options.check)
    log = options.build / "compile_seconds.txt"
    if log.exists():
        print_compiling(log, budgets)
    tests, begin, end = {}, float("inf"), 0
    print("tests: wall seconds, CPU seconds, program")
    for path in sorted((options.build / "test_seconds").glob("*.json")):
        record = json.loads(path.read_text())
        tests |= {f"{path.stem}: {name}": seconds for name, seconds in record["tests"].items()}
        end = max(end, path.stat().st_mtime)
        begin = min(begin, path.stat().st_mtime - record["wall"])
        remark = budgets.remark("test", path.stem, record["cpu"])
        print(f"  {record['wall']:6.1f}  {record['cpu']:6.1f}  {path.stem}{remark}")
    if tests:
        wall = end - begin
        print(f"all tests: {wall:.0f} wall seconds{budgets.remark('wall', 'tests', wall)}")
    print("the slowest tests, wall seconds:")
    for name in sorted(tests, key=tests.get, reverse=True)[:NUM_SLOWEST]:
        print(f"  {tests[name]:6.1f}  {name}")
    return 1 if budgets.exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
