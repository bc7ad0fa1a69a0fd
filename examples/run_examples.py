"""Runs the examples on one and on several processes and checks what they print against formulas.

    run_examples.py CADRE BIN_FOLDER [unittest arguments]
"""

import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))
from ports import reserved_port

CADRE, BIN = sys.argv[1], pathlib.Path(sys.argv[2])
SECONDS = 60


def run(program, *arguments, ranks=1, cwd=None, options=()):
    """Runs the program and returns the lines that its ranks print, sorted. One rank runs without
    the launcher."""
    command = [str(BIN / program), *map(str, arguments)]
    if ranks > 1:
        command = [CADRE, "run", "--nproc-per-node", str(ranks), "--no-python", *options, *command]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=cwd)
    if result.returncode != 0:
        raise AssertionError(f"{program} on {ranks}: exit {result.returncode}\n{result.stdout}{result.stderr}")
    return sorted(re.sub(r"^\[\d+\] ", "", line) for line in result.stdout.splitlines())


def expected_collectives(size):
    """Returns the lines that examples/collectives.cpp must print, computed with plain lists."""
    mine = [[1 + 10 * r, 2 + 10 * r] for r in range(size)]
    rows = [[[x + 100 * i for x in mine[r]] for i in range(size)] for r in range(size)]
    uneven = [list(range(100 * r, 100 * r + size * (size + 1) // 2)) for r in range(size)]
    total = [sum(m[k] for m in mine) for k in range(2)]
    lines = []
    for r in range(size):
        begin = r * (r + 1) // 2  # where rank r's part begins in each rank's uneven input
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


def expected_losses():
    """Returns the lines that tensor_parallel_mlp.cpp and pipeline_two_stages.cpp must print,
    computed on one process with plain lists."""
    def weights(rows, columns):
        return [[math.sin(r * columns + c) / 2 for c in range(columns)] for r in range(rows)]

    up, down, batch = weights(12, 3), weights(2, 12), weights(8, 3)
    lines = []
    for step in range(21):
        loss = 0
        up_grad, down_grad = [[0] * 3 for _ in range(12)], [[0] * 12 for _ in range(2)]
        for x in batch:
            hidden = [math.tanh(sum(a * b for a, b in zip(x, row))) for row in up]
            errors = [sum(h * w for h, w in zip(hidden, row)) - t for row, t in zip(down, (sum(x), math.prod(x)))]
            loss += sum(e * e for e in errors) / 16
            for h in range(12):
                hidden_grad = 0
                for k in range(2):
                    down_grad[k][h] += errors[k] / 8 * hidden[h]
                    hidden_grad += errors[k] / 8 * down[k][h]
                for i in range(3):
                    up_grad[h][i] += hidden_grad * (1 - hidden[h] ** 2) * x[i]
        for matrix, gradients in ((up, up_grad), (down, down_grad)):
            for row, gradient in zip(matrix, gradients):
                row[:] = [w - 0.1 * g for w, g in zip(row, gradient)]
        if step % 10 == 0:
            lines.append(f"step {step}: loss {loss:.9f}")
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
                # Rank 0 prints the token when it has gone around the ring; rank r > 0 prints it
                # when r + 1 ranks have added their number.
                tokens = [around] + [(r + 1) * (r + 2) // 2 for r in range(1, size)]
                self.assertEqual(run("point_to_point", ranks=size),
                                 [f"rank {r}: token {tokens[r]}, sums {around} to {around}" for r in range(size)])

    def test_spawn_ddp(self):
        """The mean loss is that of one rank, on processes and on threads."""
        def loss(*arguments):
            size = arguments[0]
            found = [re.fullmatch(r"rank (\d) of (\d): loss (\S+)", line).groups()
                     for line in run("spawn_ddp", *arguments)]
            self.assertEqual([(r, n) for r, n, _ in found], [(str(r), str(size)) for r in range(size)])
            self.assertEqual(len({value for _, _, value in found}), 1)
            return float(found[0][2])

        alone = loss(1)
        self.assertLess(alone, 0.05)
        for arguments in ((2,), (3,), (1, "threads"), (3, "threads")):
            with self.subTest(arguments=arguments):
                self.assertAlmostEqual(loss(*arguments), alone, delta=2e-5)
        for arguments in ((0,), (2, "threads")):
            with self.subTest("refused", arguments=arguments):
                with self.assertRaisesRegex(AssertionError, "spawn: "):
                    run("spawn_ddp", *arguments, ranks=2 if arguments[0] else 1)

    def test_data_parallel(self):
        losses = []
        for replicas in (1, 2, 3, 5):
            [line] = run("data_parallel", replicas)
            losses.append(float(re.fullmatch(rf"{replicas} replicas: loss (\S+)", line)[1]))
            self.assertAlmostEqual(losses[-1], losses[0], delta=2e-5)
        self.assertLess(losses[0], 0.05)

    def test_any_strategy(self):
        losses = {}
        for strategy, ranks, name in (("ddp", 1, "ddp"), ("ddp", 2, "ddp"), ("zero1", 2, "zero1"),
                                      ("zero2", 3, "zero2"), ("fsdp", 2, "fsdp"), ("fsdp", 3, "fsdp"),
                                      ("hsdp", 4, "hsdp"), ("tensor", 2, "ddp, tensor 2"),
                                      ("pipeline", 2, "ddp, pipeline 2"),
                                      ("fsdp,tensor=2", 4, "fsdp, tensor 2")):
            [line] = run("any_strategy", ranks=ranks, options=("--strategy", strategy))
            printed, loss = re.fullmatch(r"([\w, ]+): loss ([0-9.e-]+)", line).groups()
            self.assertEqual(printed, name)
            losses[strategy, ranks] = float(loss)
        self.assertLess(losses["ddp", 1], 0.05)
        for layout, loss in losses.items():
            self.assertAlmostEqual(loss, losses["ddp", 1], delta=2e-5, msg=f"{layout}")

    def test_verify_module(self):
        for size in (1, 2):
            with self.subTest(size=size):
                lines = run("verify_module", ranks=size)
                self.assertEqual(sum(line.endswith("  within the bounds") for line in lines), 14)
        with self.assertRaisesRegex(AssertionError, "exit 1\n(.*\n)*.*ddp .* deviates\n"):
            run("verify_module", "batch_norm", ranks=2)

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

    def test_tensor_parallel_mlp(self):
        for size in (1, 2, 3):
            with self.subTest(size=size):
                self.assertEqual(run("tensor_parallel_mlp", ranks=size), expected_losses())

    def test_pipeline_two_stages(self):
        for size in (1, 2):
            with self.subTest(size=size):
                self.assertEqual(run("pipeline_two_stages", ranks=size), expected_losses())

    def test_gpt_3d(self):
        """Losses and norms must be equal on 1, 2, 4 and 8 ranks, and the loss must fall."""
        def numbers(lines):
            return [(int(found[1]), float(found[2]), float(found[3])) for found in
                    (re.fullmatch(r"step (\d+): loss (\S+), norm (\S+)", line) for line in lines)]

        alone = numbers(run("gpt_3d"))
        self.assertEqual([step for step, _, _ in alone], [0, 10, 20])
        self.assertLess(alone[2][1], 0.8 * alone[0][1])
        for size in (2, 4, 8):
            with self.subTest(size=size):
                for one, many in zip(alone, numbers(run("gpt_3d", ranks=size)), strict=True):
                    for expected, found in zip(one, many):
                        self.assertAlmostEqual(expected, found, delta=0.002)

    def test_fsdp_gpt(self):
        """Losses must be equal on any number of ranks, and each rank must own an equal share of the
        parameters."""
        alone = run("fsdp_gpt")
        first, last, total = re.fullmatch(
            r"rank 0: loss (\S+) to (\S+), owns (\d+) of \d+ elements, .*", alone[0]).groups()
        self.assertLess(float(last), 0.8 * float(first))
        for size in (2, 3):
            with self.subTest(size=size):
                owned = 0
                for line in run("fsdp_gpt", ranks=size):
                    found = re.fullmatch(r"rank \d: loss (\S+) to (\S+), owns (\d+) of (\d+) elements, "
                                         r"gathers at most (\d+) bytes", line)
                    self.assertAlmostEqual(float(found[1]), float(first), delta=1e-4)
                    self.assertAlmostEqual(float(found[2]), float(last), delta=1e-3)
                    self.assertEqual(found[4], total)
                    self.assertLess(int(found[5]), 4 * int(total))  # 4 bytes for each float32 element
                    owned += int(found[3])
                self.assertEqual(owned, int(total))
        with tempfile.TemporaryDirectory() as folder:
            in_file = run("fsdp_gpt", folder)
            self.assertEqual(in_file[0].split(",")[0], alone[0].split(",")[0])
            self.assertEqual(os.listdir(folder), [])

    def test_device_mesh(self):
        x = [[2 * i, 2 * i + 1] for i in range(6)]
        weight = [[0, 1, 2], [3, 4, 5]]
        y = [[sum(a * b for a, b in zip(row, column)) for column in zip(*weight)] for row in x]
        loss = sum(v * v for row in y for v in row) // 2
        gradient = [[sum(x[i][r] * y[i][c] for i in range(6)) for c in range(3)] for r in range(2)]
        for size in (1, 2, 3, 4):
            with self.subTest(size=size):
                tp = 2 if size % 2 == 0 else 1
                self.assertEqual(run("device_mesh", ranks=size),
                                 [f"rank {r} at ({r // tp}, {r % tp}): loss {loss}, gradient {gradient[0][0]} to "
                                  f"{gradient[1][2]}" for r in range(size)])

    def test_own_store(self):
        self.assertEqual(run("own_store"), [
            "6 requests", "color blue", "popped sweep",
            'store queue_pop: queue "jobs/waiting" had no item for this call until the deadline; the rank that '
            "pushes is late or gone", "visits 2"])

    def test_arguments_that_make_no_sense_are_refused(self):
        """Invalid arguments must give one sentence and exit code 2, before any rank waits for
        another one."""
        cases = [("multiple_groups", words, f"COLUMNS must be a number from 1, is {words[0]}")
                 for words in (["0"], ["abc"], ["-2"])]
        cases += [("ddp_toy_resume", ["folder", "x"], "STEPS must be a number from 1, is x"),
                  ("ddp_mnist", ["folder", "0"], "EPOCHS must be a number from 1, is 0")]
        cases += [("without_launcher", ["tcp://127.0.0.1:1", *words],
                   f"rank {words[0]} of {words[1]}: expected RANK from 0, below WORLD_SIZE")
                  for words in (["a", "2"], ["2", "2"], ["0", "two"], ["-1", "2"])]
        for program, words, sentence in cases:
            with self.subTest(program=program, words=words):
                result = subprocess.run([str(BIN / program), *words], capture_output=True, text=True,
                                        timeout=SECONDS)
                self.assertEqual((result.returncode, result.stderr), (2, f"{program}: {sentence}\n"))


# The number of steps is so large that a run is killed long before its end. A snapshot is saved
# every 50 steps.
NUM_STEPS = 1000


class ToyResume(unittest.TestCase):
    """Tests that ddp_toy_resume, killed at any time and resumed, ends with the weights of an
    uninterrupted run."""

    def kill_after_a_snapshot(self, folder):
        """Kills rank 1. Returns the step of the latest snapshot that the run leaves."""
        latest = pathlib.Path(folder, "latest")
        job = subprocess.Popen([CADRE, "run", "--nproc-per-node", "2", "--no-python", str(BIN / "ddp_toy_resume"),
                                folder, str(NUM_STEPS)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + SECONDS
            while not latest.exists() and job.poll() is None:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.001)
            ranks = [pid for pid in descendants(job.pid) if name_of(pid) == "ddp_toy_resume"]
            self.assertEqual(len(ranks), 2)
            os.kill(ranks[-1], signal.SIGKILL)
            output = job.communicate(timeout=SECONDS)
        finally:
            job.kill()
            job.communicate()
        self.assertEqual(job.returncode, 128 + signal.SIGKILL, output)
        return int(latest.read_text().removeprefix("step-"))

    def test_a_killed_run_goes_on_to_the_same_weights(self):
        with tempfile.TemporaryDirectory() as folder:
            whole = run("ddp_toy_resume", f"{folder}/whole", NUM_STEPS, ranks=2)
            self.assertTrue(all(": from step 0, weights " in line for line in whole), whole)
            self.assertEqual(len({line.split("weights ")[1] for line in whole}), 1, whole)
            step = self.kill_after_a_snapshot(f"{folder}/parts")
            self.assertTrue(0 < step < NUM_STEPS and step % 50 == 0, step)
            resumed = run("ddp_toy_resume", f"{folder}/parts", NUM_STEPS, ranks=2)
            self.assertEqual(resumed, [line.replace("from step 0,", f"from step {step},") for line in whole])

    def test_a_damaged_snapshot_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            run("ddp_toy_resume", folder, 50)
            for file in ("adam.pt", "net.safetensors"):
                damaged = pathlib.Path(folder, "step-000050", file)
                damaged.write_bytes(damaged.read_bytes()[:100])
                result = subprocess.run([str(BIN / "ddp_toy_resume"), folder], capture_output=True, text=True,
                                        timeout=SECONDS)
                self.assertEqual(result.returncode, 1, result.stderr)
                self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
                self.assertTrue(result.stderr.startswith(f"ddp_toy_resume: {damaged}"), result.stderr)


def descendants(pid):
    """Returns the pids of all descendants of the process `pid`."""
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # the process has ended
            parents[int(entry.name)] = int(stat[stat.rindex(")") + 1:].split()[1])

    def is_below(child):
        while child in parents and child != pid:
            child = parents[child]
        return child == pid

    return sorted(child for child in parents if is_below(child))


def name_of(pid):
    try:
        return pathlib.Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return ""


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
            with self.subTest(size=size):
                self.meet(f"tcp://127.0.0.1:{reserved_port()}", size)

    def test_file(self):
        for size in (1, 2, 3):
            with self.subTest(size=size), tempfile.TemporaryDirectory() as folder:
                self.meet(f"file://{folder}/meeting", size)
                self.assertEqual(os.listdir(folder), [])  # the last rank removes the file


class Readme(unittest.TestCase):
    def test_shows_the_example(self):
        """The program in README.md must equal examples/any_strategy.cpp, whose main has at most 25 lines."""
        source = pathlib.Path(__file__).parent / "any_strategy.cpp"
        readme = (source.parents[1] / "README.md").read_text()
        shown = re.search(r"<!-- examples/any_strategy.cpp -->\n```cpp\n(.*?)```", readme, re.S).group(1)
        self.assertEqual(shown, source.read_text())
        main = shown[shown.index("int main"):]
        self.assertLessEqual(len(main.splitlines()), 25)

    def test_the_guide_shows_the_mesh(self):
        """The program in docs/guide/parallel/mesh.md must equal examples/device_mesh.cpp."""
        source = pathlib.Path(__file__).parent / "device_mesh.cpp"
        guide = (source.parents[1] / "docs/guide/parallel/mesh.md").read_text()
        shown = re.search(r"<!-- examples/device_mesh.cpp -->\n```cpp\n(.*?)```", guide, re.S).group(1)
        self.assertEqual(shown, source.read_text())


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
