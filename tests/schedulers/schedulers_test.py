"""Runs jobs under Slurm, Open MPI and MPICH: `cadre run` that these start on two hosts, and ranks that they start themselves.

    schedulers_test.py CADRE CLI_TEST [unittest arguments]

CADRE is the command, CLI_TEST the program cadre_cli_test, which contains the ranks for preemption. Needs root. The Slurm has its own
daemons, ports, key and folder, and ends with the test. All hosts are this one, under two names. Only the processes on the hosts can
resolve these, because mpirun would otherwise see that both are its own host.
"""

import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ports import reserved_port

CADRE, CLI_TEST = (str(pathlib.Path(path).resolve()) for path in sys.argv[1:3])
SECONDS = 120
HOSTS = ["cadre-n1", "cadre-n2"]
RANKS = "echo rank $RANK of $WORLD_SIZE on node $GROUP_RANK"
FOUR_RANKS = {f"rank {rank} of 4 on node {rank // 2}" for rank in range(4)}
PASSED = ["CADRE_JOB_TOKEN", "MASTER_ADDR", "MASTER_PORT"]  # variables that mpirun must be told to pass
TOKEN = {"CADRE_JOB_TOKEN": "the secret of the test"}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def clean_environment(extra):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "PMI", "CADRE"))}
    return {**kept, **extra}


class Jobs:
    """What all schedulers have in common. on_both_hosts() of a subclass returns the words that start a program."""
    scheduler_environment = {}

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="cadre-schedulers-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        hosts = "".join(f"\n127.0.0.1 {host}" for host in HOSTS)
        (cls.folder / "hosts").write_text(pathlib.Path("/etc/hosts").read_text() + hosts + "\n")
        cls.on_a_host = ["unshare", "--mount", "--uts", "sh", "-c", f'mount --bind {cls.folder}/hosts /etc/hosts && exec "$0" "$@"']

    def run_words(self, *words, environment=None, code=0):
        result = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=SECONDS,
                                cwd=self.folder, env=clean_environment({**self.scheduler_environment, **(environment or {})}))
        self.assertEqual(result.returncode, code, f"{words}\n{result.stdout}\n{result.stderr}")
        return result

    def cadre_run(self, *words, environment=TOKEN, code=0):
        return self.run_words(*self.on_both_hosts(1), CADRE, "run", *words, environment=environment, code=code)

    def test_launchers_form_one_job(self):
        result = self.cadre_run("--nproc-per-node", 2, "sh", "-c", RANKS)
        self.assertEqual(set(re.findall(r"rank \d of \d on node \d", result.stdout)), FOUR_RANKS)

    def test_ranks_communicate(self):
        program = [CLI_TEST, "--gtest_brief=1", "--gtest_filter=RunHostsWorker.ReducesOverAllHosts"]
        self.cadre_run("--nproc-per-node", 2, *program)

    def test_a_failed_worker_restarts_both_hosts(self):
        script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && { echo again $RANK; exit; }; [ $RANK = 1 ] && exit 3; sleep 1000"
        result = self.cadre_run("--max-restarts", 1, "sh", "-c", script)
        self.assertEqual(set(re.findall(r"again \d", result.stdout)), {"again 0", "again 1"})

    def test_the_exit_code_of_a_worker_is_that_of_the_scheduler(self):
        self.cadre_run("sh", "-c", "[ $RANK = 1 ] && exit 7; sleep 1000", code=7)

    def test_ranks_start_without_a_launcher(self):
        program = [CLI_TEST, "--gtest_brief=1", "--gtest_filter=RunHostsWorker.ReducesOverAllHosts"]
        meeting = {"MASTER_ADDR": HOSTS[0], "MASTER_PORT": str(reserved_port())}
        self.run_words(*self.on_both_hosts(2), *program, environment={**TOKEN, **meeting})

    def test_independent_jobs(self):
        result = self.cadre_run("--nnodes", 1, "sh", "-c", RANKS)
        self.assertEqual(result.stdout.count("rank 0 of 1 on node 0"), 2)


class Slurm(Jobs, unittest.TestCase):
    """A Slurm of two nodes, as root, with a munge of its own."""

    def on_both_hosts(self, per_host):
        return ["srun", "--nodes=2", f"--ntasks-per-node={per_host}"]

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.folder
        folder.chmod(0o755)
        (folder / "key").write_bytes(os.urandom(64))
        (folder / "key").chmod(0o400)
        cls.scheduler_environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        nodes = "".join(f"NodeName={host} NodeAddr=127.0.0.1 NodeHostname={socket.gethostname()} Port={reserved_port()} CPUs=4\n"
                        for host in HOSTS)
        (folder / "slurm.conf").write_text(f"""ClusterName=test
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmctldPort={reserved_port()}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
JobRequeue=1
KillWait=30
MinJobAge=300
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ReturnToService=2
{nodes}PartitionName=all Nodes=ALL Default=YES State=UP
""")
        cls.start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/key",
                  f"--log-file={folder}/munge.log", f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed")
        cls.wait_until(lambda: (folder / "munge.socket").exists(), "munged")
        cls.start("slurmctld", "-D")
        for host in HOSTS:
            (folder / f"spool.{host}").mkdir()
            cls.start(*cls.on_a_host, "slurmd", "-D", "-N", host)
        cls.wait_until(lambda: cls.ask("sinfo", "--noheader", "--states=idle", "--format=%D") == "2", "two idle nodes")

    @classmethod
    def start(cls, *words):
        log = (cls.folder / "daemons.out").open("ab")
        daemon = subprocess.Popen(words, stdout=log, stderr=log, env=clean_environment(cls.scheduler_environment))
        log.close()

        def end():
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

        cls.addClassCleanup(end)

    @classmethod
    def ask(cls, *words):
        return subprocess.run(words, capture_output=True, text=True, timeout=SECONDS,
                              env=clean_environment(cls.scheduler_environment)).stdout.strip()

    @classmethod
    def wait_until(cls, condition, what):
        end = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > end:
                logs = "".join(path.read_text(errors="replace")[-2000:] for path in sorted(cls.folder.glob("*.log")))
                raise AssertionError(f"waited {SECONDS} s for {what}\n{logs}")
            time.sleep(0.1)

    def test_two_launchers_on_one_host_are_refused(self):
        result = self.run_words("srun", "--nodes=1", "--ntasks=2", CADRE, "run", "true", environment=TOKEN, code=2)
        self.assertIn("--ntasks-per-node=1", result.stderr)

    def test_without_a_secret_a_warning_says_so(self):
        self.assertIn("the job has no secret", self.cadre_run("true", environment={}).stderr)

    def test_a_notice_requeues_the_job_and_it_goes_on(self):
        saves = self.folder / "saves"
        saves.mkdir()
        script = self.folder / "job.sh"
        script.write_text(f"""#!/bin/bash
#SBATCH --requeue --nodes=2 --ntasks-per-node=1 --output={self.folder}/job-%j.out --open-mode=append
if [ "$SLURM_RESTART_COUNT" = 1 ]; then echo second run; exit 0; fi
srun {CADRE} run --nproc-per-node 2 --shutdown-timeout 25 {CLI_TEST} --gtest_brief=1 --gtest_filter=RunPreemptionWorker.SavesAndLeaves
code=$?
echo first run ended with $code
if [ $code = 75 ]; then scontrol requeue $SLURM_JOB_ID; fi
exit $code
""")
        environment = {**TOKEN, "CADRE_TEST_FOLDER": str(saves)}
        job = self.run_words("sbatch", "--parsable", script, environment=environment).stdout.strip()
        output = self.folder / f"job-{job}.out"
        self.wait_until(lambda: output.exists() and output.read_text().count("up ") == 4, "four ranks")
        self.run_words("scancel", "--signal=USR1", job)
        self.wait_until(lambda: "JobState=PENDING" in self.ask("scontrol", "show", "job", job), "the requeue")
        self.run_words("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm would wait for two minutes
        self.wait_until(lambda: "second run" in output.read_text(), "the second run")
        self.assertIn("first run ended with 75", output.read_text())
        self.assertIn("Restarts=1", self.ask("scontrol", "show", "job", job))


class Mpi(Jobs):
    """Starts processes on hosts that are this one, through a command in the place of ssh."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.shell = cls.folder / "shell"
        cls.shell.write_text("""#!/bin/sh
while case "$1" in -*) true ;; *) false ;; esac; do shift; done
host=$1
shift
exec "$HOST_COMMAND" sh -c 'hostname "$0" && exec sh -c "$1"' "$host" "$*"
""".replace('"$HOST_COMMAND"', shlex.join(cls.on_a_host)))
        cls.shell.chmod(0o755)


class OpenMpi(Mpi, unittest.TestCase):
    scheduler_environment = AS_ROOT

    def on_both_hosts(self, per_host):
        slots = ",".join(f"{host}:{per_host}" for host in HOSTS)
        variables = [word for name in PASSED for word in ("-x", name)]
        return ["mpirun.openmpi", "--mca", "plm_rsh_agent", self.shell, "--host", slots, "--npernode", per_host,
                "-n", 2 * per_host, *variables]

    def test_the_secret_comes_from_mpirun(self):
        self.assertNotIn("the job has no secret", self.cadre_run("true", environment={}).stderr)


class Mpich(Mpi, unittest.TestCase):
    def on_both_hosts(self, per_host):
        return ["mpiexec.hydra", "-launcher", "ssh", "-launcher-exec", self.shell, "-hosts", ",".join(HOSTS),
                "-n", 2 * per_host, "-ppn", per_host]


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
