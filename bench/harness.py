"""The common parts of all benches that compare Cadre with a peer (another library): interleaved rounds, ratios with
quartiles, dated reports.

Method: every round runs our program and each peer once, in an order that is reversed in every other
round, and gives the ratio of the two times for each peer. A report has the median of the ratios and their quartiles. A
goal is met if the worse quartile meets it. Every program has the same memory settings. The latency
between the cores is measured before and after each round, because the hypervisor may move virtual cores:
a round in which it changed by more than a factor of two is dropped. Limits of the machine are measured in
the same run.
"""

import dataclasses
import datetime
import fcntl
import functools
import json
import os
import pathlib
import platform
import resource
import signal
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORTS = ROOT / "bench" / "reports"


def busy_seconds():
    """Returns the CPU time that all processes of the machine have used since its start."""
    ticks = [int(word) for word in open("/proc/stat").readline().split()[1:9]]
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")


STARTED = (time.monotonic(), busy_seconds())


def foreign_share():
    """Returns the fraction of the machine's CPU time that other processes have used since the bench
    began."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    available = (time.monotonic() - STARTED[0]) * os.cpu_count()
    return max(0.0, busy_seconds() - STARTED[1] - own) / available


def torch_python():
    """Returns a Python that has torch: that of CADRE_TORCH or of .venv, or python3 of PATH."""
    named = os.environ.get("CADRE_TORCH", "")
    if named and not pathlib.Path(named).is_dir():
        return named
    venv = ROOT / ".venv/bin/python"
    return str(venv) if venv.exists() else "python3"


def build(*targets):
    """Builds the programs of the bench in the existing build folder, after a build that another bench has begun."""
    with open(ROOT / "build/bench.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["cmake", "--build", str(ROOT / "build"), "--target", *targets], check=True,
                       stdout=subprocess.DEVNULL)


def memory_settings():
    """Returns the environment of our programs and of the peers: malloc keeps freed memory and uses
    huge pages, as `cadre train` sets it for its workers (cadre/launch/job/worker_environment.cpp),
    and torch's allocator uses huge pages, too."""
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:"
                              "glibc.malloc.trim_threshold=1099511627776",
            "THP_MEM_ALLOC_ENABLE": "1"}


def in_turn(names, number):
    """Returns the order of the programs in round `number`: every other round is reversed, so that no program always
    runs after the same other one."""
    return list(names) if number % 2 == 0 else list(reversed(list(names)))


@functools.cache
def limits_program():
    build("machine_limits")
    return ROOT / "build/bin/machine_limits"


def machine_limits(*arguments):
    """Returns the output of bench/limits/machine_limits."""
    return json.loads(timed([limits_program(), *arguments], timeout_s=120)[2])


class CoreDistance:
    """Measures the latency between the cores before the first round and after each round."""

    FLIP = 2.0

    def __init__(self):
        self.before = self.now()
        self.seen = [self.before]
        self.dropped = 0

    @staticmethod
    def now():
        return machine_limits("core")["core_us"]

    def rounds(self, count, title):
        """Yields round numbers until the latency was stable in `count` rounds, at most three times as many."""
        dropped_before, most = self.dropped, count if "--quick" in sys.argv else 3 * count
        for number in range(most):
            kept = number - (self.dropped - dropped_before)
            if kept >= count:
                return
            progress(f"{title}: round {number + 1}, {kept} of {count} kept")
            yield number

    def stayed(self):
        """Is called after each round; returns whether the latency is the same as before the round. With --quick every
        round counts, because no figures are reported."""
        before, self.before = self.before, self.now()
        self.seen.append(self.before)
        low, high = sorted((before, self.before))
        stayed = high <= self.FLIP * max(low, 1e-3)
        self.dropped += not stayed
        return stayed or "--quick" in sys.argv

    def text(self):
        low, middle, high = quartiles(self.seen)
        return (f"A cache line takes {middle:.2f} µs from one core to another (quartiles {low:.2f} to {high:.2f}); "
                f"{self.dropped} rounds were dropped because this time changed by more than {self.FLIP:.0f} times "
                "meanwhile.")


@dataclasses.dataclass(frozen=True)
class Goal:
    """A limit for a figure: an upper limit, or a lower one if `at_most` is false."""
    limit: float
    at_most: bool

    def text(self):
        return f"{'at most' if self.at_most else 'at least'} {self.limit:g}"

    def verdict(self, values):
        """Returns "met" or "not met": compares the worse quartile of the rounds' values with the limit."""
        low, _, high = quartiles(values)
        worse = high if self.at_most else low
        met = worse <= self.limit if self.at_most else worse >= self.limit
        return f"{'met' if met else 'not met'} ({worse:.4g}, goal {self.text()})"


def at_most(limit):
    return Goal(limit, True)


def at_least(limit):
    return Goal(limit, False)


def with_quartiles(values, form=".2f"):
    """Returns "median (lower quartile to upper quartile)" as a text."""
    low, middle, high = quartiles(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def median(values):
    return quartiles(values)[1]


def quartiles(values):
    """Returns (lower quartile, median, upper quartile)."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def timed(command, timeout_s, env=None):
    """Runs a command; returns (wall seconds, CPU seconds of it and its children, stdout).

    Raises RuntimeError with the end of the command's output if it fails or exceeds the time limit.
    Then, and if the bench itself is interrupted, the command and all its descendants are killed: a
    launcher that is killed alone leaves its workers running."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, **(env or {})}, cwd=ROOT) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
            how = f"failed with {process.returncode}"
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            stdout, stderr = process.communicate()
            how = f"did not end within {timeout_s} s"
        except BaseException:
            kill_tree(process.pid)
            raise
    wall = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode != 0:
        tail = "\n".join((stdout + stderr).splitlines()[-15:])
        raise RuntimeError(f"{' '.join(map(str, command))} {how}:\n{tail}")
    cpu = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return wall, cpu, stdout


def figures(command, timeout_s, environment=None):
    """Runs a program and returns the line of JSON that it printed, with `cpu_s` added; text of the launcher before it
    on the line is ignored. The program gets one thread and memory_settings(), unless another environment is passed."""
    _, cpu, output = timed(command, timeout_s, environment or {"OMP_NUM_THREADS": "1", **memory_settings()})
    for line in output.splitlines():
        start = line.find('{"')
        if start >= 0:
            return json.loads(line[start:]) | {"cpu_s": cpu}
    raise RuntimeError(f"{' '.join(map(str, command))} printed no figures:\n{output[-2000:]}")


def descendants(root):
    """Returns a process that the bench started and all its descendants, even if a launcher has put them into other
    sessions."""
    parents = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
        except (FileNotFoundError, ProcessLookupError):
            pass  # the process has ended since it was listed
    tree = [root]
    for process in tree:
        tree += [child for child, parent in parents.items() if parent == process]
    return tree


def kill_tree(root):
    """Kills a process that the bench started and all its descendants."""
    for process in descendants(root):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass


def of_peer(run, attempts=3):
    """Returns the result of `run`. Calls it again if it fails, because programs over gloo sometimes end with SIGABRT,
    even after their work is done."""
    for attempt in range(1, attempts + 1):
        try:
            return run()
        except RuntimeError as failure:
            if attempt == attempts:
                raise
            progress(f"the peer failed, attempt {attempt} of {attempts}: {failure}")


def machine():
    """Returns one line that describes the machine."""
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo")
                  if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores, {model}, {platform.system()} {platform.release()}"


def table(header, rows):
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def report_path(name, suffix=".md"):
    """Returns the path of today's report of that name, or of a file that belongs to it."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    return REPORTS / f"{datetime.date.today().isoformat()}-{name}{suffix}"


def write_report(name, title, body):
    """Writes bench/reports/DATE-name.md, with the command that makes it, and prints it. The report of a run with
    --quick, which only shows that the bench works, is printed and not written."""
    if "--quick" in sys.argv:
        print(f"# {title}\n\n{body}\n")
        return
    today = datetime.date.today().isoformat()
    # Shows the command as one would type it in the project's folder, without the path of this
    # checkout.
    words = [os.path.relpath(word, ROOT) if word.startswith("/") else word for word in sys.argv]
    command = " ".join([os.path.relpath(sys.argv[0], ROOT), *words[1:]])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=ROOT).stdout.strip()
    text = (f"# {title}\n\nDate: {today}. Commit: {commit}. Machine: {machine()}; "
            f"other processes took {foreign_share():.0%} of its CPU time during the bench.\n"
            f"Command: `{command}`\n\n{body}\n")
    path = report_path(name)
    path.write_text(text)
    print(text)
    print(f"written to {path.relative_to(ROOT)}", file=sys.stderr)


def progress(text):
    print(f"bench: {text}", file=sys.stderr, flush=True)
