"""What every bench against a peer shares: interleaved rounds, ratios with quartiles, dated reports.

The method is: ours, peer, ours, peer in the same run; the ratio of each round; the median of the
ratios and their quartiles. A goal is met when the worse quartile meets it.
"""

import datetime
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORTS = ROOT / "bench" / "reports"


def busy_seconds():
    """CPU time that the machine has spent on anything so far."""
    ticks = [int(word) for word in open("/proc/stat").readline().split()[1:9]]
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")


STARTED = (time.monotonic(), busy_seconds())


def foreign_share():
    """The share of the machine's CPU time that others took since the bench began; on a quiet machine
    next to nothing."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    available = (time.monotonic() - STARTED[0]) * os.cpu_count()
    return max(0.0, busy_seconds() - STARTED[1] - own) / available


def torch_python():
    """The Python that has torch: CADRE_TORCH, .venv, or the one on PATH."""
    named = os.environ.get("CADRE_TORCH", "")
    if named and not pathlib.Path(named).is_dir():
        return named
    venv = ROOT / ".venv/bin/python"
    return str(venv) if venv.exists() else "python3"


def build(*targets):
    """Builds the bench's own programs; the rest of the build folder is taken as it is."""
    subprocess.run(["cmake", "--build", str(ROOT / "build"), "--target", *targets], check=True,
                   stdout=subprocess.DEVNULL)


def quartiles(values):
    """(lower quartile, median, upper quartile)."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def timed(command, timeout_s, env=None):
    """Runs a command; returns (wall seconds, CPU seconds of it and its children, stdout).

    Raises on failure or time-out, with the end of what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s,
                            env={**os.environ, **(env or {})}, cwd=ROOT)
    wall = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode != 0:
        tail = "\n".join((result.stdout + result.stderr).splitlines()[-15:])
        raise RuntimeError(f"{' '.join(map(str, command))} failed with {result.returncode}:\n{tail}")
    cpu = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return wall, cpu, result.stdout


def machine():
    """One line that says what the figures were taken on."""
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo")
                  if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores, {model}, {platform.system()} {platform.release()}"


def table(header, rows):
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def write_report(name, title, body):
    """bench/reports/DATE-name.md with the command that makes it; prints it too. A run with --quick
    proves only that the bench works, so it is printed and not kept."""
    if "--quick" in sys.argv:
        print(f"# {title}\n\n{body}\n")
        return
    REPORTS.mkdir(parents=True, exist_ok=True)
    today = datetime.date.today().isoformat()
    command = " ".join([os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=ROOT).stdout.strip()
    text = (f"# {title}\n\nDate: {today}. Commit: {commit}. Machine: {machine()}; "
            f"others took {foreign_share():.0%} of its CPU time meanwhile.\n"
            f"Command: `{command}`\n\n{body}\n")
    path = REPORTS / f"{today}-{name}.md"
    path.write_text(text)
    print(text)
    print(f"written to {path.relative_to(ROOT)}", file=sys.stderr)


def progress(text):
    print(f"bench: {text}", file=sys.stderr, flush=True)
