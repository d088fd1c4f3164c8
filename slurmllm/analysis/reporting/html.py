"""The report as one HTML file that opens without a network: script, style and data inside.

Texts are escaped by the template. The content security policy of the page forbids every request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from slurmllm import __version__
from slurmllm.analysis.reporting.blocks import Block, Picture, Plot, Section

_HERE = Path(__file__).parent
_AXES = ("step", "tokens", "hours")
# What would end a script element, or a line within it.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


@dataclass(frozen=True)
class _Group:
    """A block of a section; of plots all that follow one another."""

    block: Block | None = None
    plots: tuple[Plot, ...] = ()


def to_html(title: str, sections: Sequence[Section], data: dict[str, Any], made_at: str) -> str:
    """The whole page.

    Args:
        title: Of the page.
        sections: Its content.
        data: Of its plots (`figures.page_data`).
        made_at: When, for people.
    """
    # plotly's Python package brings plotly.js along; its figures are not needed.
    from plotly.offline import (  # type: ignore[import-untyped]
        get_plotlyjs,
        get_plotlyjs_version,
    )

    template = _environment().get_template("report.html.j2")
    return template.render(
        title=title,
        version=__version__,
        made_at=made_at,
        sections=sections,
        axes=_axes(data),
        logarithmic={
            name for name, figure in data["figures"].items() if figure["kind"] != "native"
        },
        css=Markup(_text("report.css")),
        script=Markup(_text("report.js")),
        data=Markup(_script_json(data)),
        plotly=Markup(get_plotlyjs()),
        plotly_version=get_plotlyjs_version(),
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["by_plots"] = _by_plots
    return environment


def _by_plots(blocks: Iterable[Block]) -> list[_Group]:
    """Plots that follow one another stand side by side; pictures are Markdown's."""
    found: list[_Group] = []
    for block in blocks:
        if isinstance(block, Picture):
            continue
        if not isinstance(block, Plot):
            found.append(_Group(block))
        elif found and found[-1].plots:
            found[-1] = _Group(plots=(*found[-1].plots, block))
        else:
            found.append(_Group(plots=(block,)))
    return found


def _axes(data: dict[str, Any]) -> list[str]:
    """The x axes that at least one curve has."""
    known = {
        axis
        for figure in data["figures"].values()
        for series in figure.get("series", ())
        for axis in series["x"]
    }
    return [axis for axis in _AXES if axis in known]


def _script_json(data: dict[str, Any]) -> str:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda found: _UNSAFE[found[0]], text)


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
