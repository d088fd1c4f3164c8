"""The catalogue of figures (figures.yaml), and how one is drawn."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from reproduce import demonstrations, published, runs
from reproduce.runs import RunSpec

CATALOGUE = Path(__file__).parent / "figures.yaml"


@dataclass(frozen=True)
class Figure:
    """A figure of a post."""

    title: str
    post: str  # key of the post in the catalogue
    runs: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)  # with `{out}` and `{name}` to replace
    published: str | None = None  # a function of published.py that draws it instead
    demonstration: str | None = None  # one of demonstrations.py that shows it, without a picture
    picture: str = "{out}/{name}.png"  # that the commands write; empty: the figure is a table


@dataclass(frozen=True)
class Catalogue:
    """What figures.yaml has."""

    common: list[str]  # settings of every run
    runs: Mapping[str, RunSpec]
    posts: Mapping[str, str]
    figures: Mapping[str, Figure]


def read_catalogue() -> Catalogue:
    content = yaml.safe_load(CATALOGUE.read_text(encoding="utf-8"))
    return Catalogue(
        content["common"],
        {name: RunSpec(**values) for name, values in content["runs"].items()},
        content["posts"],
        {name: Figure(**values) for name, values in content["figures"].items()},
    )


def draw_figure(
    catalogue: Catalogue, name: str, out: Path, runs_dir: Path, steps: int | None = None
) -> dict[str, Any]:
    """Train what is missing, draw a figure, and return its commands, their output and its picture.

    `steps` are of every run, instead of the catalogue's. Raises CommandError if a command failed.
    """
    figure = catalogue.figures[name]
    picture = figure.picture.format(out=out, name=name)
    if figure.published is not None:
        text = getattr(published, figure.published)(Path(picture))
        command = f"python tools/reproduce {name} --out {out}"
        return {"commands": [command], "output": [text], "picture": picture}
    if figure.demonstration is not None:
        shown = getattr(demonstrations, figure.demonstration)(runs_dir.absolute())
        texts = {"commands": [command for command, _ in shown]}
        return {**texts, "output": [text for _, text in shown], "picture": ""}
    runs.train_missing(catalogue.runs, figure.runs, catalogue.common, runs_dir, steps)
    commands = [command.format(out=out, name=name) for command in figure.commands]
    where = ("--runs-dir", str(runs_dir)) if figure.runs else ()
    output = [
        runs.slurmllm(*shlex.split(command), *where, may_differ=True).strip()
        for command in commands
    ]
    if picture:
        _shrink(Path(picture))
    return {
        "commands": [f"slurmllm {command}" for command in commands],
        "output": output,
        "picture": picture,
    }


def _shrink(path: Path) -> None:
    """Reduce a picture to the size of a page and to 128 colours: a third of the bytes."""
    with Image.open(path) as picture:
        small = picture.convert("RGB")
    small.thumbnail((1000, 1000))
    small.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
