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
    """A file of the environment."""

    name: str
    source: Path
    size: int
    mtime: int  # whole seconds, as in a .pyc file, which is valid only for its source's
    mode: int
    content: bytes | None = None  # in place of the source's
    link: str = ""  # target of a symbolic link, in the same folder


@dataclass(frozen=True)
class Contents:
    """A staged environment, before it is packed."""

    files: tuple[StagedFile, ...]
    prefix: str  # folder in the archive whose bin/python is run: `base` or `env`
    home: str  # folder of the base interpreter, if that is not staged
    system_site: bool  # whether the base interpreter's own packages are used, from /usr
    python_path: tuple[str, ...]  # folders in the archive that replace those of $PYTHONPATH

    @property
    def fingerprint(self) -> str:
        """Digest of names, sizes and times of all files but caches, and of the layout."""
        layout = (sys.version, self.prefix, self.home, self.system_site, self.python_path)
        digest = hashlib.sha256(repr(layout).encode())
        for name, identity in self._identities.items():
            digest.update(f"{name}\0{identity}\n".encode())
        return digest.hexdigest()[:32]

    @property
    def _identities(self) -> dict[str, str]:
        """Name → size, time and content of all files but caches."""
        return {
            file.name: f"{file.size} {file.link or file.mtime} "
            + ("" if file.content is None else hashlib.sha256(file.content).hexdigest())
            for file in self.files
            if not file.name.endswith(".pyc")  # written by whoever imports a module first
        }

    def difference(self, other: Contents) -> str:
        """Return the name of a file that is not the same in both; empty if there is none."""
        different = self._identities.items() ^ other._identities.items()
        return min((name for name, _ in different), default="")

    @property
    def unpacked_bytes(self) -> int:
        return sum(-(-max(file.size, 1) // _BLOCK) * _BLOCK for file in self.files)


def environment_contents() -> Contents:
    """List the files of the environment that this process runs in."""
    base, environment = Path(sys.base_prefix), Path(sys.prefix)
    staged_base = not _is_system(base)
    prefix = "base" if staged_base and base == environment else "env"
    trees = _complete_folders(base, environment, prefix)
    others = {path: f"path/{index}" for index, path in enumerate(_other_folders(base, trees))}
    trees |= {name: path for path, name in others.items() if path.name in _SITE}
    files: list[StagedFile] = []
    if staged_base:  # the program, and libraries such as libpython
        programs = {f"base/bin/{PYTHON}": _base_executable()}
        for folder in {base / "lib", base / sys.platlibdir}:
            programs |= {f"base/{folder.name}/{path.name}": path for path in folder.glob("*.so*")}
        files += (file for name, path in programs.items() if (file := _regular(path, name)))
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, path in trees.items():
            files += _walk(path, name, pool, unused=_UNUSED if path.name == PYTHON else ())
        for path, name in others.items():
            if path.name not in _SITE:
                files += _packages(path, name, pool)
    site = f"{prefix}/lib/{PYTHON}/site-packages"
    if _is_system(environment):
        site = f"env/lib/{PYTHON}/site-packages"
    else:
        files += _programs(environment / "bin", f"{prefix}/bin")
    files = [_without_paths(file, trees, prefix) for file in files]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    python_path = [Path(path) for path in paths if path]
    listed = [name for path, name in others.items() if path not in python_path]
    lines = "".join(f"../../../../{name}\n" for name in listed).encode()
    files.append(StagedFile(f"{site}/00-staged.pth", Path(), len(lines), 0, 0o644, lines))
    unique = {file.name: file for file in files}
    system_site = any(Path(p).name in _SITE and _is_system(Path(p)) for p in sys.path if p)
    return Contents(
        files=tuple(unique[name] for name in sorted(unique)),
        prefix=prefix,
        home="" if staged_base else str(_base_executable().parent),
        system_site=not staged_base and system_site,
        python_path=tuple(others[path] for path in python_path if path in others),
    )


def _complete_folders(base: Path, environment: Path, prefix: str) -> dict[str, Path]:
    """Return name in the archive → folder that is staged whole: the library and site-packages."""
    trees: dict[str, Path] = {}
    if not _is_system(base):
        libraries = (sysconfig.get_path("stdlib"), base / sys.platlibdir / PYTHON)
        for library in (*libraries, sysconfig.get_path("include")):
            if (path := Path(library)).is_dir():
                trees[f"base/{path.relative_to(base)}"] = path
    for path in map(Path, (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))):
        if path.is_dir() and not _is_system(path):
            trees[f"{prefix}/{path.relative_to(environment)}"] = path
    return trees


def _other_folders(base: Path, trees: dict[str, Path]) -> Iterator[Path]:
    """Yield the further folders of `sys.path`, and those of editable packages."""
    library = base / sys.platlibdir
    for path in dict.fromkeys([*(Path(path) for path in sys.path if path), *_editable()]):
        in_library = (
            not _is_system(base) and path.is_relative_to(library) and path.name not in _SITE
        )
        if path.is_dir() and not (path in trees.values() or _is_system(path) or in_library):
            yield path


def _is_system(path: Path) -> bool:
    return any(path.is_relative_to(system) for system in _SYSTEM)


def _base_executable() -> Path:
    # In a virtual environment, sys.executable is a link to this one.
    return Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))


def _editable() -> list[Path]:
    """Return the folders of packages that setuptools' finders, and not `sys.path`, lead to."""
    folder = Path(slurmllm.__file__).resolve().parent.parent
    folders = [] if any(folder == Path(path).resolve() for path in sys.path) else [folder]
    for name, module in tuple(sys.modules.items()):
        if name.startswith("__editable___"):
            folders += [Path(place).parent for place in getattr(module, "MAPPING", {}).values()]
    return folders


def _packages(folder: Path, name: str, pool: ThreadPoolExecutor) -> Iterator[StagedFile]:
    """Yield the packages and modules of a folder that may hold a whole checkout."""
    shipped = shipped_dir()
    for entry in sorted(folder.iterdir()):
        inner = f"{name}/{entry.name}"
        if entry.is_dir():
            is_package = (entry / "__init__.py").is_file()
            described = entry.suffix in (".dist-info", ".egg-info")
            is_data = folder.resolve() == shipped and entry.name in ("configs", "sbatch")
            if is_package or described or is_data:
                yield from _walk(entry, inner, pool)
        elif entry.suffix in (".py", ".so") and (file := _regular(entry, inner)) is not None:
            yield file


def _walk(
    folder: Path, name: str, pool: ThreadPoolExecutor, unused: Container[str] = ()
) -> Iterator[StagedFile]:
    """Yield all files of a folder but those of `unused` folders, and of linked folders once."""
    seen = {os.path.realpath(folder)}
    level = [(folder, name)]
    while level:
        below: list[tuple[Path, str]] = []
        for files, folders in pool.map(_list, *zip(*level, strict=True)):
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
    """Return the files of a folder, and the folders in it: path, name, whether it is a link."""
    files, folders = [], []
    cache_ending = f".{sys.implementation.cache_tag}.pyc"
    with os.scandir(folder) as entries:
        for entry in entries:
            path, inner = Path(entry.path), f"{name}/{entry.name}"
            if entry.is_dir():
                folders.append((path, inner, entry.is_symlink()))
            elif folder.name != "__pycache__" or entry.name.endswith(cache_ending):
                files.append(_regular(path, inner))
    return [file for file in files if file is not None], folders


def _regular(path: Path, name: str) -> StagedFile | None:
    """Return a file, or a link to one; None for a dangling link, a pipe or the like."""
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
    """Yield the environment's programs; those in Python run by the interpreter next to them."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        file = None if path.name.startswith("python") else _regular(path, f"{name}/{path.name}")
        if file is None or file.link:
            continue
        with path.open("rb") as stream:
            first = stream.read(512).partition(b"\n")[0]
        if first.startswith(b"#!") and b"python" in first:
            rest = path.read_bytes().partition(b"\n")[2]
            # Readable as sh and as Python, as pip writes it where a path is too long for `#!`.
            head = b"#!/bin/sh\n'''exec' \"$(dirname \"$0\")/python\" \"$0\" \"$@\"\n' '''\n"
            file = file._replace(content=head + rest, size=len(head + rest))
        yield file


def _without_paths(file: StagedFile, trees: dict[str, Path], prefix: str) -> StagedFile:
    """Return a .pth file of the environment without its paths, which are in `00-staged.pth`."""
    folder, _, name = file.name.rpartition("/")
    if not name.endswith(".pth") or folder not in trees or not folder.startswith(prefix):
        return file
    lines = file.source.read_bytes().splitlines(keepends=True)
    content = b"".join(line for line in lines if line.startswith((b"import ", b"import\t")))
    return file._replace(content=content, size=len(content))
