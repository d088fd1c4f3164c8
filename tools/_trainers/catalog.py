"""The trainers that `make trainers` runs: one file each in catalog/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "catalog"
BUILD = ROOT / "build" / "trainers"
Verdict = Literal["exact", "within_noise", "differs", "fails"]


class Source(BaseModel, extra="forbid"):
    """A repository that is no package."""

    variable: str  # of the environment: a folder or address to clone in place of `address`
    address: str


class Trainer(BaseModel):
    """A trainer, its environment, and a short run of it.

    In texts {scripts}, {tests}, {work}, {source} and {docs} are filled in: scripts/ here,
    tests/trainers, a folder of this trainer in build/, its clone, and in that folder the pages of
    docs/ as a text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str  # in the table
    package: str = ""  # whose version the table has; of a clone, its commit
    requirements: tuple[str, ...] = ()
    environment: str = ""  # shared with other trainers of this name; by default `name`
    python: str = ""  # by default the one that runs this
    source: Source | None = None
    prepare: str = ""  # a command for bash in {work} and the environment, before the runs
    recipe: dict[str, Any]  # the recipe, without `name`
    nodes: int = 2
    kinds: str = "worker"  # of the drill
    limit_s: float = 1200.0  # for each stage, s
    expected: Verdict = "exact"  # "fails": it cannot run here, because of `reason`
    reason: str = ""  # why it is not exact, or cannot run; goes into the table

    @property
    def work(self) -> Path:
        return BUILD / "work" / self.name

    @property
    def clone(self) -> Path:
        return BUILD / "sources" / self.name

    def fill(self, text: str) -> str:
        """Replace the placeholders of this file; slurmllm's own stay."""
        folders = {
            "scripts": Path(__file__).parent / "scripts",
            "tests": ROOT / "tests" / "trainers",
            "work": self.work,
            "source": self.clone,
            "docs": self.work / "docs.txt",
        }
        for name, path in folders.items():
            text = text.replace(f"{{{name}}}", str(path))
        return text

    @property
    def filled_recipe(self) -> dict[str, Any]:
        def filled(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: filled(item) for key, item in value.items()}
            return self.fill(value) if isinstance(value, str) else value

        return {"name": self.name, **filled(self.recipe)}


def load_trainers(names: Sequence[str] = ()) -> list[Trainer]:
    """Return the trainers of these names, by default all; SystemExit for an unknown name."""
    files = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
    if unknown := sorted({*names} - {*files}):
        raise SystemExit(
            f"unknown trainer: {', '.join(unknown)}; there are {', '.join(files)} ({FOLDER})"
        )
    return [
        Trainer(name=name, **yaml.safe_load(files[name].read_text("utf-8")))
        for name in names or files
    ]
