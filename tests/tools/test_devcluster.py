"""tools/devcluster on this machine: nodes, failures, requeues, and nothing left afterwards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

TOOL = Path(__file__).parents[2] / "tools" / "devcluster"
PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
PROGRAMS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "srun", "unshare")


class Cluster:
    """A cluster under test, by its command line and Slurm's."""

    def __init__(self, root: Path):
        self.root = root
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.env = outside | {"PATH": PATH, "SLURM_CONF": str(root / "slurm.conf")}

    def tool(self, *arguments: str, code: int = 0) -> str:
        """What a verb prints, its errors included; it must end with `code`."""
        command = [sys.executable, str(TOOL), *arguments, "--dir", str(self.root)]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def submit(self, folder: Path, script: str, *options: str) -> str:
        """Submit a batch script that prints to `folder/out`; its job's id."""
        (folder / "job.sh").write_text(f"#!/bin/bash\n{script}")
        fixed_options = (f"--output={folder}/out", "--open-mode=append", f"--chdir={folder}")
        return self.run("sbatch", "--parsable", *fixed_options, *options, str(folder / "job.sh"))

    def sacct(self, job: str) -> list[str]:
        """The states of a job's tries, oldest first."""
        options = ("--noheader", "--parsable2", "--allocations", "--duplicates")
        return self.run("sacct", *options, "--format=state", "--jobs", job).splitlines()

    def status(self) -> dict[str, tuple[str, str]]:
        """For each node, Slurm's state and the power's."""
        shown = json.loads(self.tool("status", "--json"))
        return {node["name"]: (node["slurm"], node["power"]) for node in shown["nodes"]}


def wait_for(condition: Callable[[], bool], limit_s: float = 120) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, f"not after {limit_s} s"
        time.sleep(0.2)
    return time.monotonic() - started


def processes_of(root: Path) -> list[str]:
    """The command lines of all processes that know of a state directory."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(root) in f"{process.cmdline()} {process.environ()}":
                processes.append(" ".join(process.cmdline()))
    return processes


@pytest.fixture(scope="module")
def new_cluster() -> Iterator[Callable[[], Cluster]]:
    """Makes state directories; every cluster in one is taken down in the end."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    reason = f"not installed: {', '.join(missing)}" if missing else ""
    reason = reason or ("must be root" if os.geteuid() != 0 else "")
    if reason and os.environ.get("SLURMLLM_REQUIRE_SLURM") == "1":
        pytest.fail(f"SLURMLLM_REQUIRE_SLURM=1, but {reason}")
    if reason:
        pytest.skip(f"no Slurm here: {reason}")
    clusters: list[Cluster] = []

    def make() -> Cluster:
        # Not tmp_path: its length could exceed what a Unix socket's path may have.
        clusters.append(Cluster(Path(tempfile.mkdtemp(prefix="devcluster-", dir="/tmp"))))
        return clusters[-1]

    yield make
    for cluster in clusters:
        if (cluster.root / "cluster.json").exists():
            cluster.tool("down")
        shutil.rmtree(cluster.root, ignore_errors=True)
        assert processes_of(cluster.root) == []
    assert not [c for c in clusters if str(c.root) in Path("/proc/self/mounts").read_text()]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster") / "shared"


@pytest.fixture(scope="module")
def cluster(new_cluster: Callable[[], Cluster], shared: Path) -> Cluster:
    """Three nodes with links, clocks and disks of their own."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    cluster = new_cluster()
    options = ("--nodes=3", "--slurmd-timeout=5", "--kill-wait=2", "--network", "--clock")
    cluster.tool("up", *options, "--node-disk-mb=32", f"--shared={shared}", "--shared-mb=32")
    return cluster


def test_every_node_is_idle_and_has_a_name_disk_and_processes_of_its_own(cluster: Cluster) -> None:
    assert cluster.status() == {f"n{k}": ("idle", "on") for k in (1, 2, 3)}
    assert sorted(cluster.run("srun", "-N3", "hostname").split()) == ["n1", "n2", "n3"]
    cluster.run("srun", "-N1", "-w", "n1", "touch", "/var/tmp/mine")
    count = "ls -d /proc/[0-9]* | wc -l; ls /var/tmp"
    printed, *files = cluster.run("srun", "-N1", "-w", "n2", "sh", "-c", count).split()
    assert int(printed) < 9
    assert "mine" not in files
    assert not Path("/var/tmp/mine").exists()


def test_a_failed_node_is_missed_and_its_job_starts_again(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("srun", "-N1", "-w", "n3", "touch", "/var/tmp/gone")
    script = 'if [ -n "$SLURM_RESTART_COUNT" ]; then echo again; else srun sleep 60; fi'
    job = cluster.submit(tmp_path, script, "--nodes=3", "--exclusive", "--requeue")
    steps = ("squeue", "--steps", "--noheader", "--jobs", job)
    wait_for(lambda: f"{job}.0" in cluster.run(*steps))
    cluster.tool("fail", "n3")
    state, power = cluster.status()["n3"]  # a star: Slurm misses an answer
    assert (state.rstrip("*"), power) == ("allocated", "off")  # Slurm has not been told
    assert "has failed already" in cluster.tool("fail", "n3", code=2)
    wait_for(lambda: cluster.status()["n3"][0] == "down*")
    wait_for(lambda: cluster.sacct(job) == ["NODE_FAIL", "PENDING"])
    cluster.tool("heal", "n3")
    assert cluster.status()["n3"][1] == "on"
    wait_for(lambda: cluster.sacct(job) == ["NODE_FAIL", "COMPLETED"])
    assert (tmp_path / "out").read_text().splitlines()[-1] == "again"
    wait_for(lambda: set(cluster.status().values()) == {("idle", "on")})
    assert cluster.run("srun", "-N1", "-w", "n3", "ls", "/var/tmp") == ""
    assert "has not failed" in cluster.tool("heal", "n3", code=2)


@pytest.mark.parametrize(
    ("option", "heal", "status", "runs"),
    [("--freeze", ["--thaw"], "frozen", False), ("--slurmd", [], "on", True)],
)
def test_a_node_that_fails_in_part(
    option: str, heal: list[str], status: str, runs: bool, cluster: Cluster, tmp_path: Path
) -> None:
    """A frozen node stands still and goes on where it stood; jobs go on without slurmd."""
    marks = tmp_path / "marks"
    job = cluster.submit(tmp_path, f"while sleep 0.2; do echo >> {marks}; done", "-w", "n3")
    wait_for(marks.exists)
    cluster.tool("fail", "n3", option)
    assert cluster.status()["n3"][1] == status
    assert json.loads(cluster.tool("status", "--json"))["nodes"][2]["slurmd"] is not runs
    before = marks.stat().st_size
    time.sleep(1)
    assert (marks.stat().st_size > before) is runs
    assert "has failed already" in cluster.tool("fail", "n3", option, code=2)
    cluster.tool("heal", "n3", *heal)
    before = marks.stat().st_size
    wait_for(lambda: marks.stat().st_size > before)
    cluster.run("scancel", job)
    wait_for(lambda: cluster.status()["n3"] == ("idle", "on"))
    assert "has not failed" in cluster.tool("heal", "n3", *heal, code=2)
    # On a slow machine Slurm may have missed it, and started the job again.
    assert cluster.sacct(job)[-1] == "CANCELLED by 0"


def test_a_shared_directory_that_refuses_writes(cluster: Cluster, shared: Path) -> None:
    def write(name: str) -> str:
        command = f"head -c 10000 /dev/zero > {shared}/{name} && echo written"
        srun = ["srun", "-N1", "-w", "n2", "sh", "-c", command]
        done = subprocess.run(srun, env=cluster.env, capture_output=True, text=True)
        return done.stdout + done.stderr

    assert "written" in write("a")
    assert (shared / "a").stat().st_size == 10000
    with (shared / "open").open("w") as stream:
        cluster.tool("shared", "read-only")
        assert "Read-only file system" in write("b")
        with pytest.raises(OSError, match="Read-only"):
            (shared / "b").touch()
        print("what was open already", file=stream, flush=True)
    cluster.tool("shared", "writable")
    assert "written" in write("b")
    # Writes wait on a frozen disk, and go on.
    cluster.tool("shared", "frozen")
    touch = ["srun", "-N1", "-w", "n1", "touch", str(shared / "late")]
    writing = subprocess.Popen(touch, env=cluster.env)
    time.sleep(2)
    assert writing.poll() is None
    cluster.tool("shared", "thawed")
    assert writing.wait(30) == 0
    if Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device").exists():
        slow = f"head -c 600000 /dev/zero > {shared}/slow; sync {shared}/slow"
        cluster.tool("shared", "slow")
        started = time.monotonic()
        cluster.run("srun", "-N1", "-w", "n1", "sh", "-c", slow)
        assert time.monotonic() - started > 2
        cluster.tool("shared", "fast")


def test_a_bad_link(cluster: Cluster) -> None:
    connect = (
        "import socket, time; server = socket.create_server(('', 7777));"
        " t = time.monotonic(); c = socket.socket(); c.connect_ex(('n1', 7778));"
        " print(time.monotonic() - t)"
    )

    def seconds() -> float:
        return float(cluster.run("srun", "-N1", "-w", "n2", "python3", "-c", connect))

    assert seconds() < 0.1
    cluster.tool("link", "n2", "--delay", "100")
    wait_for(lambda: seconds() > 0.19)
    cluster.tool("link", "n2")
    assert seconds() < 0.1


def test_a_job_has_its_nodes_clock_if_it_asks_for_it(cluster: Cluster, tmp_path: Path) -> None:
    now = f"LD_PRELOAD={cluster.root}/clock.so DEVCLUSTER_CLOCK=/var/tmp/.devcluster-clock date +%s"
    job = cluster.submit(tmp_path, f"while sleep 0.2; do {now}; done\n", "-w", "n2")
    out = tmp_path / "out"
    wait_for(lambda: out.exists() and "1" in out.read_text())
    cluster.tool("clock", "n2", "3600")
    wait_for(lambda: int(out.read_text().split()[-1]) > time.time() + 3500)
    cluster.tool("clock", "n2", "0")
    cluster.run("scancel", job)


def test_a_second_cluster_beside_it(cluster: Cluster, new_cluster: Callable[[], Cluster]) -> None:
    second = new_cluster()
    shown = second.tool("up", "--nodes", "2")
    assert f"export SLURM_CONF={second.root}/slurm.conf" in shown
    assert "up already" in second.tool("up", "--nodes", "2")
    assert "other settings" in second.tool("up", "--nodes", "1", code=2)
    assert sorted(second.run("srun", "-N2", "hostname").split()) == ["n1", "n2"]
    assert len(cluster.run("srun", "-N3", "hostname").split()) == 3
    assert "no shared directory of its own" in second.tool("shared", "full", code=2)
    assert processes_of(second.root)
    second.tool("down")
    assert processes_of(second.root) == []
    assert not second.root.exists()
    assert len(cluster.run("srun", "-N3", "hostname").split()) == 3
    assert "no cluster" in second.tool("down", code=3)
    assert "no cluster" in second.tool("env", code=3)


def test_what_an_unclean_end_leaves(new_cluster: Callable[[], Cluster], tmp_path: Path) -> None:
    cluster, shared = new_cluster(), tmp_path / "shared"
    up = ("up", "--nodes=1", "--network", f"--shared={shared}", "--shared-mb=16")
    cluster.tool(*up)
    pid = json.loads(cluster.tool("status", "--json"))["daemons"]["slurmctld"]
    os.kill(pid, 9)
    wait_for(lambda: not Path(f"/proc/{pid}/cmdline").exists())
    assert "not running" in cluster.tool("status", code=3)
    assert "no cluster is running" in cluster.tool("fail", "n1", code=3)
    cluster.tool(*up)
    assert cluster.run("srun", "-N1", "hostname") == "n1"
    cluster.tool("shared", "read-only")
    cluster.tool("shared", "frozen")
    cluster.tool("down")  # thaws it
    mounts = Path("/proc/self/mounts").read_text()
    assert str(shared) not in mounts
    assert str(cluster.root) not in mounts


def test_refusals_say_what_is_wrong(cluster: Cluster, tmp_path: Path) -> None:
    assert "no node n9; there are n1, n2, n3" in cluster.tool("fail", "n9", code=2)
    assert "running already" in cluster.tool("restart", "--start", code=2)
    (tmp_path / "a file").touch()
    assert "not a devcluster's" in Cluster(tmp_path).tool("up", code=2)
    assert (tmp_path / "a file").exists()
    free = Cluster(tmp_path / "new")
    assert "not within 1 to" in free.tool("up", "--nodes", "0", code=2)
    assert "would hide" in Cluster(Path("/var/tmp/none")).tool("up", code=2)
    assert not free.root.exists()
    free.env["PATH"] = str(tmp_path)
    assert "apt-get install" in free.tool("up", code=2)
    taken = ("up", "--shared", str(tmp_path))
    assert "is not an empty directory" in Cluster(Path("/tmp/none")).tool(*taken, code=2)
