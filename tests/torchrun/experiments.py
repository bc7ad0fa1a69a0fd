"""The jobs that the table of torchrun's features needs: each runs under one launcher and returns what was observed, as
a dict whose values can be compared. Times, ports, process numbers and random names are left out or replaced."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from jobs import plain_environment, read_lines, wait_until
from ports import reserved_port

PROBE = HERE / "probe.py"
# Variables that each launcher adds for itself; the table compares the others one by one.
SETTINGS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
            "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
            "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
            "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
            "TORCHELASTIC_TIMER_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE")


def values_of(facts, name):
    """Returns the values of one variable by attempt and rank: `0 1 | 0 1`."""
    attempts = {}
    for fact in facts:
        env = fact["env"]
        attempts.setdefault(int(env["TORCHELASTIC_RESTART_COUNT"]), []).append((int(env["RANK"]), env.get(name, "unset")))
    return " | ".join(" ".join(value for _, value in sorted(attempts[attempt])) for attempt in sorted(attempts))


def variables(facts):
    return {name: values_of(facts, name) for name in SETTINGS}


def files_below(folder):
    """Returns the relative paths of the files, the random parts of the first folder's name replaced."""
    paths = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"^[\w-]+_\w+/", lambda found: "job7_*/" if found[0].startswith("job7_") else "*_*/", path)
                  for path in paths)


def content(folder, path):
    found = sorted(folder.glob(path))
    return found[0].read_text() if found else None


def own_lines(text, *words):
    """Returns the sorted lines of workers that contain one of the words, without those that a report repeats."""
    return sorted(line for line in text.splitlines() if any(word in line for word in words) and line[:1] != " ")


def without_prefix(value):
    """Removes `[0] `, or torchrun's `[role0]:`, from each line."""
    if isinstance(value, list):
        return [without_prefix(part) for part in value]
    return re.sub(r"^(\[\d+\] |\[\w+\]:)", "", value, flags=re.M)


RESTARTED = r"""
import os, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("keep this", rank, attempt)
print("a,b", rank, attempt)
print("plain", rank, attempt)
print("warn", rank, attempt, file=sys.stderr)
sys.stdout.flush()
if attempt == "0":
    if rank == "1":
        time.sleep(0.3)
        sys.exit(3)
    time.sleep(1000)
"""


def restarted_job(launcher, folder):
    """Two workers with log files; rank 1 fails in the first attempt."""
    logs = folder / "logs"
    job = launcher.run(
        ["--nnodes=1", "--nproc_per_node=2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id",
         "job7", "--role", "trainer", "--max-restarts", 2, "--monitor-interval", "0.05", "--start-method", "fork",
         "--tee", 3, "--log-dir", logs, "--local-ranks-filter", 0, "--duplicate-stdout-filters", "keep,a,,b",
         "--duplicate-stderr-filters", "warn", PROBE, "--lr", "0.1", "--name=${local_rank}", "$x ${other}", "--", "-m"],
        folder, PROBE_FILE=folder / "facts", PROBE_CODE=RESTARTED)
    facts = read_lines(folder / "facts")
    numbered = sorted(facts, key=lambda fact: (fact["env"]["TORCHELASTIC_RESTART_COUNT"], fact["env"]["RANK"]))
    workers = {str(path.relative_to(logs)).split("/", 1)[1]: path.read_text() for path in logs.rglob("std*.log")}
    shown = {
        "shown": own_lines(job.output(), "keep", "a,b", "plain"), "shown errors": own_lines(job.error(), "warn "),
        "filtered output": [content(logs, f"*/attempt_{n}/filtered_stdout.log") for n in (0, 1)],
        "filtered errors": [content(logs, f"*/attempt_{n}/filtered_stderr.log") for n in (0, 1)],
    }
    return {
        **variables(facts), **shown, **{f"{name} without prefix": without_prefix(value) for name, value in shown.items()},
        "exit code": job.exit_code, "files": files_below(logs), "log files": workers,
        "arguments": [fact["arguments"] for fact in numbered], "is_unbuffered": facts[0]["is_unbuffered"],
        "error file": [re.sub(r".*/logs/[^/]*/", "", fact["env"]["TORCHELASTIC_ERROR_FILE"]) for fact in numbered],
        "one store for all attempts": len({fact["env"]["MASTER_PORT"] for fact in facts}) == 1,
    }


def failed_job(launcher, folder):
    """A program that is no Python script; rank 1 fails and rank 0 must be stopped."""
    logs = folder / "logs"
    script = ("echo out $RANK; echo error $RANK >&2; "
              "if [ $RANK = 1 ]; then sleep 0.5; exit 5; fi; "
              f"trap 'echo TERM >{folder}/stopped; exit 9' TERM; sleep 1000 & wait")
    job = launcher.run(["--standalone", "--nproc-per-node", 2, "-r", "0:1,1:2", "--log-dir", logs, "--no-python", "sh",
                        "-c", script], folder, OMP_NUM_THREADS=3, TORCH_NCCL_ASYNC_ERROR_HANDLING=0,
                       TORCHELASTIC_ERROR_FILE=folder / "outer.json")
    error = job.error()
    return {
        "exit code": job.exit_code, "shown": own_lines(job.output(), "out 0", "out 1"),
        "shown errors": own_lines(error, "error 0", "error 1"), "files": files_below(logs),
        "log files": {str(path.relative_to(logs)).split("/", 1)[1]: path.read_text() for path in logs.rglob("std*.log")},
        "stop": (folder / "stopped").read_text().strip(),
        "the report names rank 1": re.search(r"rank *: *1\b|rank 1 ", error) is not None,
        "the report names exit code 5": re.search(r"exitcode *: *5\b|exit code 5", error) is not None,
        "the report names the other rank": re.search(r"rank *: *0\b|rank 0: |ranks? 0", error) is not None,
        "outer error file": (folder / "outer.json").exists(),
    }


def default_job(launcher, folder):
    """No option but a module; the port comes from a variable, so that jobs of other tests do not use it."""
    port = reserved_port()
    job = launcher.run(["-m", "probe", "x"], folder, PET_MASTER_PORT=port, PYTHONPATH=HERE,
                       PROBE_FILE=folder / "facts", PROBE_CODE="print('a line')")
    facts = read_lines(folder / "facts")
    env = facts[0]["env"]
    return {**variables(facts), "exit code": job.exit_code, "workers": len(facts), "arguments": facts[0]["arguments"],
            "TORCHELASTIC_RUN_ID": "none" if env["TORCHELASTIC_RUN_ID"] == "none" else "a random name",
            "OMP_NUM_THREADS": "unset" if "OMP_NUM_THREADS" not in env else
            "cores" if env["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0))) else env["OMP_NUM_THREADS"],
            "MASTER_PORT": "as given" if env["MASTER_PORT"] == str(port) else "another", "shown": job.output()}


RECORDED = """
import faulthandler, json, os, time
import torch
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    distributed.init_process_group("gloo")
    total = torch.tensor([distributed.get_rank() + 1])
    distributed.all_reduce(total)
    if distributed.get_rank() == 0:
        with open(os.environ["RESULT"], "w") as file:
            json.dump({"sum": total.item(), "faulthandler": faulthandler.is_enabled(),
                       "is launched": distributed.is_torchelastic_launched()}, file)
    distributed.barrier()
    if distributed.get_rank() == 1:
        raise ValueError("no such layer")
    time.sleep(1000)

main()
"""


def recorded_job(launcher, folder):
    """PyTorch workers that meet over gloo; rank 1 then ends by an exception under @record."""
    logs = folder / "logs"
    job = launcher.run(["--nproc-per-node", 2, "--master-port", reserved_port(), "--log-dir", logs, PROBE], folder,
                       PROBE_FILE=folder / "facts", PROBE_CODE=RECORDED, RESULT=folder / "result",
                       TORCHELASTIC_ERROR_FILE=folder / "outer.json")
    inner = json.loads(content(logs, "*/attempt_0/1/error.json") or "{}").get("message", {})
    outer = json.loads((folder / "outer.json").read_text()).get("message", {})
    error = job.error()
    return {
        **json.loads((folder / "result").read_text()), "USE_AGENT_STORE": values_of(
            read_lines(folder / "facts"), "TORCHELASTIC_USE_AGENT_STORE"),
        "message": inner.get("message"), "fields": sorted(inner.get("extraInfo", {})),
        "outer message": outer.get("message"), "outer code": outer.get("errorCode"),
        "the report has the exception": "ValueError: no such layer" in error,
        "other ranks have a file": content(logs, "*/attempt_0/0/error.json") is not None,
    }


TOLD = """
import os, signal, sys, time
def leave(number, frame):
    with open(os.environ["TOLD"], "a") as file:
        file.write(signal.Signals(number).name + "\\n")
    sys.exit(0)
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), leave if os.environ["RANK"] == "0" else signal.SIG_IGN)
open(os.environ["TOLD"] + "-ready-" + os.environ["RANK"], "w").close()
while True:
    time.sleep(0.1)
"""


def signalled_job(launcher, folder, number, options=()):
    """The launcher gets a signal. Rank 0 ends, rank 1 ignores it and must be killed."""
    job = launcher.start(["--standalone", "--nproc-per-node", 2, "--shutdown-timeout", 1, *options, PROBE], folder,
                         PROBE_FILE=folder / "facts", PROBE_CODE=TOLD, TOLD=folder / "told")
    wait_until(lambda: (folder / "told-ready-0").exists() and (folder / "told-ready-1").exists(), "workers begin")
    job.process.send_signal(number)
    begin = time.monotonic()
    job.wait()
    took = time.monotonic() - begin
    return {"signal": (folder / "told").read_text().split(), "exit code": job.exit_code,
            "rank 1 was killed after about 1 s": 0.9 < took < 15}


def stopped_job(launcher, folder):
    return signalled_job(launcher, folder, signal.SIGTERM)


def job_with_own_signal(launcher, folder):
    return signalled_job(launcher, folder, signal.SIGUSR1, ["--signals-to-handle", "SIGUSR1,SIGTERM"])


def virtual_job(launcher, folder):
    """Virtual local ranks, an interpreter, a prefix and events; all by variables where torchrun has one."""
    interpreter = folder / "interpreter"
    interpreter.write_text(f'#!/bin/sh\nINTERPRETED=yes exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    job = launcher.run(["--virtual-local-rank", "--tee", 1, "--log-dir", folder / "logs", "--event-log-handler",
                        "console", "--master-port", reserved_port(), "--role", "worker", PROBE], folder,
                       PET_NPROC_PER_NODE=2, CUDA_VISIBLE_DEVICES="4,7", PYTHON_EXEC=interpreter,
                       TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<${role_name} ${rank} ${local_rank}> ",
                       PROBE_FILE=folder / "facts", PROBE_CODE="print('line')")
    facts = read_lines(folder / "facts")
    text = job.error() + job.output()
    events = [json.loads(found) for found in re.findall(r'\{"name".*\}', text)]
    return {**variables(facts), "PYTHON_EXEC": all("INTERPRETED" in fact["env"] for fact in facts),
            "shown": own_lines(job.output(), "line"), "exit code": job.exit_code,
            "fields of events": sorted({key for event in events for key in event}),
            "states of workers": sorted({event["metadata"]["state"] for event in events if event["source"] == "WORKER"}),
            "states of the agent": sorted({event["metadata"]["state"] for event in events
                                           if event["source"] == "AGENT"})}


def job_by_path(launcher, folder):
    """--run-path, and no file for console output."""
    script = folder / "program"
    script.write_text(PROBE.read_text())
    job = launcher.run(["--run-path", "--standalone", "--nproc-per-node", 2, script, "--x", "y"], folder,
                       PROBE_FILE=folder / "facts")
    facts = read_lines(folder / "facts")
    return {"RANK": values_of(facts, "RANK"), "arguments": facts[0]["arguments"], "exit code": job.exit_code}


def job_on_two_hosts(launcher, folder):
    """A static rendezvous of two hosts with different numbers of workers; those of host 0 end 1 s earlier."""
    port = reserved_port()
    code = "import os, time; time.sleep(int(os.environ['GROUP_RANK']))"
    jobs = [launcher.start(["--nnodes", 2, "--nproc-per-node", host + 1, "--node-rank", host, "--master-addr",
                            "127.0.0.1", "--master-port", port, "--rdzv-id", "two", "--local-addr", "127.0.0.1", PROBE],
                           folder, f"host{host}", CADRE_JOB_TOKEN="test", PROBE_FILE=folder / "facts", PROBE_CODE=code)
            for host in (1, 0)]
    codes = [job.wait().exit_code for job in reversed(jobs)]
    facts = read_lines(folder / "facts")
    return {**variables(facts), "exit codes": codes,
            "MASTER_PORT": "as given" if facts[0]["env"]["MASTER_PORT"] == str(port) else "another",
            "one store": len({fact["env"]["MASTER_PORT"] for fact in facts}) == 1}


ELASTIC = """
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["FOLDER"])
while True:
    time.sleep(0.05)
    if (folder / "end").exists():
        sys.exit(0)
    # What a collective does when its peer is lost.
    if os.environ["WORLD_SIZE"] == "2" and (folder / "peer_lost").exists():
        sys.exit(1)
"""
ELASTIC_CONF = "last_call_timeout=8,join_timeout=40,keep_alive_interval=1,keep_alive_max_attempt=2"


def elastic_job(launcher, folder, lost):
    """A job of 1 to 2 hosts, of which host 0 serves the store. The host `lost` is lost."""
    port = reserved_port()

    def start(host):
        return launcher.start(["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
                               "--rdzv-id", "elastic", "--rdzv-conf", f"{ELASTIC_CONF},is_host={1 - host}", "--max-restarts", 5,
                               "--local-addr", "127.0.0.1", PROBE], folder, f"host{host}", CADRE_JOB_TOKEN="test",
                              PROBE_FILE=folder / f"facts{host}", PROBE_CODE=ELASTIC, FOLDER=folder)

    def sizes(host):
        return [fact["env"]["WORLD_SIZE"] for fact in read_lines(folder / f"facts{host}")]

    jobs = [start(0), start(1)]
    wait_until(lambda: sizes(0)[-1:] == sizes(1)[-1:] == ["2"], "the hosts meet")
    jobs[lost].kill_all()
    left, other = jobs[1 - lost], 1 - lost
    # An agent that notices the loss itself has time to do so before a worker fails.
    begin = time.monotonic()
    while sizes(other)[-1] != "1" and left.process.poll() is None and time.monotonic() < begin + 5:
        time.sleep(0.05)
    (folder / "peer_lost").touch()
    wait_until(lambda: sizes(other)[-1] == "1" or left.process.poll() is not None, "the other host goes on or ends")
    (folder / "end").touch()
    left.wait()
    facts = read_lines(folder / f"facts{other}")
    return {"worlds": " ".join(sizes(other)), "exit code": left.exit_code,
            "restarts counted": int(facts[-1]["env"]["TORCHELASTIC_RESTART_COUNT"])}


def job_that_loses_a_host(launcher, folder):
    return elastic_job(launcher, folder, lost=1)


def job_that_loses_the_store(launcher, folder):
    return elastic_job(launcher, folder, lost=0)


def legacy_job(launcher, folder):
    """torch.distributed.launch gives --local-rank; under `cadre run` the command line does."""
    words = ["--nproc-per-node", 2, "--master-port", reserved_port(), PROBE]
    if launcher.is_torchrun:
        launcher = type(launcher)("torchrun", [sys.executable, "-m", "torch.distributed.launch"])
    else:
        words.append("--local-rank=${local_rank}")
    job = launcher.run([*words, "x"], folder, PROBE_FILE=folder / "facts")
    return {"arguments": sorted(fact["arguments"] for fact in read_lines(folder / "facts")), "exit code": job.exit_code}


# Command lines, of which is compared whether they are accepted.
LINES = {
    "--nnodes 1:1": ["--nnodes=1:1"],
    "--nnodes 0": ["--nnodes=0"],
    "--nnodes 3:2": ["--nnodes=3:2"],
    "--nnodes x": ["--nnodes=x"],
    "--nproc-per-node cpu": ["--nproc-per-node=cpu"],
    "--nproc-per-node auto": ["--nproc-per-node=auto"],
    "--nproc-per-node two": ["--nproc-per-node=two"],
    "--nproc-per-node gpu": ["--nproc-per-node=gpu"],
    "--nproc-per-node xpu": ["--nproc-per-node=xpu"],
    "--max-restarts -1": ["--max-restarts=-1"],
    "--monitor-interval x": ["--monitor-interval=x"],
    "--start-method forkserver": ["--start-method=forkserver"],
    "--start-method thread": ["--start-method=thread"],
    "--tee 4": ["--tee=4"],
    "--redirects 0:1,1:3": ["--redirects=0:1,1:3", "--nproc-per-node=2"],
    "--local-ranks-filter x": ["--local-ranks-filter=x"],
    "--node-rank x": ["--node-rank=x"],
    "--master-port x": ["--master-port=x"],
    "--numa-binding node": ["--numa-binding=node"],
    "--numa-binding nearest": ["--numa-binding=nearest"],
    "--shutdown-timeout x": ["--shutdown-timeout=x"],
    "--logs-specs none-such": ["--logs-specs=none-such"],
    "--no-such-option": ["--no-such-option"],
    "--no-python --module": ["--no-python", "--module"],
    "--rdzv-backend etcd-v2": ["--rdzv-backend=etcd-v2", "--rdzv-endpoint=localhost:2379"],
    "--rdzv-backend etcd": ["--rdzv-backend=etcd", "--rdzv-endpoint=localhost:2379"],
    "--rdzv-conf join_timeout": ["--rdzv-conf=join_timeout"],
    "a --rdzv-conf with every timeout": ["--rdzv-conf=join_timeout=5,last_call_timeout=1,close_timeout=2,heartbeat_timeout=3,"
                                "keep_alive_interval=1,keep_alive_max_attempt=2,timeout=9,read_timeout=4,is_host=1"],
    "--standalo": ["--standalo"],
    "PET_NNODES=x": ["PET_NNODES=x"],
    "no program": None,
}
PARSES = """
import json, os, sys
from torch.distributed import run
verdicts = {}
for name, words in json.load(sys.stdin).items():
    saved = dict(os.environ)
    words = ["--master-port=29999"] + words + ["program"] if words is not None else []
    for word in [word for word in words if word.startswith("PET_")]:
        words.remove(word)
        os.environ.update([word.split("=", 1)])
    try:
        run.config_from_args(run.parse_args(words))
        verdicts[name] = "accepted"
    except (Exception, SystemExit) as error:
        verdicts[name] = "refused"
    os.environ.clear()
    os.environ.update(saved)
json.dump(verdicts, sys.stdout)
"""


def command_lines(launcher, folder):
    if launcher.is_torchrun:
        parsed = subprocess.run([sys.executable, "-c", PARSES], input=json.dumps(LINES), capture_output=True, text=True,
                                env=plain_environment(), check=True)
        return json.loads(parsed.stdout)
    verdicts = {}
    for name, words in LINES.items():
        variables = dict(word.split("=", 1) for word in words or [] if word.startswith("PET_"))
        options = [word for word in words or [] if not word.startswith("PET_")]
        job = launcher.run(["--dry-run", *options, *(["true"] if words is not None else [])], folder, **variables)
        verdicts[name] = {0: "accepted", 2: "refused"}.get(job.exit_code, f"exit code {job.exit_code}")
    return verdicts


EXPERIMENTS = {
    "restarted": restarted_job, "failed": failed_job, "default": default_job, "recorded": recorded_job,
    "stopped": stopped_job, "own signal": job_with_own_signal, "virtual": virtual_job, "by path": job_by_path,
    "two hosts": job_on_two_hosts, "host lost": job_that_loses_a_host, "store lost": job_that_loses_the_store,
    "legacy": legacy_job, "lines": command_lines,
}


def observe(name, launcher, folder):
    folder.mkdir(parents=True)
    return EXPERIMENTS[name](launcher, folder)
