"""Draw the figures of published posts at small scale: docs/developing/reproduce.md shows them.

    python tools/reproduce FIGURE… [--out DIR] [--runs-dir DIR] [--json]
    python tools/reproduce all
    python tools/reproduce --list
    python tools/reproduce claims [--run ID… | --all | --write]

A figure trains the runs that it needs by `slurmllm submit --local`, unless they are complete, and
draws by slurmllm's own verbs; each command is printed. Figures of published rows train nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

# One thread a process, before a BLAS starts its own
os.environ.setdefault("OMP_NUM_THREADS", "1")
if __package__ in (None, ""):
    # The packages of tools/, and the published rows of the benchmarks.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from reproduce import claims
from reproduce.figures import Catalogue, draw_figure, read_catalogue
from reproduce.runs import CommandError
from slurmllm.core.errors import SlurmllmError


def main(arguments: list[str] | None = None) -> int:
    """Draw the figures named; returns 1 if one could not be drawn."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["claims"]:
        return claims.main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="or `all`")
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder of pictures")
    parser.add_argument("--runs-dir", type=Path, default=Path(".reproduce") / "runs")
    parser.add_argument("--steps", type=int, help="train so many steps instead: a quick try")
    parser.add_argument("--list", action="store_true", help="print the figures and stop")
    parser.add_argument("--json", action="store_true", help="of the figures that are drawn")
    options = parser.parse_args(arguments)
    catalogue = read_catalogue()
    if options.list:
        _print_list(catalogue)
        return 0
    names = list(catalogue.figures) if options.figures == ["all"] else options.figures
    if unknown := [name for name in names if name not in catalogue.figures]:
        parser.error(
            f"no figure {', '.join(map(repr, unknown))}; choose of {', '.join(catalogue.figures)}"
        )
    if not names:
        parser.error("name a FIGURE, or `all`; --list prints them")
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps {options.steps}: a run has one step or more")
    options.out.mkdir(parents=True, exist_ok=True)
    drawn, failed = {}, 0
    for name in names:
        try:
            drawn[name] = draw_figure(catalogue, name, options.out, options.runs_dir, options.steps)
        except (CommandError, SlurmllmError) as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            drawn[name], failed = {"error": str(error)}, 1
            continue
        if not options.json:
            figure = drawn[name]
            print(f"\n{catalogue.figures[name].title}\n")
            for command, text in zip(figure["commands"], figure["output"], strict=True):
                print(f"$ {command}\n{text}")
            if figure["picture"] not in figure["output"][-1]:
                print(f"picture: {figure['picture']}", flush=True)
    if options.json:
        print(json.dumps(drawn, indent=1))
    return failed


def _print_list(catalogue: Catalogue) -> None:
    for name, figure in catalogue.figures.items():
        source = f"runs {', '.join(figure.runs)}" if figure.runs else "no run"
        print(f"{name:16} {figure.post:7} {figure.title} ({source})")


if __name__ == "__main__":
    sys.exit(main())
