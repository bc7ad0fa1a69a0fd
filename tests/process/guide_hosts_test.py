#!/usr/bin/env python3
"""Runs the commands of docs/guide/running/several-hosts.md, as they are printed, on two hosts, which are network
namespaces.

    guide_hosts_test.py CADRE [PAGE]

CADRE is the command. The exit code is 77 if this process is not allowed to make network namespaces.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs/guide/running/several-hosts.md"
SKIPPED = 77
LIMIT_S = 120
NUM_WORKERS = 4  # of each host, in the page
BLOCK = re.compile(r"^( *)```sh\n(.*?)^ *```$", re.M | re.S)
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# The program that the page calls ./train.
TRAIN = """#!/bin/sh
echo "rank $RANK of $WORLD_SIZE on $(hostname), restarts $TORCHELASTIC_MAX_RESTARTS, store $MASTER_ADDR"
"""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


def obstacle():
    """Returns why namespaces cannot be made, or None."""
    probe = f"cadre-guide-probe-{os.getpid()}"
    failed = shutil.which("ip") is None or ip("netns", "add", probe).returncode or ip(
        "-n", probe, "link", "set", "lo", "up").returncode
    if shutil.which("ip"):
        ip("netns", "delete", probe)
    return "network namespaces need root and the command ip (package iproute2)" if failed else None


class Hosts:
    """Two hosts with a link between them, each with its host name, its /etc/hosts and a folder."""

    def __init__(self, folder, cadre):
        self.names = [f"cadre-guide-{os.getpid()}-{host}" for host in (0, 1)]
        self.folders = [folder / f"node{host}" for host in (0, 1)]
        self.path = f"{folder / 'bin'}:{os.environ['PATH']}"
        (folder / "bin").mkdir()
        (folder / "bin/cadre").symlink_to(cadre)
        table = "127.0.0.1 localhost\n" + "".join(f"{address} node{host}\n" for host, address in enumerate(ADDRESSES))
        for host_folder in self.folders:
            host_folder.mkdir()
            (host_folder / "hosts").write_text(table)
            (host_folder / "train").write_text(TRAIN)
            (host_folder / "train").chmod(0o755)

    def __enter__(self):
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.names[0], "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", self.names[1])
        for name, address in zip(self.names, ADDRESSES):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "link0")
            ip("-n", name, "link", "set", "link0", "up")
        return self

    def __exit__(self, *_):
        for name in self.names:
            for pid in ip("netns", "pids", name).stdout.split():
                subprocess.run(["kill", "-9", pid], check=False)
            ip("netns", "delete", name)

    def start(self, host, command):
        enter = f"mount --make-rprivate / && mount --bind hosts /etc/hosts && hostname node{host} && exec sh -c \"$1\""
        return subprocess.Popen(["ip", "netns", "exec", self.names[host], "unshare", "-m", "-u", "sh", "-c", enter, "sh",
                                 command], cwd=self.folders[host], env={**os.environ, "PATH": self.path}, text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def commands_of(page):
    """Returns the blocks of the numbered list: how the secret is made, and what is run on each host."""
    blocks = [re.sub(f"^{indent}", "", text, flags=re.M) for indent, text in BLOCK.findall(page.read_text()) if indent]
    if len(blocks) != 2:
        sys.exit(f"{page}: expected two commands in its list, found {len(blocks)}")
    return blocks


def main():
    if reason := obstacle():
        print(f"skipped: {reason}")
        return SKIPPED
    make_secret, run = commands_of(pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else PAGE)
    failures = []
    with tempfile.TemporaryDirectory() as name, Hosts(pathlib.Path(name), pathlib.Path(sys.argv[1]).resolve()) as hosts:
        secret = hosts.start(0, make_secret)
        secret.communicate(timeout=LIMIT_S)
        if secret.returncode:
            sys.exit(f"{make_secret.strip()}: exit code {secret.returncode}")
        shutil.copy2(hosts.folders[0] / "job.token", hosts.folders[1])
        agents = [hosts.start(host, run) for host in (0, 1)]
        world = 2 * NUM_WORKERS
        found = []
        for host, agent in enumerate(agents):
            output, error = agent.communicate(timeout=LIMIT_S)
            found.append(re.findall(r"^\[(\d+)\] rank \1 of (\d+) on (node\d), restarts 3, store (\S+)$", output, re.M))
            if (agent.returncode or "warning" in error or len(found[host]) != NUM_WORKERS
                    or {line[1:3] for line in found[host]} != {(str(world), f"node{host}")}):
                failures.append(f"node{host}: exit code {agent.returncode}\n{output}{error}")
        lines = [line for host in found for line in host]
        if sorted(int(line[0]) for line in lines) != list(range(world)) or len({line[3] for line in lines}) != 1:
            failures.append(f"the workers do not form one world: {lines}")
    print("\n".join(failures) or f"{world} workers on two hosts formed one world")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
