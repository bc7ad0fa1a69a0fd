"""Runs programs as the ranks of a job on this machine: Cadre's and torch's get their rank from the environment, MPI's
from mpirun.

Processes that run too long are killed. A failure raises a RuntimeError with the end of the rank's output.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import harness

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
from ports import reserved_port

TIME_LIMIT_S = 90
ATTEMPTS = 2


@contextlib.contextmanager
def started_each(commands, env_of_rank, pipe_input=False):
    """Starts commands[r] as rank r, with the variables env_of_rank(r) in addition to those of this process, and not
    bound to cores, as a launcher does. Processes that still run at the end of the `with` block are killed."""
    processes = []
    try:
        for rank, command in enumerate(commands):
            processes.append(subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                stdin=subprocess.PIPE if pipe_input else None,
                env={**os.environ, "OMP_NUM_THREADS": "1", **harness.memory_settings(), **env_of_rank(rank)}))
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def started(command, ranks, pipe_input=False):
    """Starts the command as the ranks of a job on this host; see started_each()."""
    job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(reserved_port())}
    return started_each([command] * ranks, lambda rank: {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}, pipe_input)


def outputs_of(processes, time_limit_s=TIME_LIMIT_S):
    """Waits until all ranks have ended and returns their output."""
    end = time.monotonic() + time_limit_s
    outputs = [p.communicate(timeout=max(1, end - time.monotonic())) for p in processes]
    for rank, (process, (_, errors)) in enumerate(zip(processes, outputs)):
        if process.returncode != 0:
            raise RuntimeError(f"rank {rank} of {process.args[0]} ended with {process.returncode}: "
                               f"{errors.strip()[-1500:]}")
    return [output for output, _ in outputs]


def spawn(command, ranks):
    """Runs a program of Cadre or torch as the ranks of a job and returns the output of rank 0."""
    with started(command, ranks) as processes:
        return outputs_of(processes)[0]


def output_of_mpirun(command, time_limit_s=TIME_LIMIT_S):
    """Runs a command that ends in an mpirun of OpenMPI, also as root, and returns the output of all ranks."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
             **harness.memory_settings()})
    try:
        output, errors = process.communicate(timeout=time_limit_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode != 0:
        raise RuntimeError(f"mpirun ended with {process.returncode}: {errors.strip()[-1500:]}")
    return output


def run_mpi(program, arguments, ranks, options=()):
    """Runs the MPI program under OpenMPI's mpirun and returns the output of all ranks."""
    binding = ["--bind-to", "core"] if ranks <= os.cpu_count() else ["--oversubscribe"]
    return output_of_mpirun(["mpirun.openmpi", "-np", str(ranks), *binding, *options, str(program), *arguments])


def build_mpi_program(source, library="openmpi"):
    """Builds the MPI program with the library ("openmpi" or "mpich") and returns its path. Returns None if the launcher,
    the compiler or the headers of that library are missing; Debian's runtime package brings a compiler without headers.
    """
    compiler, launcher = f"mpicxx.{library}", {"openmpi": "mpirun.openmpi", "mpich": "mpiexec.mpich"}[library]
    if not shutil.which(compiler) or not shutil.which(launcher) or subprocess.run(
            [compiler, "-fsyntax-only", "-x", "c++", "-"], input="#include <mpi.h>", text=True,
            stderr=subprocess.DEVNULL, check=False).returncode != 0:
        harness.progress(f"{library} is skipped: its launcher, its compiler or its headers are missing "
                         f"(packages {'openmpi-bin' if library == 'openmpi' else library} and lib{library}-dev)")
        return None
    source = pathlib.Path(source)
    program = harness.ROOT / "build/bin" / source.stem
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        program.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([compiler, "-std=c++20", "-O2", str(source), "-o", str(program)], check=True)
    return program


def figures_of(output):
    """Returns the JSON lines of an output; MPI and torch may print other lines, which are ignored."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def measured(run):
    """Returns the figures that a program prints; runs it again if it fails, and returns None after
    the last attempt."""
    for attempt in range(ATTEMPTS):
        try:
            return figures_of(run())
        except RuntimeError as error:
            harness.progress(f"attempt {attempt + 1} failed: {error}")
    return None


def measure_rounds(programs, count, num_ranks, distance):
    """Returns the figures of each round for each program. Rounds with a missing figure, or in which the latency between
    the cores changed, are dropped."""
    results = {name: [] for name in programs}
    for number in distance.rounds(count, f"{num_ranks} ranks"):
        figures = {}
        for name in harness.in_turn(programs, number):
            harness.progress(f"{num_ranks} ranks: {name}")
            figures[name] = measured(lambda: programs[name](num_ranks))
        if distance.stayed() and all(figures.values()):
            for name in programs:
                results[name].append(figures[name])
    return results
