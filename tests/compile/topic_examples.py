"""Runs the examples of the topic headers (include/cadre/*.h) on two ranks.

    topic_examples.py write FILE        writes the examples as C++ for topic_examples.cpp
    topic_examples.py run CADRE PROGRAM runs that program
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

from guide_blocks_test import ROOT, blocks_of, parts_of

SECONDS = 100
# These make the world, so each runs in processes of its own.
MAKES_WORLD = ("cadre", "communicator", "core", "process_group", "system")
NOT_RUN = {
    "attention": "attention over 8,192 tokens takes too long",
    "data": "needs the files of MNIST",
    "dtensor": "needs 4 ranks",
    "expert_parallel": "needs 8 ranks",
    "flight_record": "needs the record of a rank",
    "groups": "needs 3 ranks",
    "launch": "is a whole program",
    "layers": "needs 400 MB for 50,000 classes",
    "mesh": "needs 8 ranks",
    "rendezvous": "has a fixed port",
    "tensor_parallel": "needs 4 ranks",
    "testing": "starts ranks itself, with libraries of its own",
    "testing_groups": "starts ranks itself, with libraries of its own",
    "transformer": "has 124 million parameters",
}


def topics():
    """Returns the topics that run, with the number of the example's first line and its lines."""
    pages = sorted(ROOT.glob("include/cadre/*.h"))
    unknown = {*MAKES_WORLD, *NOT_RUN} - {page.stem for page in pages}
    if unknown:
        sys.exit(f"there are no topics {', '.join(sorted(unknown))}; remove them from {__file__}")
    return {page.stem: (page, *next(blocks_of(page))) for page in pages if page.stem not in NOT_RUN}


def source():
    """Returns a namespace for each example, and a function that lists the examples."""
    parts, entries = [], []
    for topic, (page, first, lines) in topics().items():
        _, types, statements = parts_of(lines)
        makes_world = topic in MAKES_WORLD
        at = f'#line {first} "{page}"\n'
        parts += [f"namespace topic_{topic} {{", at + "\n".join(types),
                  "struct Run : Values {" if makes_world else "struct Run : Context { using Context::Context;",
                  "void run() {", at + "\n".join(statements), "}};}"]
        run = f"topic_{topic}::Run run" + ("{};" if makes_world else f'{{"{topic}", *world}};')
        entries.append(f'  {{"{topic}", {str(makes_world).lower()}, [](const auto& world) {{ {run} run.run(); }}}},')
    return "\n".join([*parts, "std::vector<Example> examples() {", "  return {", *entries, "  };", "}"]) + "\n"


def ran(cadre, program, *arguments):
    """Runs the program on two ranks in an empty folder. Returns how many ranks have run each example."""
    with tempfile.TemporaryDirectory(prefix="cadre-topics-") as folder:
        result = subprocess.run([cadre, "run", "--nproc-per-node", "2", "--no-python", program, *arguments],
                                cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    if result.returncode != 0:
        sys.exit(f"exit {result.returncode} of the examples {arguments}:\n{result.stdout}{result.stderr}")
    return collections.Counter(re.findall(r"example (\w+) has run", result.stdout))


def main():
    if sys.argv[1] == "write":
        pathlib.Path(sys.argv[2]).write_text(source())
        return
    cadre, program = sys.argv[2:]
    counts = ran(cadre, program)
    for topic in MAKES_WORLD:
        counts += ran(cadre, program, topic)
    if dict(counts) != {topic: 2 for topic in topics()}:
        sys.exit(f"these examples ran on this many ranks, expected each on 2: {dict(counts)}")
    print(f"{len(counts)} examples ran on 2 ranks")


main()
