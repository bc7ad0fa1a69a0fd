#!/usr/bin/env python3
"""Runs unmodified PyTorch programs under `cadre run` on two hosts, which are agents on loopback, and lets an agent of
torchrun and one of `cadre run` meet.

    programs_test.py CADRE [--seed N] [test ...]

CADRE is the command; the torch is that of this Python. Accelerate and Lightning (requirements.txt) are installed with pip
into a virtual environment in build/, which sees that torch. The seed chooses which worker of the trainer is killed, and when.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import venv

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import jobs
from jobs import listens, read_lines, wait_until
from ports import reserved_port

NUM_EPOCHS = 24
MAX_RESTARTS = 3
SETTINGS = None


def read_numbers(path):
    return path.read_text().splitlines()


def python_with_frameworks():
    """Returns a Python that has this one's packages, and Accelerate and Lightning."""
    folder = HERE.parent.parent / "build/frameworks"
    python = folder / "bin/python"
    wanted = (HERE / "requirements.txt").read_text()
    installed = folder / "installed"
    if not installed.exists() or installed.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        own = [path for path in sys.path if path.endswith("-packages")]
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "own.pth").write_text("".join(f"{path}\n" for path in own))
        subprocess.run([python, "-m", "pip", "install", "-qq", "--requirement", HERE / "requirements.txt"], check=True)
        installed.write_text(wanted)
    return python


class ProgramsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.addCleanup(jobs.clean_up)
        self.folder = pathlib.Path(folder.name)
        self.cadre, self.torchrun = jobs.cadre_run(SETTINGS.cadre), jobs.torchrun()

    def start_hosts(self, words, options=(), num_workers=1):
        """Starts an agent on each of two hosts."""
        port = reserved_port()
        return [self.cadre.start(["--nnodes", 2, "--nproc-per-node", num_workers, "--rdzv-backend", "c10d",
                                  "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "join_timeout=100", *options,
                                  *words], self.folder, f"host{host}", CADRE_JOB_TOKEN="test") for host in (0, 1)]

    def losses(self, folder):
        """Returns the loss of each epoch; an epoch that was run again must have the same one."""
        found = {}
        for epoch, loss in read_lines(folder / "losses"):
            self.assertEqual(found.setdefault(epoch, loss), loss, f"epoch {epoch}")
        return found

    def test_a_trainer_that_is_killed_ends_with_the_losses_of_an_uninterrupted_run(self):
        whole, interrupted = self.folder / "whole", self.folder / "interrupted"
        whole.mkdir()
        interrupted.mkdir()
        reference = self.torchrun.start(["--standalone", "--nproc-per-node", 2, HERE / "trainer.py", whole, NUM_EPOCHS],
                                        self.folder, "reference")
        hosts = self.start_hosts([HERE / "trainer.py", interrupted, NUM_EPOCHS], ["--max-restarts", MAX_RESTARTS])
        chosen = random.Random(SETTINGS.seed)
        kills = []
        for attempt in range(MAX_RESTARTS):
            def started():
                pids = [pid for count, pid in read_lines(interrupted / "started") if count == attempt]
                return sorted(pids) if len(pids) == 2 else None
            pids = wait_until(started, f"attempt {attempt} starts")
            # One attempt is killed before or while its ranks connect, the others in some epoch.
            first = len(read_lines(interrupted / "losses"))
            if attempt == 1:
                time.sleep(chosen.uniform(0, 1))
            else:
                wait_until(lambda: len(read_lines(interrupted / "losses")) >= first + chosen.randint(2, 6), "epochs run")
                time.sleep(chosen.uniform(0, 0.15))
            kills.append(f"attempt {attempt} after {len(read_lines(interrupted / 'losses'))} epochs")
            os.kill(chosen.choice(pids), signal.SIGKILL)
        for job in (*hosts, reference):
            job.wait()
            self.assertEqual(job.exit_code, 0, job.error())
        print(f"seed {SETTINGS.seed}: killed " + ", ".join(kills))
        self.assertEqual(sorted({count for count, _ in read_lines(interrupted / "started")}), [0, 1, 2, 3])
        expected = self.losses(whole)
        self.assertEqual(sorted(expected), list(range(NUM_EPOCHS)))
        self.assertEqual(self.losses(interrupted), expected)
        self.assertIn("continues at epoch", hosts[0].output())

    def test_libraries_find_what_they_read_under_torchrun(self):
        hosts = self.start_hosts([HERE / "libraries.py"], num_workers=2)
        for host in hosts:
            self.assertEqual(host.wait().exit_code, 0, host.error())
            self.assertEqual(host.output().count("all is well"), 2)

    def test_accelerate_trains_as_under_torchrun(self):
        python = python_with_frameworks()
        losses = []
        for name, launcher in (("torchrun", self.torchrun), ("cadre", self.cadre)):
            folder = self.folder / name
            folder.mkdir()
            job = launcher.run(["--standalone", "--nproc-per-node", 2, "--no-python", python,
                                HERE / "with_accelerate.py", folder], self.folder, f"job-{name}")
            self.assertEqual(job.exit_code, 0, job.error())
            losses.append(read_numbers(folder / "losses"))
        self.assertEqual(len(losses[0]), 12)
        self.assertEqual(losses[1], losses[0])

    def test_lightning_trains_on_two_hosts_as_under_torchrun(self):
        python = python_with_frameworks()
        losses = []
        for name, launcher in (("torchrun", self.torchrun), ("cadre", self.cadre)):
            folder = self.folder / name
            folder.mkdir()
            port = reserved_port()
            hosts = [launcher.start(
                ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
                 "--no-python", python, HERE / "with_lightning.py", folder], self.folder, f"{name}{host}",
                CADRE_JOB_TOKEN="test") for host in (0, 1)]
            for host in hosts:
                self.assertEqual(host.wait().exit_code, 0, host.error())
            losses.append(read_numbers(folder / "losses"))
        self.assertEqual(len(losses[0]), 12)
        self.assertEqual(losses[1], losses[0])

    def meet(self, first, second):
        """Starts two agents at one endpoint, the second one when the first one listens there."""
        port = reserved_port()
        agents = []
        for host, launcher in enumerate((first, second)):
            agents.append(launcher.start(
                ["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "mixed",
                 "--rdzv-conf", f"join_timeout={100 if host == 0 else 8},read_timeout=5,is_host={1 - host}",
                 "--no-python", "true"], self.folder, f"host{host}", CADRE_JOB_TOKEN="test"))
            if host == 0:
                wait_until(lambda: listens(port), "the first agent listens")
        return agents

    def test_an_agent_of_torchrun_is_refused(self):
        agent, stranger = self.meet(self.cadre, self.torchrun)
        self.assertEqual(stranger.wait().exit_code, 1)
        self.assertIn("RendezvousConnectionError", stranger.error())
        self.assertIn("it speaks the protocol of c10d's TCPStore, as torchrun does; start the job with `cadre run` on "
                      "all hosts, or with torchrun on all", agent.error())

    def test_an_agent_says_that_the_endpoint_is_one_of_torchrun(self):
        _, agent = self.meet(self.torchrun, self.cadre)
        self.assertEqual(agent.wait().exit_code, 1)
        self.assertIn("accepted the connection and did not answer: it is stopped, or it is no agent of cadre run but, for "
                      "example, torchrun; start the job with `cadre run` on all hosts, or with torchrun on all",
                      agent.error())


def main():
    global SETTINGS
    parser = argparse.ArgumentParser()
    parser.add_argument("cadre")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("CADRE_CASES_SEED", 1)))
    parser.add_argument("tests", nargs="*")
    SETTINGS = parser.parse_args()
    jobs.adopt_orphans()
    unittest.main(argv=[sys.argv[0], *(f"ProgramsTest.{test}" for test in SETTINGS.tests)],
                  warnings="ignore")  # clean_up() has ended the processes


if __name__ == "__main__":
    main()
