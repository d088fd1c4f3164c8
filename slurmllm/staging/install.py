"""A node's part of staging: the environment on its own disk, tested once, used by many attempts.

    environments/<fingerprint>/          the environment, in the user's private folder
    environments/<fingerprint>/.staged   written once it has been tested
    environments/<fingerprint>.lock      held while it is installed
    environments/<fingerprint>.use       held, shared, by its launchers

Whatever fails here is no fault of the attempt: its workers then run from the shared environment.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from slurmllm.errors import StorageError
from slurmllm.graphs.archive import open_archive
from slurmllm.run.artifact_records import EnvironmentManifest
from slurmllm.run.safe_files import check_private_folder, open_lock, os_error_text
from slurmllm.staging.archive import free_for, unpack

MAX_AGE_S = 14 * 86400.0  # of an environment on a node that no attempt has used
MAX_BYTES = 60_000_000_000  # of all environments on a node; those in use are kept
TEST_S = 600.0  # for the interpreter to import what a worker imports
WORKER_PYTHON = "SLURMLLM_WORKER_PYTHON"  # the interpreter of a node's workers
MARKER = ".staged"
_LIBRARIES = "libpython"  # a folder with the interpreter's own library and no other
# Imports what a worker imports, and prints the modules that are not of the environment.
_TEST = """
import json, os, sys
root, backend = sys.argv[1:]
import slurmllm.cli.main, slurmllm.train.worker, slurmllm.train.loop
import slurmllm.train.hooks.checkpoint, slurmllm.train.hooks.tensorboard
from slurmllm.backends.base import load_backend
load_backend(backend)
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
inside = (root + os.sep, "/usr/", "/lib")
outside = {name: f for name, f in files.items() if f and f[0] == "/" and not f.startswith(inside)}
print("staged " + json.dumps(outside))
"""

log = logging.getLogger(__name__)


class Staged(NamedTuple):
    """An environment on this node's own disk."""

    root: Path
    manifest: EnvironmentManifest
    origin: str  # `present`; from the `broadcast`; from the `archive` on the shared file system
    use: BinaryIO  # an open lock, which keeps other launchers from removing it

    def variables(self) -> dict[str, str]:
        """Return the variables that start workers from it and replace the shared folders."""
        manifest = self.manifest
        program = self.root / manifest.prefix / "bin" / manifest.python
        libraries = [str(self.root / _LIBRARIES)] if (self.root / _LIBRARIES).is_dir() else []
        libraries += [p for p in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if p]
        variables = {
            WORKER_PYTHON: str(program),
            "PATH": os.pathsep.join([str(program.parent), os.environ.get("PATH", os.defpath)]),
            "PYTHONNOUSERSITE": "1",  # it is in the home folder; its packages are staged
        }
        if libraries:
            variables["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
        if "PYTHONPATH" in os.environ:
            paths = (str(self.root / path) for path in manifest.python_path)
            variables["PYTHONPATH"] = os.pathsep.join(paths)
        return variables


def worker_python() -> str:
    """Return the interpreter of this node's workers: of the staged environment, or this one."""
    return os.environ.get(WORKER_PYTHON) or sys.executable


def install_environment(
    folder: Path, path: Path, backend: str, broadcast: Path | None, group: str | None = None
) -> Staged:
    """Return the environment on this node's own disk, unpacked and tested unless it is there.

    `folder`, in the user's private folder, is for all environments; `path` is the manifest on the
    shared file system, `broadcast` the archive on this node's own disk, if there is one.
    """
    manifest = EnvironmentManifest.load_trusted(path, group)
    root = folder / manifest.fingerprint
    with ExitStack() as opened:
        try:
            check_private_folder(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)
            # The launchers of --local share one disk: one unpacks, the others find it present.
            with open_lock(root.with_name(f"{root.name}.lock")) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                use = opened.enter_context(open_lock(root.with_name(f"{root.name}.use")))
                fcntl.flock(use, fcntl.LOCK_SH)
                if read_marker(root) == manifest.fingerprint:
                    os.utime(root / MARKER)
                    origin = "present"
                else:
                    _remove_old(folder, keep=root)
                    origin = _unpack(root, path, manifest, broadcast, group)
                    _test(Staged(root, manifest, origin, use), backend)
                    marker = {"fingerprint": root.name, "bytes": manifest.unpacked_bytes}
                    (root / MARKER).write_text(json.dumps(marker), encoding="utf-8")
        except OSError as error:
            raise StorageError(
                f"cannot stage the Python environment into {folder} on {os.uname().nodename}: "
                f"{os_error_text(error)}"
            ) from error
        opened.pop_all()  # the lock is held as long as the launcher lives
    return Staged(root, manifest, origin, use)


def read_marker(root: Path) -> str | None:
    """Return the fingerprint of a complete environment; None if it is not complete."""
    try:
        return str(json.loads((root / MARKER).read_bytes())["fingerprint"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _unpack(
    root: Path, path: Path, manifest: EnvironmentManifest, broadcast: Path | None, group: str | None
) -> str:
    for left in root.parent.glob(f".{root.name}.*"):  # of a launcher that was killed
        shutil.rmtree(left, ignore_errors=True)
    shutil.rmtree(root, ignore_errors=True)  # incomplete: it has no marker
    free_for(root.parent, manifest.unpacked_bytes)
    stream, origin = None, "broadcast"
    if broadcast is not None:
        try:
            stream = open_archive(broadcast, manifest.archive_sha256)
        except FileNotFoundError:
            pass  # the supervisor has logged why; --local broadcasts nothing
        except (OSError, ValueError) as error:
            log.warning("environment: the broadcast archive %s is not used: %s", broadcast, error)
    if stream is None:
        origin = "archive"
        try:
            stream = open_archive(path.with_name(manifest.archive), manifest.archive_sha256, group)
        except ValueError as error:
            with suppress(OSError):
                path.unlink()  # the next attempt packs it again
            raise OSError(0, f"{manifest.archive} is damaged: {error}") from error
    unpacked = Path(tempfile.mkdtemp(prefix=f".{root.name}.", dir=root.parent))
    try:
        unpack(stream, manifest.archive, unpacked)
        _complete(unpacked, root, manifest)
        unpacked.replace(root)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    return origin


def _complete(unpacked: Path, root: Path, manifest: EnvironmentManifest) -> None:
    """Add what holds absolute paths: the interpreter's configuration, and links."""
    prefix, base = unpacked / manifest.prefix, root / "base" / "bin"
    programs = prefix / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    program = programs / manifest.python
    if not program.exists():
        real = Path(manifest.home or base) / manifest.python
        program.symlink_to(real if manifest.home else f"../../base/bin/{manifest.python}")
    for name in ("python", "python3"):
        if not (programs / name).exists():
            (programs / name).symlink_to(manifest.python)
    system = "true" if manifest.system_site else "false"
    (prefix / "pyvenv.cfg").write_text(
        f"home = {manifest.home or base}\ninclude-system-site-packages = {system}\n",
        encoding="utf-8",
    )
    libraries = sorted((unpacked / "base" / "lib").glob("libpython*.so*"))
    if libraries:  # the program may look for it at the place where it was built
        (unpacked / _LIBRARIES).mkdir()
        for library in libraries:
            (unpacked / _LIBRARIES / library.name).symlink_to(f"../base/lib/{library.name}")


def _test(staged: Staged, backend: str) -> None:
    """Import from the environment what a worker imports; OSError with the reason if that fails."""
    variables = staged.variables()
    command = [variables[WORKER_PYTHON], "-P", "-c", _TEST, str(staged.root), backend]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TEST_S,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(0, f"its interpreter takes more than {TEST_S:.0f} s to import") from error
    marked = [line for line in done.stdout.splitlines() if line.startswith("staged ")]
    if done.returncode or not marked:
        last = done.stderr.strip().rpartition("\n")[2][:300]
        raise OSError(0, f"its interpreter fails with exit code {done.returncode}: {last}")
    outside = json.loads(marked[-1].removeprefix("staged "))
    if outside:
        name, file = sorted(outside.items())[0]
        raise OSError(0, f"{len(outside)} modules are not in it, such as {name} ({file})")


def _remove_old(folder: Path, keep: Path) -> None:
    """Remove environments by age and total size, unless a launcher uses them."""
    environments: list[tuple[float, Path, int]] = []
    for marker in folder.glob(f"*/{MARKER}"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            size = int(json.loads(marker.read_bytes())["bytes"])
            environments.append((marker.stat().st_mtime, marker.parent, size))
    total = sum(size for _, _, size in environments)
    for used_at, root, size in sorted(environments):
        if root == keep or (time.time() - used_at <= MAX_AGE_S and total <= MAX_BYTES):
            continue
        with (
            suppress(OSError),
            open_lock(root.with_name(f"{root.name}.lock")) as lock,
            open_lock(root.with_name(f"{root.name}.use")) as use,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (root / MARKER).unlink()  # first: what is left of it must not be used
            shutil.rmtree(root)
            total -= size
            log.info("environment: removed %s, which no attempt uses", root)
