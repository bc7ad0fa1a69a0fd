"""The features of torchrun 2.13, one row each, and how the test finds out whether `cadre run` has them."""

import dataclasses

LAUNCHING = "docs/guide/running/launching.md"
HOSTS = "docs/guide/running/several-hosts.md"
ERRORS = "docs/guide/running/errors.md"
LAUNCHER = "docs/decisions/0007-launcher.md"
AGENTS = "docs/decisions/0034-several-hosts.md"
BINDING = "docs/decisions/0036-binding-workers.md"
FAILURES = "docs/decisions/0032-recorded-failures.md"


@dataclasses.dataclass(frozen=True)
class Row:
    id: str  # of the checklist of torchrun's features
    what: str
    kind: str  # "compared", "by design", "missing" or "not of the command"
    experiment: str = ""
    key: str = ""
    page: str = ""  # lists the difference
    sentence: str = ""  # of that page
    values: tuple = ()  # what torchrun and cadre run do, for a row that is not compared


def compared(id, what, experiment, key):
    return Row(id, what, "compared", experiment, key)


def differs(id, what, experiment, key, page, sentence):
    """A row that is compared and whose difference is intended. The test fails if there is none."""
    return Row(id, what, "compared", experiment, key, page, sentence)


def by_design(id, what, torchrun, cadre, page, sentence):
    return Row(id, what, "by design", page=page, sentence=sentence, values=(torchrun, cadre))


def missing(id, what, torchrun, experiment="", key=""):
    """A feature that `cadre run` does not have. With an experiment, the row becomes equal when it has the feature."""
    return Row(id, what, "missing", experiment, key, values=(torchrun, "not available"))


def not_of_command(id, what, torchrun, cadre):
    return Row(id, what, "not of the command", values=(torchrun, cadre))


def line(id, text):
    return compared(id, f"`{text}`" if text[0] in "-P" else text, "lines", text)


RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")

ROWS = [
    # Options.
    line("T-01", "--nnodes 1:1"),
    line("T-01", "--nnodes 0"),
    line("T-01", "--nnodes 3:2"),
    line("T-01", "--nnodes x"),
    compared("T-01", "one host by default", "default", "GROUP_WORLD_SIZE"),
    line("T-01", "PET_NNODES=x"),
    compared("T-02", "one worker by default", "default", "workers"),
    line("T-02", "--nproc-per-node cpu"),
    line("T-02", "--nproc-per-node auto"),
    line("T-02", "--nproc-per-node two"),
    line("T-02", "--nproc-per-node gpu"),
    line("T-02", "--nproc-per-node xpu"),
    compared("T-02", "`PET_NPROC_PER_NODE`", "virtual", "WORLD_SIZE"),
    compared("T-03", "`--rdzv-backend c10d` on one host", "restarted", "exit code"),
    compared("T-03", "`--rdzv-backend static` by default", "two hosts", "GROUP_RANK"),
    compared("T-04", "`--rdzv-endpoint` of two hosts", "host lost", "worlds"),
    compared("T-05", "`--rdzv-id`", "restarted", "TORCHELASTIC_RUN_ID"),
    differs("T-05", "the id by default", "default", "TORCHELASTIC_RUN_ID", LAUNCHING,
            "`TORCHELASTIC_RUN_ID` | `--rdzv-id`, or a random name"),
    line("T-06", "a --rdzv-conf with every timeout"),
    compared("T-07", "`--standalone` starts", "by path", "exit code"),
    compared("T-08", "`--max-restarts`", "restarted", "TORCHELASTIC_RESTART_COUNT"),
    compared("T-08", "no restart by default", "default", "TORCHELASTIC_MAX_RESTARTS"),
    line("T-08", "--max-restarts -1"),
    line("T-09", "--monitor-interval x"),
    by_design("T-09", "`--monitor-interval`", "period of polling", "no polling", LAUNCHING,
              "nothing: the launcher notices the end of a worker at once"),
    line("T-10", "--start-method forkserver"),
    line("T-10", "--start-method thread"),
    compared("T-11", "`--event-log-handler console`: the fields", "virtual", "fields of events"),
    compared("T-12", "`--role`", "restarted", "ROLE_NAME"),
    compared("T-12", "the role by default", "default", "ROLE_NAME"),
    compared("T-13", "`-m` with its arguments", "default", "arguments"),
    compared("T-14", "`--no-python`", "failed", "log files"),
    line("T-14", "--no-python --module"),
    compared("T-15", "`--run-path` with its arguments", "by path", "arguments"),
    by_design("T-15", "`--run-path`: the interpreter", "a child of the launcher's Python", "`PYTHON_EXEC`", LAUNCHING,
              "and always executes a program"),
    compared("T-16", "`--log-dir`: names of folders and files", "restarted", "files"),
    compared("T-17", "`--redirects 0:1,1:2`: files", "failed", "files"),
    differs("T-17", "`--redirects 0:1,1:2`: standard output shown", "failed", "shown", LAUNCHING,
            "Each line begins with its rank, `[2] loss 0.3`"),
    line("T-17", "--redirects 0:1,1:3"),
    compared("T-18", "`--tee 3`: contents of files", "restarted", "log files"),
    differs("T-18", "`--tee 3`: standard output shown", "restarted", "shown", LAUNCHING,
            "lines have no prefix, or torchrun's `[default0]:` with `--tee`"),
    compared("T-18", "... without the prefixes", "restarted", "shown without prefix"),
    line("T-18", "--tee 4"),
    compared("T-19", "`--local-ranks-filter 0`: standard error shown", "restarted", "shown errors without prefix"),
    line("T-19", "--local-ranks-filter x"),
    compared("T-20", "`--duplicate-stdout-filters keep,a,,b`", "restarted", "filtered output without prefix"),
    compared("T-21", "`--duplicate-stderr-filters warn`", "restarted", "filtered errors without prefix"),
    compared("T-22", "`--node-rank`", "two hosts", "RANK"),
    line("T-22", "--node-rank x"),
    compared("T-23", "`--master-addr` of two hosts", "two hosts", "MASTER_ADDR"),
    compared("T-24", "`PET_MASTER_PORT` on one host", "default", "MASTER_PORT"),
    line("T-24", "--master-port x"),
    by_design("T-24", "the port by default", "29500", "a free port", LAUNCHING,
              "`MASTER_ADDR`, `MASTER_PORT` | the job's store: 127.0.0.1 and a free port, or `--master-port`"),
    compared("T-25", "`--local-addr`", "two hosts", "exit codes"),
    line("T-26", "--logs-specs none-such"),
    by_design("T-26", "`--logs-specs`", "a Python plug-in", "`default` only", LAUNCHING,
              "nothing: other values name Python plug-ins"),
    line("T-27", "--numa-binding node"),
    line("T-27", "--numa-binding nearest"),
    compared("T-28", "`--signals-to-handle SIGUSR1,SIGTERM`: what workers get", "own signal", "signal"),
    compared("T-29", "`--shutdown-timeout 1`", "stopped", "rank 1 was killed after about 1 s"),
    line("T-29", "--shutdown-timeout x"),
    compared("T-30", "`--virtual-local-rank`: `LOCAL_RANK`", "virtual", "LOCAL_RANK"),
    compared("T-30", "`--virtual-local-rank`: `CUDA_VISIBLE_DEVICES`", "virtual", "CUDA_VISIBLE_DEVICES"),
    compared("T-31", "arguments, `${local_rank}`", "restarted", "arguments"),
    line("T-31", "no program"),
    line("T-31", "--no-such-option"),
    line("T-31", "--standalo"),
    compared("T-32", "`torch.distributed.launch`: `--local-rank`", "legacy", "arguments"),
    # The environment.
    *(compared("T-40", f"`{name}`", "restarted", name) for name in RANKS),
    *(compared("T-40", f"`{name}` on two hosts", "two hosts", name) for name in RANKS),
    *(compared("T-41", f"`{name}`", "restarted", name) for name in SIZES),
    *(compared("T-41", f"`{name}` on two hosts", "two hosts", name) for name in SIZES),
    compared("T-42", "`ROLE_NAME`", "restarted", "ROLE_NAME"),
    compared("T-43", "`MASTER_ADDR` of a static rendezvous", "default", "MASTER_ADDR"),
    differs("T-43", "`MASTER_ADDR` of a c10d rendezvous at localhost", "restarted", "MASTER_ADDR", LAUNCHING,
            "nothing: `MASTER_ADDR` is 127.0.0.1"),
    differs("T-43", "`MASTER_PORT` of two hosts", "two hosts", "MASTER_PORT", HOSTS,
            "with `MASTER_ADDR` and `MASTER_PORT` of a store that the coordinator serves for this round of workers"),
    *(compared("T-44", f"`TORCHELASTIC_{name}`", "restarted", f"TORCHELASTIC_{name}")
      for name in ("RESTART_COUNT", "MAX_RESTARTS", "RUN_ID")),
    compared("T-44", "`is_torchelastic_launched()`", "recorded", "is launched"),
    compared("T-45", "`TORCHELASTIC_USE_AGENT_STORE`", "recorded", "USE_AGENT_STORE"),
    compared("T-45", "all_reduce over gloo of two ranks", "recorded", "sum"),
    compared("T-46", "`TORCHELASTIC_ERROR_FILE`, below `--log-dir`", "restarted", "error file"),
    compared("T-47", "`TORCH_NCCL_ASYNC_ERROR_HANDLING`", "restarted", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    compared("T-48", "`OMP_NUM_THREADS` of a worker for each core", "virtual", "OMP_NUM_THREADS"),
    differs("T-48", "`OMP_NUM_THREADS` of a single worker", "default", "OMP_NUM_THREADS", LAUNCHING,
            "`OMP_NUM_THREADS` | cores divided by workers, at least 1, unless set"),
    compared("T-49", "`CUDA_VISIBLE_DEVICES`, unset", "restarted", "CUDA_VISIBLE_DEVICES"),
    missing("T-50", "`TORCHELASTIC_TIMER_FILE`", "pipe of the file timer"),
    compared("T-51", "`PYTHON_EXEC`", "virtual", "PYTHON_EXEC"),
    compared("T-51", "Python's output is unbuffered", "restarted", "is_unbuffered"),
    compared("T-52", "`TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`", "virtual", "shown"),
    differs("T-52", "the prefix without `--tee`", "default", "shown", LAUNCHING,
            "Each line begins with its rank, `[2] loss 0.3`"),
    missing("T-53", "`TORCHELASTIC_ENABLE_FILE_TIMER`", "starts a watchdog"),
    missing("T-54", "`TORCHELASTIC_HEALTH_CHECK_PORT`", "starts a server"),
    by_design("T-55", "`TORCH_DISABLE_SHARE_RDZV_TCP_STORE`", "a store apart from the rendezvous", "always apart",
              LAUNCHER, "*Each attempt has a store of its own*"),
    missing("T-56", "`TORCH_WORKER_SERVER_SOCKET`", "control server of a worker"),
    # Rendezvous.
    compared("T-60", "c10d rendezvous of two hosts", "host lost", "exit code"),
    line("T-61", "a --rdzv-conf with every timeout"),
    line("T-61", "--rdzv-conf join_timeout"),
    missing("T-62", "`--rdzv-backend etcd-v2`", "a rendezvous", "lines", "--rdzv-backend etcd-v2"),
    missing("T-63", "`--rdzv-backend etcd`", "a rendezvous", "lines", "--rdzv-backend etcd"),
    compared("T-64", "static rendezvous of two hosts", "two hosts", "exit codes"),
    not_of_command("T-65", "`RendezvousHandler` plug-ins", "Python classes", "none"),
    by_design("T-66", "state of the rendezvous", "a pickled key of the store", "the coordinator's table", AGENTS,
              "One agent, the coordinator, holds a table of the hosts."),
    by_design("T-67", "content of that state", "participants, wait list, keep-alives", "hosts and a round", AGENTS,
              "One agent, the coordinator, holds a table of the hosts."),
    # The agent.
    compared("T-70", "hosts with different numbers of workers", "two hosts", "LOCAL_WORLD_SIZE"),
    compared("T-71", "a failed worker restarts all", "restarted", "RANK"),
    by_design("T-72", "a host comes", "starts a round, no restart counted", "the same", HOSTS,
              "it gets a place in a new round; beyond MAX it waits as a spare"),
    compared("T-73", "a host is lost", "host lost", "worlds"),
    differs("T-73", "... restarts counted for it", "host lost", "restarts counted", HOSTS,
            "the others start a round without it if at least MIN are left; this does not count as a restart"),
    compared("T-74", "ranks of a second round", "restarted", "RANK"),
    by_design("T-75", "limit of restarts", "each agent counts its own", "for the whole job", HOSTS,
              "at most `--max-restarts` times for the whole job"),
    compared("T-76", "workers of a host end 1 s earlier", "two hosts", "exit codes"),
    differs("T-77", "exit code of a failed job", "failed", "exit code", LAUNCHING,
            "the first worker that failed, in the last attempt, returned it"),
    compared("T-77", "the report names the rank", "failed", "the report names rank 1"),
    compared("T-77", "the report names the exit code", "failed", "the report names exit code 5"),
    compared("T-78", "other workers get SIGTERM", "failed", "stop"),
    compared("T-78", "a worker that ignores it is killed", "stopped", "rank 1 was killed after about 1 s"),
    compared("T-79", "workers get the launcher's signal", "stopped", "signal"),
    differs("T-79", "exit code after SIGTERM", "stopped", "exit code", LAUNCHING,
            "signal N ended the first worker that failed, or stopped the job: 130 Ctrl-C, 143 SIGTERM"),
    differs("T-79", "exit code after SIGUSR1", "own signal", "exit code", LAUNCHING,
            "signal N ended the first worker that failed, or stopped the job: 130 Ctrl-C, 143 SIGTERM"),
    compared("T-80", "states of workers in events", "virtual", "states of workers"),
    not_of_command("T-81", "several roles", "Python interface only", "none"),
    not_of_command("T-82", "Python functions as workers", "Python interface only", "none"),
    not_of_command("T-83", "`elastic_launch()`", "Python interface", "none"),
    differs("T-84", "one store for all attempts", "restarted", "one store for all attempts", LAUNCHER,
            "*Each attempt has a store of its own*"),
    # Logs, errors, events.
    compared("T-90", "layout of log files", "restarted", "files"),
    not_of_command("T-91", "`LogsSpecs` plug-ins", "Python classes", "none"),
    compared("T-92", "`@record`: message", "recorded", "message"),
    compared("T-92", "`@record`: fields", "recorded", "fields"),
    compared("T-93", "the report has the exception", "recorded", "the report has the exception"),
    compared("T-93", "only the failed rank has a file", "recorded", "other ranks have a file"),
    compared("T-94", "the launcher's own error file: message", "recorded", "outer message"),
    compared("T-94", "the launcher's own error file: `errorCode`", "recorded", "outer code"),
    differs("T-94", "... also without `@record`", "failed", "outer error file", LAUNCHING,
            "it writes this failure to its own `TORCHELASTIC_ERROR_FILE`"),
    compared("T-95", "faulthandler under `@record`", "recorded", "faulthandler"),
    differs("T-96", "states of the agent in events", "virtual", "states of the agent", LAUNCHING,
            "`AGENT` | `RENDEZVOUS` | the job's store is open and the workers are started"),
    missing("T-97", "metrics", "`put_metric`, console handler"),
    missing("T-98", "timers", "`timer.expires()`"),
    not_of_command("T-99", "elastic data", "Python classes", "`DataLoader` of Cadre"),
    # Newer features, and known defects.
    by_design("T-100", "`--numa-binding` without a GPU", "refused", "spread over the NUMA nodes", LAUNCHING,
              "the workers are spread over the NUMA nodes evenly, neighbours together"),
    by_design("T-101", "hosts above the maximum", "wait for the next rendezvous", "spares: a lost host's place is theirs", HOSTS,
              "beyond MAX it waits as a spare"),
    by_design("T-102", "a worker that cannot be killed", "bounded wait", "named, no restart", LAUNCHING,
              "if a process could not be killed, because it may still use what new workers need"),
    compared("T-103", "the report has the stopped workers", "failed", "the report names the other rank"),
    missing("T-104", "check of GPUs", "asks NVML"),
    missing("T-105", "control server of a worker", "HTTP"),
    by_design("T-106", "records of hanging jobs", "HTTP server of each rank", "files, `cadre trace`", LAUNCHING,
              "`cadre trace FOLDER` merges the ranks' records, also while the job hangs."),
    differs("T-110", "the host of the store is lost", "store lost", "worlds", AGENTS,
            "torchrun's job ends when the host of its store dies."),
    differs("T-110", "... exit code of the other host", "store lost", "exit code", HOSTS,
            "the next host becomes coordinator, and the job goes on"),
    by_design("T-111", "exit barrier", "300 s", "no limit", HOSTS, "starts the host's workers and stops them"),
    compared("T-112", "a failure stops the others at once", "failed", "stop"),
    by_design("T-113", "agents without a job", "may hang", "end after `join_timeout`", AGENTS,
              "An agent that has not been part of a job with an active round for `join_timeout` ends"),
    by_design("T-114", "counts of restarts", "differ between hosts", "one for the job", AGENTS,
              "*Restarts* are counted in the table, for the whole job."),
    by_design("T-115", "Slurm", "endpoint and ranks are set by hand", "read from `srun`", HOSTS,
              "They start `cadre run` on each host, and say what `--nnodes`, `--node-rank` and `--master-addr` are"),
    differs("T-116", "the worker's exit code is lost", "failed", "exit code", LAUNCHING,
            "the first worker that failed, in the last attempt, returned it"),
    not_of_command("T-117", "`-r` and `-t` under Debian 12", "a defect of 1.13.1", "none"),
]
