"""A run in a container on a real Slurm, with Apptainer, or a stand-in if it is not installed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from end_to_end.bench import SLOWLY, Bench, processes_with
from end_to_end.slurm_runs import Cluster, outside_pid, submit, wait

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


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An image with an interpreter of its own, and Apptainer, or the stand-in, on the PATH."""
    if shutil.which("apptainer") is None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "apptainer").write_text(STAND_IN)
        (tmp_path / "bin" / "apptainer").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    inside = tmp_path / "image" / "opt" / "inside"
    inside.mkdir(parents=True)
    for name in ("usr", "etc", "proc", "sys", "dev", "tmp", "root"):
        (tmp_path / "image" / name).mkdir()
    for name in ("bin", "sbin", "lib", "lib64"):
        (tmp_path / "image" / name).symlink_to(f"usr/{name}")
    (inside / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (inside / "python").chmod(0o755)
    return tmp_path / "image"


def settings(image: Path) -> tuple[str, ...]:
    shown = {str(ROOT), sys.prefix, sys.base_prefix, *(path for path in sys.path if path)}
    folders = ["/usr", *(p for p in sorted(shown) if Path(p).is_dir() and p[:5] != "/usr/")]
    container = {
        "runtime": "apptainer",
        "image": str(image),
        "mounts": folders,
        "python": "/opt/inside/python",
    }
    return (
        f"--set=cluster.container={json.dumps(container)}",
        '--set=cluster.setup=["export FROM_SETUP=1"]',
        *SLOWLY,
        "--set=slurm.backoff_s=0",
    )


def test_a_run_in_a_container_is_killed_and_resumed(
    bench: Bench, inputs: tuple[str, ...], image: Path, rehearsed_on_slurm: str
) -> None:
    submit(bench, inputs, "inside", *settings(image))
    bench.wait_for_step("inside", 4)
    workers = [
        pid for pid in processes_with(f"{bench.runs / 'inside'}\0--stage\0train") if root(pid)
    ]
    assert len(workers) == 4  # two launchers with a worker each
    bench.look("cancel", "inside")  # the signal must reach the workers, which save
    wait(bench, "inside", "cancelled")
    saved = bench.attempt("inside", 0)
    assert (saved["class"], saved["checkpoint_after"]) == ("cancelled", saved["last_step"])
    bench.call("resume", "inside")
    bench.wait_for_step("inside", saved["last_step"] + 2, attempt=1)
    os.kill(outside_pid(bench.runs / "inside", rank=1), signal.SIGKILL)
    wait(bench, "inside", "done")
    assert bench.endings("inside")[-2:] == [("node_failure", "restart"), ("done", "finish")]
    bench.compare_exactly(rehearsed_on_slurm, "inside")


def root(pid: int) -> bool:
    """Whether a process is in the image."""
    return Path(f"/proc/{pid}/root/opt/inside").is_dir()


def test_an_image_that_cannot_be_started_ends_the_run_before_any_srun(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...], image: Path
) -> None:
    (image / "opt" / "inside" / "python").write_text(
        "#!/bin/sh\necho no slurmllm here >&2\nexit 1\n"
    )
    submit(bench, inputs, "unusable", *settings(image))
    wait(bench, "unusable", "stopped")
    shown = bench.status("unusable")
    assert "slurmllm cannot be started in" in shown["reason"]
    assert "(exit code 1): no slurmllm here; correct the image" in shown["reason"]
    attempts = list((bench.runs / "unusable" / "attempts").iterdir())
    assert [(folder / "health").exists() for folder in attempts] == [False]
