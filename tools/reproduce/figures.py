"""The catalogue of figures (figures.yaml), and how one is drawn."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from reproduce import demonstrations, published, runs
from reproduce.runs import RunSpec
from slurmllm.errors import SlurmllmError

CATALOGUE = Path(__file__).parent / "figures.yaml"


class FigureError(Exception):
    """A figure could not be drawn."""


@dataclass(frozen=True)
class Figure:
    """A figure of a post.

    Attributes:
        post: Key of the post in the catalogue.
        runs: Names of the runs that it shows.
        commands: Verbs of slurmllm with their arguments; `{out}` and `{name}` are replaced.
        published: A function of published.py that draws it instead.
        demonstration: A function of demonstrations.py that shows it instead; there is no picture.
        picture: The file that the commands write; empty: none, the figure is a table.
    """

    title: str
    post: str
    runs: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    published: str | None = None
    demonstration: str | None = None
    picture: str = "{out}/{name}.png"


@dataclass(frozen=True)
class Catalogue:
    """What figures.yaml has.

    Attributes:
        common: Settings of every run.
    """

    common: list[str]
    runs: Mapping[str, RunSpec]
    posts: Mapping[str, str]
    figures: Mapping[str, Figure]


def read_catalogue(path: Path | None = None) -> Catalogue:
    """Read the catalogue of figures, the shipped one unless another is named."""
    content = yaml.safe_load((path or CATALOGUE).read_text(encoding="utf-8"))
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

    Args:
        steps: Of every run, instead of the catalogue's.

    Raises:
        FigureError: a run or a command failed.
    """
    figure = catalogue.figures[name]
    picture = figure.picture.format(out=out, name=name)
    if figure.published is not None:
        text = getattr(published, figure.published)(Path(picture))
        command = f"python tools/reproduce {name} --out {out}"
        return {"commands": [command], "output": [text], "picture": picture}
    try:
        if figure.demonstration is not None:
            shown = getattr(demonstrations, figure.demonstration)(runs_dir.absolute())
            texts = {"commands": [command for command, _ in shown]}
            return {**texts, "output": [text for _, text in shown], "picture": ""}
        runs.train_missing(catalogue.runs, figure.runs, catalogue.common, runs_dir, steps)
    except (runs.TrainingError, SlurmllmError) as error:
        raise FigureError(str(error)) from error
    commands = [command.format(out=out, name=name) for command in figure.commands]
    output = [_call(command, runs_dir) for command in commands]
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


def _call(command: str, runs_dir: Path) -> str:
    """Run a verb and return what it prints; that runs differ is an answer, not an error."""
    verb, *arguments = shlex.split(command)
    where = ["--runs-dir", str(runs_dir)]
    done = subprocess.run(
        [sys.executable, "-m", "slurmllm", verb, *arguments, *where],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode > (1 if verb == "compare" else 0):
        raise FigureError(f"slurmllm {command} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()
