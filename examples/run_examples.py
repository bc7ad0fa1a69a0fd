"""Runs the examples on one and on several processes and checks what they print against formulas.

    run_examples.py CADRE BIN_FOLDER [unittest arguments]
"""

import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import unittest

CADRE, BIN = sys.argv[1], pathlib.Path(sys.argv[2])
SECONDS = 60


def run(program, *arguments, ranks=1, cwd=None):
    """The lines that the program's ranks print, sorted; of one rank without the launcher."""
    command = [str(BIN / program), *map(str, arguments)]
    if ranks > 1:
        command = [CADRE, "run", "--nproc-per-node", str(ranks), "--no-python", *command]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=cwd)
    if result.returncode != 0:
        raise AssertionError(f"{program} on {ranks}: exit {result.returncode}\n{result.stdout}{result.stderr}")
    return sorted(re.sub(r"^\[\d+\] ", "", line) for line in result.stdout.splitlines())


def expected_collectives(size):
    """What examples/collectives.cpp computes, by lists alone."""
    mine = [[1 + 10 * r, 2 + 10 * r] for r in range(size)]
    rows = [[[x + 100 * i for x in mine[r]] for i in range(size)] for r in range(size)]
    uneven = [list(range(100 * r, 100 * r + size * (size + 1) // 2)) for r in range(size)]
    total = [sum(m[k] for m in mine) for k in range(2)]
    lines = []
    for r in range(size):
        begin = r * (r + 1) // 2  # of the part of each rank's uneven input that goes to rank r
        results = {
            "all_reduce": total,
            "all_reduce max": mine[-1],
            "broadcast": mine[-1],
            "reduce": total if r == 0 else mine[r],
            "all_gather": sum(mine, []),
            "scatter": rows[0][r],
            "reduce_scatter": [sum(rows[j][r][k] for j in range(size)) for k in range(2)],
            "all_to_all": sum((rows[j][r] for j in range(size)), []),
            "all_to_all uneven": sum((uneven[j][begin:begin + r + 1] for j in range(size)), []),
            "all_reduce_async": [t + m * m for t, m in zip(total, mine[r])],
        }
        if r == 0:
            results["gather"] = sum(mine, [])
        lines += [f"rank {r} {name}: {' '.join(map(str, values))}" for name, values in results.items()]
    return sorted(lines)


class Examples(unittest.TestCase):
    maxDiff = None

    def test_collectives(self):
        for size in (1, 2, 3):
            with self.subTest(size=size):
                self.assertEqual(run("collectives", ranks=size), expected_collectives(size))

    def test_point_to_point(self):
        for size in (1, 2, 3):
            with self.subTest(size=size):
                around = size * (size + 1) // 2
                # Rank 0 gets the token back; rank r sees it after r + 1 additions.
                tokens = [around] + [(r + 1) * (r + 2) // 2 for r in range(1, size)]
                self.assertEqual(run("point_to_point", ranks=size),
                                 [f"rank {r}: token {tokens[r]}, sums {around} to {around}" for r in range(size)])

    def test_multiple_groups(self):
        for size, columns in ((1, 2), (2, 2), (4, 2), (6, 3)):
            with self.subTest(size=size, columns=columns):
                lines = []
                for r in range(size):
                    row, column = divmod(r, columns)
                    row_sum = sum(q for q in range(size) if q // columns == row)
                    column_sum = sum(q for q in range(size) if q % columns == column)
                    line = f"rank {r}: row {row} sums to {row_sum}, column {column} to {column_sum}"
                    if r % 2 == 0:
                        line += f", as {r // 2} of the even ones to {sum(range(0, size, 2))}"
                    lines.append(line)
                self.assertEqual(run("multiple_groups", columns, ranks=size), lines)

    def test_ddp_toy_resume(self):
        for size in (1, 2):
            with self.subTest(size=size), tempfile.TemporaryDirectory() as folder:
                whole = run("ddp_toy_resume", folder, 230, ranks=size)
                self.assertTrue(all(": from step 0, weights " in line for line in whole), whole)
                self.assertEqual(len({line.split("weights ")[1] for line in whole}), 1, whole)
                # As if it had been stopped after step 100: the same bits come out.
                pathlib.Path(folder, "latest").write_text("step-000100\n")
                resumed = run("ddp_toy_resume", folder, 230, ranks=size)
                self.assertEqual(resumed, [line.replace("from step 0,", "from step 100,") for line in whole])
                # It has made the later snapshots anew.
                again = run("ddp_toy_resume", folder, 230, ranks=size)
                self.assertEqual(again, [line.replace("from step 0,", "from step 200,") for line in whole])


class WithoutLauncher(unittest.TestCase):
    def meet(self, url, size):
        environment = {**os.environ, "CADRE_JOB_TOKEN": "a secret"}
        processes = [subprocess.Popen([str(BIN / "without_launcher"), url, str(r), str(size)], text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
                     for r in range(size)]
        try:
            outputs = [process.communicate(timeout=SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for r, (output, errors) in enumerate(outputs):
            self.assertEqual(output, f"rank {r} of {size}: sum {size * (size + 1) // 2}\n", errors)

    def test_tcp(self):
        for size in (1, 2, 3):
            with self.subTest(size=size), socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
                probe.close()
                self.meet(f"tcp://127.0.0.1:{port}", size)

    def test_file(self):
        for size in (1, 2, 3):
            with self.subTest(size=size), tempfile.TemporaryDirectory() as folder:
                self.meet(f"file://{folder}/meeting", size)
                self.assertEqual(os.listdir(folder), [])  # the last rank takes the file away


class Readme(unittest.TestCase):
    def test_shows_the_example(self):
        """README's program is examples/ddp_toy.cpp, whose main has at most 25 lines."""
        source = pathlib.Path(__file__).parent / "ddp_toy.cpp"
        readme = (source.parents[1] / "README.md").read_text()
        shown = re.search(r"<!-- examples/ddp_toy.cpp -->\n```cpp\n(.*?)```", readme, re.S).group(1)
        self.assertEqual(shown, source.read_text())
        main = shown[shown.index("int main"):]
        self.assertLessEqual(len(main.splitlines()), 25)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
