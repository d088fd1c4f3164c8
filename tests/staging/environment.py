"""A virtual environment of its own with what a worker of the rehearsal backend imports.

Staging the whole development environment would take gigabytes of disk in every test.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from packaging.requirements import Requirement

import slurmllm

LARGE = ("torch", "scipy", "matplotlib", "plotly", "grpcio", "pillow", "hf-xet")
LARGE += ("tensorboard-data-server",)


def make_environment(folder: Path, without: tuple[str, ...] = LARGE) -> Path:
    """Make a virtual environment with links to the packages in use; returns its interpreter.

    slurmllm itself is found through a .pth file, as in an editable install.
    """
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site, programs = folder / "lib" / version / "site-packages", folder / "bin"
    for path in (site, programs):
        path.mkdir(parents=True)
    base = Path(sys.base_prefix) / "bin" / version
    for name in ("python", "python3"):
        (programs / name).symlink_to(base)
    (folder / "pyvenv.cfg").write_text(
        f"home = {base.parent}\ninclude-system-site-packages = false\n"
    )
    (site / "checkout.pth").write_text(f"{Path(slurmllm.__file__).parent.parent}\n")
    for distribution in _closure("slurmllm", set(without)):
        for name in {Path(str(file)).parts[0] for file in distribution.files or ()}:
            source = Path(str(distribution.locate_file(name)))
            target = site / name
            usual = name not in ("..", "__pycache__", "bin", "share")
            if usual and source.exists() and not target.exists():
                target.symlink_to(source)
    return programs / "python"


def _closure(name: str, without: set[str]) -> list[importlib.metadata.Distribution]:
    """The installed distributions that one requires, directly or not, without its extras."""
    distributions: dict[str, importlib.metadata.Distribution] = {}
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name in distributions or name in without:
            continue
        try:
            distributions[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in distributions[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name.lower())
    del distributions["slurmllm"]
    return list(distributions.values())
