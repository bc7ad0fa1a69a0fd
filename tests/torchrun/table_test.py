#!/usr/bin/env python3
"""Compares `cadre run` with torchrun, feature by feature: runs the same command lines under both and compares what
workers see, what is shown, which files are written and how the commands end.

    table_test.py CADRE [--only EXPERIMENT ...] [--write PAGE | --check PAGE]

CADRE is the command; torchrun is that of this Python. With another torch than 2.13 nothing is compared, and the exit
code is 77. Prints a table with a line for each feature. Exits 1 when
- a feature differs and the difference is not listed with a sentence of the documentation,
- a difference is listed that does not exist, or the sentence is not in the page that is named, or
- with --check, the table in PAGE is not the one that --write would write.
"""

import argparse
import concurrent.futures
import importlib.metadata
import os
import pathlib
import re
import sys
import tempfile
import traceback

import experiments
import jobs
from rows import ROWS

VERSION = "2.13"
SKIPPED = 77
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# torchrun takes most of its time to import torch, so as many run at once as there are cores, and those that wait.
NUM_AT_ONCE = 2 + 2 * len(os.sched_getaffinity(0))
BEGIN, END = "<!-- written by tests/torchrun/table_test.py -->\n", "<!-- end -->\n"
# The longest ones begin first.
ORDER = ("host lost", "by path", "recorded", "store lost")


def shortened(value, limit=44):
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = text.replace("\n", " ").strip()
    return text if len(text) <= limit else text[:limit - 3] + "..."


def is_in_page(row):
    text = " ".join((ROOT / row.page).read_text().split())
    return " ".join(row.sentence.split()) in text


def judged(row, observed):
    """Returns (torchrun's value, ours, verdict, is_wrong)."""
    if row.page and not is_in_page(row):
        return *(row.values or ("", "")), f"{row.page} does not have the sentence: {row.sentence}", True
    if not row.experiment:
        return *row.values, row.kind, False
    theirs, ours = (observed[row.experiment, name].get(row.key, "NOT OBSERVED") for name in ("torchrun", "cadre run"))
    if "NOT OBSERVED" in (theirs, ours):
        return theirs, ours, "not observed", True
    if row.kind == "missing":
        return theirs, ours, "equal" if theirs == ours else "missing", False
    if row.page:
        return theirs, ours, "differs as listed" if theirs != ours else "listed as different, but equal", theirs == ours
    return theirs, ours, "equal" if theirs == ours else "DIFFERS", theirs != ours


def observe_all(cadre, only, folder):
    launchers = [jobs.torchrun(), jobs.cadre_run(cadre)]
    names = sorted(only or experiments.EXPERIMENTS, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def observe(task):
        name, launcher = task
        try:
            return experiments.observe(name, launcher, folder / name.replace(" ", "-") / launcher.name.split()[0])
        except Exception:
            print(f"experiment {name!r} of {launcher.name} failed:\n{traceback.format_exc()}", file=sys.stderr)
            return {}
    tasks = [(name, launcher) for name in names for launcher in launchers]
    with concurrent.futures.ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        return {(name, launcher.name): facts for (name, launcher), facts in zip(tasks, pool.map(observe, tasks))}


def markdown(judgements):
    """Returns the table of a page. It has the values of features that differ; the others are the same on every
    machine only in both launchers."""
    lines = ["| row | feature | torchrun | `cadre run` | verdict |", "|---|---|---|---|---|"]
    for row, (theirs, ours, verdict, _) in judgements:
        values = ("", "") if verdict == "equal" else (shortened(theirs), shortened(ours))
        if row.page:
            verdict = f"{verdict}: [{pathlib.Path(row.page).name}](" + os.path.relpath(row.page, "docs/guide/running") + ")"
        cells = [cell.replace("|", "\\|") for cell in (row.id, row.what, *values, verdict)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_table(text, table):
    return re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: BEGIN + table + END, text, flags=re.S)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cadre")
    parser.add_argument("--only", nargs="*", choices=experiments.EXPERIMENTS)
    parser.add_argument("--write", type=pathlib.Path)
    parser.add_argument("--check", type=pathlib.Path)
    arguments = parser.parse_args()

    found = importlib.metadata.version("torch")
    if not found.startswith(VERSION + "."):
        print(f"the table is that of torch {VERSION}; this Python has {found}")
        return SKIPPED
    jobs.adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        try:
            observed = observe_all(arguments.cadre, arguments.only, pathlib.Path(folder))
        finally:
            jobs.clean_up()
    rows = [row for row in ROWS if not row.experiment or (row.experiment, "torchrun") in observed]
    judgements = [(row, judged(row, observed)) for row in rows]
    for row, (theirs, ours, verdict, _) in judgements:
        print(f"{row.id:6}{shortened(row.what, 52):53}{shortened(theirs):45}{shortened(ours):45}{verdict}")
    wrong = [(row, judgement) for row, judgement in judgements if judgement[3]]
    for row, (theirs, ours, verdict, _) in wrong:
        print(f"\n{row.id} {row.what}: {verdict}\n  torchrun:  {theirs}\n  cadre run: {ours}", file=sys.stderr)
    counts = {}
    for _, (_, _, verdict, _) in judgements:
        counts[verdict] = counts.get(verdict, 0) + 1
    print(f"{len(judgements)} rows: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))

    if arguments.write:
        arguments.write.write_text(with_table(arguments.write.read_text(), markdown(judgements)))
    if arguments.check:
        text = arguments.check.read_text()
        if with_table(text, markdown(judgements)) != text:
            wrong.append(None)
            print(f"{arguments.check} is outdated: write it with --write", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
