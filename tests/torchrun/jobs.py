"""Starts jobs under torchrun and under `cadre run`, for the tests that compare the two.

Every process that a job leaves behind becomes a child of the test (PR_SET_CHILD_SUBREAPER), and clean_up() kills it.
"""

import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 150
# Variables of a job or a scheduler that started the test, which launchers would take for their own.
FOREIGN = ("PET_", "TORCHELASTIC_", "TORCH_", "SLURM_", "OMPI_", "PMI", "CADRE_")
FOREIGN_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                 "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}


def adopt_orphans():
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def children_of(pid):
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        return [int(word) for task in tasks
                for word in pathlib.Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants_of(pid):
    found = []
    for child in children_of(pid):
        found += [child, *descendants_of(child)]
    return found


def clean_up():
    """Kills every process that the jobs of this test have left."""
    deadline = time.monotonic() + 5
    while (left := descendants_of(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def wait_until(condition, what, limit_s=PATIENCE_S):
    """Returns the first true value of condition()."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise TimeoutError(f"not within {limit_s} s: {what}")


def listens(port):
    """Whether a socket listens at a port of 127.0.0.1 or of all addresses; does not connect to it."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            if state == "0A" and int(local.rsplit(":", 1)[1], 16) == port:
                return True
    return False


def plain_environment(**added):
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(FOREIGN) and name not in FOREIGN_NAMES}
    return {**kept, "PYTHON_EXEC": sys.executable, **{name: str(value) for name, value in added.items()}}


class Launcher:
    """torchrun or `cadre run`."""

    def __init__(self, name, command):
        self.name, self.command = name, [str(word) for word in command]
        self.is_torchrun = name == "torchrun"

    def start(self, words, folder, name="job", **environment):
        """Starts a job whose outputs go to files in `folder`."""
        return Job([*self.command, *map(str, words)], pathlib.Path(folder) / name, plain_environment(**environment))

    def run(self, words, folder, name="job", **environment):
        return self.start(words, folder, name, **environment).wait()


def torchrun():
    return Launcher("torchrun", [sys.executable, "-m", "torch.distributed.run"])


def cadre_run(command):
    return Launcher("cadre run", [pathlib.Path(command).resolve(), "run"])


class Job:
    def __init__(self, command, path, environment):
        self.output_path, self.error_path = path.with_suffix(".out"), path.with_suffix(".err")
        with open(self.output_path, "wb") as output, open(self.error_path, "wb") as error:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=error,
                                            env=environment, cwd=path.parent, start_new_session=True)

    def wait(self, limit_s=PATIENCE_S):
        """Waits for the end of the command. A job that does not end in time is killed and has exit code None."""
        try:
            code = self.process.wait(limit_s)
            self.exit_code = 128 - code if code < 0 else code
        except subprocess.TimeoutExpired:
            self.exit_code = None
            self.kill_all()
        return self

    def kill_all(self):
        """Kills the command and everything below it, as the loss of its host does."""
        for pid in [self.process.pid, *descendants_of(self.process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()

    def output(self):
        return self.output_path.read_text(errors="replace")

    def error(self):
        return self.error_path.read_text(errors="replace")


def read_lines(path):
    """Returns the JSON values of the complete lines of a file, none if it does not exist."""
    try:
        text = pathlib.Path(path).read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]
