"""Where the files that ship beside the code are: recipes, cluster profiles, job bodies.

In a checkout (an editable install too) they are `configs/` and `sbatch/` at the top of the
tree; the wheel carries the same two folders inside the package.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def _root() -> Path:
    installed = _PACKAGE / "_shipped"
    return installed if installed.is_dir() else _PACKAGE.parent


def recipes_dir() -> Path:
    """The folder of the recipes, one YAML file each."""
    return _root() / "configs" / "recipes"


def clusters_dir() -> Path:
    """The folder of the cluster profiles, one YAML file each."""
    return _root() / "configs" / "clusters"


def job_body(stage: str) -> str:
    """The static text of a stage's batch script, below its generated directives and exports."""
    return (_root() / "sbatch" / f"{stage}.sbatch").read_text(encoding="utf-8")
