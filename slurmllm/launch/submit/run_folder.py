"""The directories of new runs: their names, who may write into them, and their removal."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import stat
from pathlib import Path

from slurmllm.core.config.cluster import Cluster
from slurmllm.core.config.load import load
from slurmllm.core.errors import RunError, StorageError
from slurmllm.core.run.records import JobsRecord, SweepRecord
from slurmllm.core.run.rundir import RUN_NAME, RunDir, SweepDir, is_run, storage_errors
from slurmllm.core.run.safe_files import group_id, untrusted_error, user_name
from slurmllm.launch.supervise.attempts import is_running


def new_run(root: Path, name: str | None, recipe: str) -> RunDir:
    """Return the directory of a new run, by default the recipe's name with the next number."""
    if name is None:
        taken = {entry.name for entry in root.iterdir()} if root.is_dir() else set()
        number = next(n for n in range(1, 10**6) if f"{recipe}-{n:03d}" not in taken)
        return RunDir(root / f"{recipe}-{number:03d}")
    if not RUN_NAME.fullmatch(name):
        raise RunError(
            f"run name {name!r}: must be letters, digits, '.', '_' and '-', at most 100, "
            "beginning with a letter or digit; choose another --name"
        )
    run = RunDir(root / name)
    if _is_left_behind(run):
        return run
    if run.path.exists() or is_run(run.path):
        reason = "exists"
        if is_run(run.path):
            owner = load(run.config).recipe.name
            hint = f"`slurmllm resume {name}` continues it" if owner == recipe else "not this one"
            reason = f"is a run of recipe {owner!r} ({hint})"
        raise RunError(f"run name {name!r} is taken: {run.path} {reason}; choose another --name")
    return run


# What `submit` writes into a new directory before a job is recorded, and its temporary names.
_BEFORE_JOBS = re.compile(
    r"((config\.yaml|secrets|plan|lock|jobs|sweep)(\.json)?|scripts|logs|graphs)(\.removing)?"
    r"|\.[a-z]+\.(yaml|json)\.[0-9a-f]{8}"
)


def _is_left_behind(run: RunDir) -> bool:
    """Whether a killed `submit` left this directory: it holds nothing else, and no jobs."""
    try:
        names = [entry.name for entry in run.path.iterdir()]
        submissions = JobsRecord.of(run).submissions
        # Between the jobs of precompile and train.
        half = len(submissions) == 1 and not (submissions[0].local or submissions[0].train_job)
        begun = submissions or any(run.path.glob("logs/*"))
        if run.path.lstat().st_uid != os.geteuid() or (begun and not half):
            return False
        sweep = SweepRecord.find(SweepDir(run.path).record)
        if sweep is not None:  # it has runs; without a lock, its process counts
            alive = sweep.pid is None or is_running(sweep, b"slurmllm")
            jobs = [*run.path.glob("*/jobs.json"), *run.path.glob("graphs/*/jobs.json")]
            if alive or jobs or sweep.host != socket.gethostname():
                return False
            names = [name for name in names if not name.startswith(f"{run.name}-")]
    except (OSError, StorageError):
        return False
    return all(map(_BEFORE_JOBS.fullmatch, names))


def remove_half_record(run: RunDir) -> None:
    """Remove a killed submit's record; RunError if another submit was faster to take the name."""
    if _is_left_behind(run):
        run.jobs.unlink(missing_ok=True)  # its job is cancelled by `submit_jobs`
    else:
        raise RunError(f"run name {run.name!r} is taken by another submit; choose another --name")


def claim_run(root: Path, name: str | None, recipe: str, cluster: Cluster) -> RunDir:
    """Create the run's directory; of two simultaneous submits only one gets a name.

    With `cluster.runs_group` it belongs to that group, and so does what is made in it.

    Raises:
        RunError: the name is taken.
    """
    while True:
        run = new_run(root, name, recipe)
        path = run.path
        with storage_errors(f"cannot make {path}", "choose another --runs-dir"):
            try:
                _make_folder(cluster, root)
                if name is not None and _is_left_behind(run):
                    if not SweepDir(path).record.exists():
                        return run
                    shutil.rmtree(path)
                # Atomic, on NFS too: the name belongs to who created it.
                path.mkdir(mode=0o777 & ~run_umask(cluster))
                if (group := cluster.runs_group) is not None:
                    if error := group_error(group):
                        raise PermissionError(errno.EPERM, error, str(path))
                    os.chown(path, -1, group_id(group) or 0)
                    # Afterwards: chown clears the setgid bit.
                    path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_ISGID)
                return run
            except FileExistsError:  # another submit was faster: take the next name
                if not root.is_dir():
                    raise RunError(
                        f"--runs-dir: {root} is not a folder; name another one"
                    ) from None
            except NotADirectoryError:
                raise RunError(f"--runs-dir: {root} is below a file; name another one") from None


def remove_unsubmitted(run: RunDir) -> None:
    """Remove the directory of a run without jobs, so that its name is free again."""
    if not run.jobs.is_file():
        shutil.rmtree(run.path, ignore_errors=True)


def run_umask(cluster: Cluster) -> int:
    """Return the umask of a run's jobs: this process's, which also keeps other users out."""
    current = re.search(
        r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text("utf-8"), re.MULTILINE
    )
    trusted = cluster.trusted_group
    readers = cluster.runs_group
    limit = 0o002 if trusted is not None and readers in (None, trusted) else 0o022
    if readers is not None:
        limit |= 0o005
    return limit | (int(current[1], 8) if current else 0)


def make_folders(cluster: Cluster, *folders: Path) -> None:
    """Make folders, and those above them, that other users may not write into.

    Raises:
        StorageError: the file system refuses one.
        RunError: by the umask, this user could not write into them.
    """
    for folder in folders:
        with storage_errors(f"cannot make {folder}", "choose another folder"):
            _make_folder(cluster, folder)


def _make_folder(cluster: Cluster, folder: Path) -> None:
    umask = run_umask(cluster)
    if masked := umask & 0o700:
        raise RunError(
            f"the umask removes your own permissions ({masked:03o}) on new files; set `umask 022`"
        )
    missing = [path for path in folder.parents if not path.exists()]
    for path in (*reversed(missing), folder):
        path.mkdir(0o777 & ~umask, exist_ok=True)


def require_own(run: RunDir, group: str | None) -> None:
    """Raise RunError if other users may have put what would run into the directory of a run."""
    owner = run.path.stat().st_uid
    if owner != os.geteuid():
        raise RunError(
            f"{run.name} belongs to {user_name(owner)}, whose recipe would run as you; "
            "start a run of your own, from its weights with `slurmllm submit RECIPE --set "
            "train.init_from=CHECKPOINT`"
        )
    for folder in (run.path, run.script("train").parent):
        if folder.exists() and (why := untrusted_error(folder.stat(), group)):
            raise RunError(
                f"{folder}: {why}, and could have it run a program as you; look at what is in it, "
                f"then `chmod -R go-w {run.path}`, or set cluster.trusted_group"
            )


def group_error(group: str) -> str | None:
    """Return why this user cannot give files to a group; None for root and the members."""
    if (number := group_id(group)) is None:
        return f"there is no group {group} on this machine"
    if os.geteuid() and number not in (os.getegid(), *os.getgroups()):
        return f"you are not a member of the group {group}"
    return None
