"""What happens to a run of conditions.yaml while it trains."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from _devcluster.processes import program, same_namespace
from _devcluster.shared import SharedDirectory
from end_to_end.bench import processes_with
from end_to_end.slurm_runs import outside_pid

if TYPE_CHECKING:
    from end_to_end.conditions import Scene


def folder_removed(scene: Scene) -> None:
    """The folder that it was submitted from is gone when new workers must be started."""
    shutil.rmtree(scene.folder)
    os.kill(outside_pid(scene.run, rank=0), signal.SIGKILL)


def core_dumped(scene: Scene) -> None:
    os.kill(outside_pid(scene.run, rank=0), signal.SIGSEGV)
    scene.wait()
    assert not list(scene.folder.glob("core*"))


def tensorboard_removed(scene: Scene) -> None:
    shutil.rmtree(scene.run / "tensorboard")


def tensorboard_replaced(scene: Scene) -> None:
    tensorboard_removed(scene)
    (scene.run / "tensorboard").touch()


def events_removed(scene: Scene) -> None:
    for name in ("events", "hooks", "profiles"):
        shutil.rmtree(scene.run / name, ignore_errors=True)
        (scene.run / name).touch()


def suspended(scene: Scene) -> None:
    scene.slurm("scontrol", "suspend", scene.job)
    time.sleep(1)
    scene.note()
    scene.slurm("scontrol", "resume", scene.job)


def stopped(scene: Scene) -> None:
    scene.slurm("scancel", "--full", "--signal=STOP", scene.job)
    time.sleep(1)
    scene.note()
    scene.slurm("scancel", "--full", "--signal=CONT", scene.job)


def shown_by_squeue(scene: Scene) -> None:
    """squeue shows the state of the condition's name, which passes too quickly to be met."""
    with tempfile.TemporaryDirectory() as folder:
        squeue, state = Path(folder) / "squeue", scene.condition.name
        squeue.write_text(f'#!/bin/sh\n{shutil.which("squeue")} "$@" | sed "s/RUNNING/{state}/"\n')
        squeue.chmod(0o755)
        scene.note("env", f"PATH={folder}:{os.environ['PATH']}")


def another_host(scene: Scene) -> None:
    """`status` and `resume` on a machine that cannot see the run's processes."""
    namespaces = ("unshare", "--uts", "--pid", "--fork", "--mount-proc")
    within = (*namespaces, "sh", "-c", 'hostname elsewhere; exec "$@"', "sh")
    scene.note(*within)
    scene.call("resume", *within)


def supervisor_killed(scene: Scene) -> None:
    """SIGKILL, as by the kernel for memory, while the workers save at the time limit."""
    supervisors = processes_with(f"supervise\0{scene.run}\0")
    scene.slurm("scancel", "--signal=USR1", "--batch", scene.job)
    for pid in supervisors:
        os.kill(pid, signal.SIGKILL)


def node_back(scene: Scene) -> None:
    scene.cluster("fail", scene.broken)
    time.sleep(25)
    scene.cluster("heal", scene.broken)


def node_killed(scene: Scene) -> None:
    scene.cluster("fail", scene.broken)
    scene.wait_restart()
    scene.cluster("heal", scene.broken)


def node_frozen(scene: Scene) -> None:
    scene.cluster("fail", "--freeze", scene.broken)
    scene.wait_restart()
    scene.cluster("heal", scene.broken)


# In these the worker of the broken node dies, and new workers must be started there.


def slurmd_stopped(scene: Scene) -> None:
    init = scene.site.cluster.init(scene.broken) or 0
    slurmds = [pid for pid in same_namespace(init) if program(pid) == "slurmd"]
    for pid in slurmds:
        os.kill(pid, signal.SIGSTOP)
    os.kill(outside_pid(scene.run, rank=1), signal.SIGKILL)
    scene.wait()
    for pid in slurmds:
        os.kill(pid, signal.SIGCONT)


def clock_ahead(scene: Scene) -> None:
    """By more than the life of a credential."""
    scene.cluster("clock", scene.broken, "600")
    os.kill(outside_pid(scene.run, rank=1), signal.SIGKILL)
    scene.wait()
    scene.cluster("clock", scene.broken, "0")


def disk_full(scene: Scene) -> None:
    disk = SharedDirectory(scene.site.cluster.node_disk(scene.broken).path)
    disk.fill()
    os.kill(outside_pid(scene.run, rank=1), signal.SIGKILL)
    scene.wait()
    disk.free()


def disk_read_only(scene: Scene) -> None:
    """A read-only mount on top: what is open already can still be written."""
    above = "mount --bind /var/tmp /var/tmp; mount -o remount,bind,ro /var/tmp"
    scene.on_node("--mount", "sh", "-euc", above)
    os.kill(outside_pid(scene.run, rank=1), signal.SIGKILL)
    scene.wait()
    scene.on_node("--mount", "umount", "--lazy", "/var/tmp")


def device_error(scene: Scene) -> None:
    worker = outside_pid(scene.run, rank=1)
    with Path(f"/proc/{worker}/fd/2").open("a") as log:
        log.write("RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    os.kill(worker, signal.SIGKILL)


def link_down(scene: Scene) -> None:
    scene.on_node("--net", "ip", "link", "set", "eth0", "down")
    scene.wait()
    scene.on_node("--net", "ip", "link", "set", "eth0", "up")


def storage_full(scene: Scene) -> None:
    scene.cluster("shared", "full")
    time.sleep(12)
    scene.note()
    scene.cluster("shared", "free")


def cancelled_on_full(scene: Scene) -> None:
    scene.cluster("shared", "full")
    time.sleep(5)
    scene.call("cancel")
    time.sleep(5)
    queue = subprocess.run(["squeue", "-ho%i %T"], capture_output=True, text=True).stdout.strip()
    scene.notes.append(f"queue: {queue or 'empty'}")
    scene.cluster("shared", "free")
