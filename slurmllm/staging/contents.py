"""What a staged environment consists of: the files of this interpreter that a worker may need.

    base/    the interpreter, its standard library, headers and shared libraries
    env/     the virtual environment, if this interpreter runs in one: packages and their programs
    path/N/  the other folders of `sys.path`: of $PYTHONPATH, of .pth files, of editable installs

The interpreter finds all of it relative to its own place, so the archive can be unpacked anywhere.
What is under /usr belongs to the nodes' own image and is not staged.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import sysconfig
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import slurmllm
from slurmllm.config.profiles import shipped_dir

PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
# Of the standard library's folder: nothing imports them but Python's own tests, editor and demos;
# the site-packages of a base interpreter are no part of a virtual environment.
# The folder of LIBPL has the static library, with which programs embed Python.
_UNUSED = (
    *("test", "idlelib", "turtledemo", "ensurepip", "site-packages"),
    Path(sysconfig.get_config_var("LIBPL") or "").name,
)
_SYSTEM = tuple(Path(name) for name in ("/usr", "/lib", "/lib64", "/bin"))
_SITE = ("site-packages", "dist-packages")
_BLOCK = 4096  # bytes that a file takes of a disk, or a multiple
_THREADS = 8  # that list folders: on a shared file system each waits for the server


class StagedFile(NamedTuple):
    """A file of the environment.

    `content` replaces that of `source`. `link` is the target of a symbolic link, which is in the
    same folder.
    """

    name: str
    source: Path
    size: int
    mtime: int  # whole seconds, as in a .pyc file, which is valid only for its source's
    mode: int
    content: bytes | None = None
    link: str = ""


@dataclass(frozen=True)
class Contents:
    """A staged environment, before it is packed.

    Attributes:
        prefix: The folder in the archive whose bin/python is run: `base` or `env`.
        home: The folder of the base interpreter, if that is not staged.
        system_site: Whether the base interpreter's own packages are used, from /usr.
        python_path: The folders in the archive that replace those of $PYTHONPATH.
    """

    files: tuple[StagedFile, ...]
    prefix: str
    home: str
    system_site: bool
    python_path: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Digest of names, sizes and times of all files but caches, and of the layout."""
        layout = (sys.version, self.prefix, self.home, self.system_site, self.python_path)
        digest = hashlib.sha256(repr(layout).encode())
        for name, known in self._known.items():
            digest.update(f"{name}\0{known}\n".encode())
        return digest.hexdigest()[:32]

    @property
    def _known(self) -> dict[str, str]:
        """By name, what is known of the content of all files but caches."""
        return {
            file.name: f"{file.size} {file.link or file.mtime} "
            + ("" if file.content is None else hashlib.sha256(file.content).hexdigest())
            for file in self.files
            if not file.name.endswith(".pyc")  # written by whoever imports a module first
        }

    def difference(self, other: Contents) -> str:
        """The name of a file that is not the same in both; empty if there is none."""
        mine, theirs = self._known, other._known
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        return min(names, default="")

    @property
    def unpacked_bytes(self) -> int:
        return sum(-(-max(file.size, 1) // _BLOCK) * _BLOCK for file in self.files)


def own_contents() -> Contents:
    """List the files of the environment that this process runs in.

    Raises:
        OSError: A folder cannot be read.
    """
    base, own = Path(sys.base_prefix), Path(sys.prefix)
    staged_base = not _is_system(base)
    virtual = base != own
    prefix = "base" if staged_base and not virtual else "env"
    trees: dict[str, Path] = {}  # folder in the archive → complete folder
    packages: dict[str, Path] = {}  # folder in the archive → folder with packages among others
    files: list[StagedFile] = []
    if staged_base:
        files += _interpreter(base)
        libraries = (sysconfig.get_path("stdlib"), base / sys.platlibdir / PYTHON)
        for each in (*libraries, sysconfig.get_path("include")):
            if Path(each).is_dir():
                trees[f"base/{Path(each).relative_to(base)}"] = Path(each)
    site = Path(sysconfig.get_path("purelib"))
    for path in dict.fromkeys((site, Path(sysconfig.get_path("platlib")))):
        if path.is_dir() and not _is_system(path):
            trees[f"{prefix}/{path.relative_to(own)}"] = path
    others: dict[Path, str] = {}
    given = [Path(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    for path in [Path(p) for p in sys.path if p] + _editable():
        known = any(path == tree for tree in trees.values()) or path in others
        if known or _is_system(path) or not path.is_dir():
            continue
        if staged_base and path.is_relative_to(base / sys.platlibdir) and path.name not in _SITE:
            continue  # of the standard library
        others[path] = f"path/{len(others)}"
    for path, name in others.items():
        (trees if path.name in _SITE else packages)[name] = path
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, path in trees.items():
            files += _walk(path, name, pool, unused=_UNUSED if path.name == PYTHON else ())
        for name, path in packages.items():
            files += _packages(path, name, pool)
    if not _is_system(own):
        files += _programs(own / "bin", f"{prefix}/bin")
    listed = [others[path] for path in others if path not in given]
    files = [_without_paths(f, trees, prefix) for f in files]
    folder = f"{prefix}/lib/{PYTHON}/site-packages"
    if _is_system(own):
        folder = f"env/lib/{PYTHON}/site-packages"
    lines = "".join(f"../../../../{name}\n" for name in listed).encode()
    pth = StagedFile(f"{folder}/00-staged.pth", Path(), len(lines), 0, 0o644, lines)
    unique = {file.name: file for file in [*files, pth]}
    return Contents(
        files=tuple(unique[name] for name in sorted(unique)),
        prefix=prefix,
        home="" if staged_base else str(Path(_base_executable()).parent),
        system_site=not staged_base and any(Path(p).name in _SITE and _is_system(Path(p))
                                            for p in sys.path),
        python_path=tuple(others[path] for path in given if path in others),
    )  # fmt: skip


def _is_system(path: Path) -> bool:
    return any(path.is_relative_to(system) for system in _SYSTEM)


def _base_executable() -> str:
    # In a virtual environment, sys.executable is a link to this one.
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _interpreter(base: Path) -> Iterator[StagedFile]:
    """The program, and the libraries directly under the prefix, such as libpython or conda's."""
    program = _regular(Path(_base_executable()), f"base/bin/{PYTHON}")
    if program is not None:
        yield program
    for folder in {base / "lib", base / sys.platlibdir}:
        for path in sorted(folder.glob("*.so*")):
            found = _regular(path, f"base/{folder.name}/{path.name}")
            if found is not None:
                yield found


def _editable() -> list[Path]:
    """The folders of packages that setuptools' finders, and not `sys.path`, lead to."""
    own = Path(slurmllm.__file__).resolve().parent
    found = [] if any(own.parent == Path(p).resolve() for p in sys.path) else [own.parent]
    for name, module in tuple(sys.modules.items()):
        if name.startswith("__editable___"):
            places = getattr(module, "MAPPING", {}).values()
            found += [Path(place).parent for place in places if Path(place).parent not in found]
    return found


def _packages(folder: Path, name: str, pool: ThreadPoolExecutor) -> Iterator[StagedFile]:
    """The packages and modules of a folder that may hold a whole checkout."""
    shipped = shipped_dir()
    for entry in sorted(folder.iterdir()):
        inner = f"{name}/{entry.name}"
        if entry.is_dir():
            is_package = (entry / "__init__.py").is_file()
            described = entry.suffix in (".dist-info", ".egg-info")
            own = folder.resolve() == shipped and entry.name in ("configs", "sbatch")
            if is_package or described or own:
                yield from _walk(entry, inner, pool)
        elif entry.suffix in (".py", ".so"):
            found = _regular(entry, inner)
            if found is not None:
                yield found


def _walk(
    folder: Path, name: str, pool: ThreadPoolExecutor, unused: Container[str] = ()
) -> Iterator[StagedFile]:
    """All files of a folder, but those of `unused` folders in it, and of linked folders once."""
    seen = {os.path.realpath(folder)}
    level = [(folder, name)]
    while level:
        below: list[tuple[Path, str]] = []
        for files, folders in pool.map(lambda one: _list(*one), level):
            yield from files
            for path, inner, linked in folders:
                if path.parent == folder and path.name in unused:
                    continue
                if linked:
                    real = os.path.realpath(path)
                    if real in seen:
                        continue
                    seen.add(real)
                below.append((path, inner))
        level = below


def _list(folder: Path, name: str) -> tuple[list[StagedFile], list[tuple[Path, str, bool]]]:
    """The files of a folder, and the folders in it: path, name, whether it is a link."""
    files, folders = [], []
    own_cache = f".{sys.implementation.cache_tag}.pyc"
    with os.scandir(folder) as entries:
        for entry in entries:
            path, inner = Path(entry.path), f"{name}/{entry.name}"
            if entry.is_dir():
                folders.append((path, inner, entry.is_symlink()))
            elif folder.name != "__pycache__" or entry.name.endswith(own_cache):
                found = _regular(path, inner)
                if found is not None:
                    files.append(found)
    return files, folders


def _regular(path: Path, name: str) -> StagedFile | None:
    """A file, or a link to one; None for a dangling link, a pipe or the like."""
    try:
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            target = str(path.readlink())
            info = path.stat()
            if "/" not in target and stat.S_ISREG(info.st_mode):
                return StagedFile(name, path, 0, 0, 0o777, link=target)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(info.st_mode):
        return None
    mode = 0o755 if info.st_mode & stat.S_IXUSR else 0o644
    return StagedFile(name, path, info.st_size, int(info.st_mtime), mode)


def _programs(folder: Path, name: str) -> Iterator[StagedFile]:
    """The programs of the environment; those in Python run by the interpreter next to them."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        found = None if path.name.startswith("python") else _regular(path, f"{name}/{path.name}")
        if found is None or found.link:
            continue
        with path.open("rb") as stream:
            first = stream.read(512).partition(b"\n")[0]
        if first.startswith(b"#!") and b"python" in first:
            rest = path.read_bytes().partition(b"\n")[2]
            # Readable as sh and as Python, as pip writes it where a path is too long for `#!`.
            head = b"#!/bin/sh\n'''exec' \"$(dirname \"$0\")/python\" \"$0\" \"$@\"\n' '''\n"
            found = found._replace(content=head + rest, size=len(head + rest))
        yield found


def _without_paths(file: StagedFile, trees: dict[str, Path], prefix: str) -> StagedFile:
    """A .pth file of the environment without its paths, which are in `00-staged.pth`."""
    folder, _, name = file.name.rpartition("/")
    if not name.endswith(".pth") or folder not in trees or not folder.startswith(prefix):
        return file
    lines = file.source.read_bytes().splitlines(keepends=True)
    content = b"".join(line for line in lines if line.startswith((b"import ", b"import\t")))
    return file._replace(content=content, size=len(content))
