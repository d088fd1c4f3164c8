"""A run in a container on a real Slurm, with Apptainer, or a stand-in if it is not installed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from end_to_end.bench import SLOWLY, processes_with
from end_to_end.scenes import SceneBench, scene, worker_of

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).resolve().parents[2]
# As `apptainer exec` does it for root: a mount namespace with the image as its root, the host's
# process ids, and the command in the place of the task's own process.
STAND_IN = """\
#!/bin/bash
set -eu
[ "$1" = exec ] || exit 9
shift
binds=(/proc /sys /dev /tmp /etc)
while [[ $1 == --* ]]; do
  [ "$1" = --bind ] || exit 8
  binds+=("${2%%:*}")
  shift 2
done
image=$1
[ -d "$image" ] || { echo "FATAL: could not open image $image: no such file" >&2; exit 255; }
export STAND_IN_BINDS="${binds[*]}"
exec unshare --mount bash -euc '
  mount -t tmpfs tmpfs /mnt
  cp -a "$0/." /mnt
  for folder in $STAND_IN_BINDS; do
    mkdir -p "/mnt$folder"
    mount --rbind "$folder" "/mnt$folder"
  done
  exec chroot /mnt "$@"' "$image" "${@:2}"
"""


def make_image(folder: Path) -> tuple[Path, dict[str, str]]:
    """An image with an interpreter of its own, and variables: the stand-in on the PATH."""
    environment = {}
    if shutil.which("apptainer") is None:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "apptainer").write_text(STAND_IN)
        (folder / "bin" / "apptainer").chmod(0o755)
        environment["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
    inside = folder / "image" / "opt" / "inside"
    inside.mkdir(parents=True)
    for name in ("usr", "etc", "proc", "sys", "dev", "tmp", "root"):
        (folder / "image" / name).mkdir()
    for name in ("bin", "sbin", "lib", "lib64"):
        (folder / "image" / name).symlink_to(f"usr/{name}")
    (inside / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (inside / "python").chmod(0o755)
    return folder / "image", environment


def submit(stage: SceneBench, name: str, image: Path, environment: dict[str, str]) -> None:
    shown = {str(ROOT), sys.prefix, sys.base_prefix, *(path for path in sys.path if path)}
    folders = ["/usr", *(p for p in sorted(shown) if Path(p).is_dir() and p[:5] != "/usr/")]
    container = {
        "runtime": "apptainer",
        "image": str(image),
        "mounts": folders,
        "python": "/opt/inside/python",
    }
    settings = (f"cluster.container={json.dumps(container)}", "slurm.backoff_s=0")
    options = [f"--set={text}" for text in (*settings, 'cluster.setup=["export FROM_SETUP=1"]')]
    stage.call(*stage.line(name), *SLOWLY, *options, env=environment)


def in_image(pid: int) -> bool:
    return Path(f"/proc/{pid}/root/opt/inside").is_dir()


@scene(order=0)
def test_a_run_in_a_container_is_killed_and_resumed(stage: SceneBench) -> None:
    image, environment = make_image(stage.runs.parent / "inside")
    submit(stage, "inside", image, environment)
    stage.wait_for_step("inside", 4)
    command = f"{stage.runs / 'inside'}\0--stage\0train"
    workers = [pid for pid in processes_with(command) if in_image(pid)]
    assert len(workers) == 4  # two launchers with a worker each
    stage.look("cancel", "inside")  # the signal must reach the workers, which save
    stage.wait("inside", "cancelled")
    saved = stage.attempt("inside", 0)
    assert (saved["class"], saved["checkpoint_after"]) == ("cancelled", saved["last_step"])
    stage.call("resume", "inside", env=environment)
    stage.wait_for_step("inside", saved["last_step"] + 2, attempt=1)
    os.kill(worker_of(stage.runs / "inside", rank=1), signal.SIGKILL)
    stage.wait("inside", "done")
    assert stage.endings("inside")[-2:] == [("node_failure", "restart"), ("done", "finish")]
    stage.compare_exactly(stage.rehearsed(), "inside")


@scene()
def test_an_image_that_cannot_be_started_ends_the_run_before_any_srun(stage: SceneBench) -> None:
    image, environment = make_image(stage.runs.parent / "unusable")
    (image / "opt" / "inside" / "python").write_text(
        "#!/bin/sh\necho no slurmllm here >&2\nexit 1\n"
    )
    submit(stage, "unusable", image, environment)
    stage.wait("unusable", "stopped")
    reason = stage.status("unusable")["reason"]
    assert "slurmllm cannot be started in" in reason
    assert "(exit code 1): no slurmllm here; correct the image" in reason
    attempts = list((stage.runs / "unusable" / "attempts").iterdir())
    assert [(folder / "health").exists() for folder in attempts] == [False]
