"""Simulates hosts by network namespaces on this machine, joined by links whose rate `tc tbf` limits, and runs programs
as the ranks of a job on them. Needs root.

Host h has the host name <prefix>-h and the address 10.77.0.(h + 1) on the interface `wire`. Two hosts are joined by one
link; more are joined by a bridge, and the link from each to the bridge has the rate in both directions.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import stat
import subprocess
import sys
import tempfile

import ranks as job

TIME_LIMIT_S = 240
BURST = "256kb"  # the bytes that pass at once before the rate is limited


def sh(command):
    subprocess.run(command, shell=True, check=True)


@dataclasses.dataclass
class Hosts:
    names: list
    mbit: int

    def command_on(self, host, command):
        """Returns the command that runs `command` on a host, with the name of that host."""
        return ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c",
                f'hostname {self.names[host]} && exec "$@"', "sh", *command]

    def spawn(self, command, ranks_per_host):
        """Runs a program of Cadre or torch as the ranks of a job and returns the output of rank 0."""
        world_size = len(self.names) * ranks_per_host
        shared = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(ranks_per_host), "MASTER_ADDR": "10.77.0.1",
                  "MASTER_PORT": "29600", "CADRE_JOB_TOKEN": f"bench {os.getpid()}", "GLOO_SOCKET_IFNAME": "wire"}
        commands = [self.command_on(rank // ranks_per_host, command) for rank in range(world_size)]
        with job.started_each(commands, lambda rank: {
                **shared, "RANK": str(rank), "LOCAL_RANK": str(rank % ranks_per_host)}) as processes:
            return job.outputs_of(processes, TIME_LIMIT_S)[0]

    def run_mpi(self, program, arguments, ranks_per_host):
        """Runs the MPI program under OpenMPI's mpirun, which starts its daemons in the namespaces by a script that
        takes the place of ssh. Returns the output of all ranks."""
        with tempfile.TemporaryDirectory() as folder:
            remote = pathlib.Path(folder) / "remote"
            remote.write_text("#!/bin/sh\nhost=$1\nshift\n"
                              'exec ip netns exec "$host" unshare --uts sh -c "hostname $host && $*"\n')
            remote.chmod(remote.stat().st_mode | stat.S_IXUSR)
            pathlib.Path(folder, "hosts").write_text(
                "".join(f"10.77.0.{host + 1} {name}\n" for host, name in enumerate(self.names)))
            hosts = ",".join(f"{name}:{ranks_per_host}" for name in self.names)
            # mpirun takes each namespace for a machine with all cores, so it does not see that the ranks share them.
            is_crowded = len(self.names) * ranks_per_host > os.cpu_count()
            waiting = ["--mca", "mpi_yield_when_idle", "1"] if is_crowded else []
            command = ["mpirun.openmpi", "-np", str(len(self.names) * ranks_per_host), "--host", hosts,
                       "--bind-to", "none", "--oversubscribe",
                       "--mca", "plm_rsh_agent", str(remote), "--mca", "oob_tcp_if_include", "wire",
                       "--mca", "btl_tcp_if_include", "wire", "--mca", "pml", "ob1", "--mca", "btl", "self,vader,tcp",
                       "--mca", "orte_keep_fqdn_hostnames", "1", *waiting, str(program), *arguments]
            mounted = ["unshare", "--mount", "sh", "-c", f'mount --bind {folder}/hosts /etc/hosts && exec "$@"', "sh"]
            return job.output_of_mpirun([*mounted, *self.command_on(0, command)], TIME_LIMIT_S)


@contextlib.contextmanager
def started(count, mbit):
    """Makes the hosts, and removes them with every process in them, also if this process gets SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = [f"cadre-bench-{os.getpid()}-{host}" for host in range(count)]
    switch = f"cadre-bench-{os.getpid()}-switch"
    limit = f"root tbf rate {mbit}mbit burst {BURST} latency 50ms"
    try:
        for name in names:
            sh(f"ip netns add {name} && ip -n {name} link set lo up")
        if count == 2:
            sh(f"ip -n {names[0]} link add wire type veth peer name wire netns {names[1]}")
        else:
            sh(f"ip netns add {switch} && ip -n {switch} link add bridge type bridge && "
               f"ip -n {switch} link set bridge up")
        for host, name in enumerate(names):
            if count != 2:
                sh(f"ip -n {name} link add wire type veth peer name port{host} netns {switch}")
                sh(f"ip -n {switch} link set port{host} master bridge up && "
                   f"tc -n {switch} qdisc add dev port{host} {limit}")
            sh(f"ip -n {name} addr add 10.77.0.{host + 1}/24 dev wire && ip -n {name} link set wire up && "
               f"tc -n {name} qdisc add dev wire {limit}")
        yield Hosts(names, mbit)
    finally:
        for name in [*names, *([switch] if count != 2 else [])]:
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in left.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], check=False)
