#!/usr/bin/env python3
"""Compares the CPU seconds of a build and its tests with tools/budgets.txt.

    tools/budgets.py BUILD [--check]

Prints the CPU seconds of compiling with the slowest units, the seconds of each test program and the
ten slowest tests, as recorded by tools/compile and tests/run_test.py. With --check it marks each test
program that took more CPU seconds than its budget, and exits with 1 when one took more than TOLERANCE
times its budget: one machine may need twice the CPU seconds of another for the same work.
"""

import argparse
import json
import pathlib
import sys

TEXT = pathlib.Path(__file__).resolve().parent / "budgets.txt"
NUM_SLOWEST = 10
TOLERANCE = 2


def read(kind):
    """Returns name -> CPU seconds, from the lines `KIND [NAME] SECONDS`; the name "" is the default."""
    found = {}
    for line in TEXT.read_text().splitlines():
        words = line.partition("#")[0].split()
        if words and words[0] == kind:
            found[words[1] if len(words) == 3 else ""] = float(words[-1])
    return found


def budget_of(kind, name):
    budgets = read(kind)
    return budgets.get(name, budgets[""])


def print_compiling(log):
    """Only the last compilation of each object counts."""
    seconds = {}
    for line in log.read_text().splitlines():
        user, system, _, name = line.split()
        seconds[name] = float(user) + float(system)
    print(f"compiling: {sum(seconds.values()):.0f} CPU seconds, {len(seconds)} objects; the slowest:")
    for name in sorted(seconds, key=seconds.get, reverse=True)[:NUM_SLOWEST]:
        print(f"  {seconds[name]:6.1f}  {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()

    log = options.build / "compile_seconds.txt"
    if log.exists():
        print_compiling(log)
    tests, over = {}, []
    print("tests: wall seconds, CPU seconds, program")
    for path in sorted((options.build / "test_seconds").glob("*.json")):
        record = json.loads(path.read_text())
        tests |= {f"{path.stem}: {name}": seconds for name, seconds in record["tests"].items()}
        remark = ""
        budget = budget_of("test", path.stem)
        if options.check and record["cpu"] > budget:
            if record["cpu"] > TOLERANCE * budget:
                over.append(path.stem)
            remark = f"  above its budget of {budget:.0f} in tools/budgets.txt"
        print(f"  {record['wall']:6.1f}  {record['cpu']:6.1f}  {path.stem}{remark}")
    print("the slowest tests, wall seconds:")
    for name in sorted(tests, key=tests.get, reverse=True)[:NUM_SLOWEST]:
        print(f"  {tests[name]:6.1f}  {name}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
