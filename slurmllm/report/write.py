"""Writes a report as HTML and Markdown.

The page is one file with script, style and data inside; it opens without a network, and its content
security policy forbids every request. The template escapes all texts.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from slurmllm import __version__
from slurmllm.format import format_utc
from slurmllm.report.blocks import (
    Block,
    Bullets,
    Paragraph,
    Picture,
    Plot,
    ReportSection,
    Table,
    pictures_folder,
)
from slurmllm.report.document import sections, title
from slurmllm.report.facts import RunFacts
from slurmllm.report.figures import figures, page_data
from slurmllm.report.pictures import write_pictures
from slurmllm.rundir import write_atomic

_HERE = Path(__file__).parent
_AXES = ("step", "tokens", "hours")
# Characters that would end a script element, or a line within it.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


@dataclass(frozen=True)
class _Group:
    """A block of a section, or consecutive plots."""

    block: Block | None = None
    plots: tuple[Plot, ...] = ()


def to_html(
    title: str, sections: Sequence[ReportSection], data: dict[str, Any], made_at: str
) -> str:
    """The whole page.

    Args:
        title: Title of the page.
        sections: Its content.
        data: Data of its plots (`figures.page_data`).
        made_at: Time of writing.
    """
    # Only plotly.js is used, which plotly's Python package contains.
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
    """Group consecutive plots, which are placed side by side; pictures are for the Markdown."""
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


# Characters with a meaning in Markdown.
_SPECIAL = re.compile(r"([\\`*_{}\[\]|#~])")


def to_markdown(
    title: str, sections: Sequence[ReportSection], pictures: Mapping[str, str], made_at: str
) -> str:
    """The whole text.

    Args:
        title: Its heading.
        sections: Its content.
        pictures: Name → path, relative to the text, of those that there are.
        made_at: When, for people.
    """
    lines = [f"# {_safe(title)}", "", f"made {made_at}", ""]
    for section in sections:
        body = list(_blocks(section, pictures))
        if body:
            lines += [f"## {section.title}", "", *body]
    return "\n".join(lines).rstrip() + "\n"


def _blocks(section: ReportSection, pictures: Mapping[str, str]) -> Iterator[str]:
    for block in section.blocks:
        if isinstance(block, Paragraph):
            strong = f"**{_safe(block.strong)}:** " if block.strong else ""
            yield f"{strong}{_safe(block.text)}\n"
        elif isinstance(block, Bullets):
            yield "\n".join(f"- {_safe(item)}" for item in block.items) + "\n"
        elif isinstance(block, Table):
            yield "\n".join(_table(block)) + "\n"
        elif isinstance(block, Picture) and block.name in pictures:
            yield f"![{_safe(block.title)}]({pictures[block.name]})\n"


def _table(table: Table) -> Iterator[str]:
    yield _row(table.headings)
    yield "|" + "|".join("---:" if number else "---" for number in table.numeric) + "|"
    for row in table.rows:
        yield _row(row)
    if table.caption:
        yield f"\n{_safe(table.caption)}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    # Leading spaces indent the heading of a row.
    indent = len(text) - len(text.lstrip(" "))
    return "&nbsp;" * indent + _safe(text.lstrip(" "))


def _safe(text: str) -> str:
    flat = " ".join(text.split())
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", flat)


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report.

    Attributes:
        html: The page; None if it was not requested.
        markdown: The Markdown.
    """

    html: Path | None
    markdown: Path


def write_report(runs: Sequence[RunFacts], page: Path, html: bool = True) -> ReportFiles:
    """Write a report: the page, the Markdown next to it, and its pictures.

    Args:
        runs: The runs of the report.
        page: The .html file; the Markdown has the same name with .md.
        html: Whether to write the page.

    Raises:
        StorageError: a file cannot be written.
    """
    drawn, made_at = figures(runs), format_utc(time.time())
    content = sections(runs, drawn)
    if html:
        write_atomic(page, to_html(title(runs), content, page_data(runs, drawn), made_at))
    markdown, folder = page.with_suffix(".md"), pictures_folder(page)
    pictures = {
        name: f"{quote(folder.name)}/{path.name}"
        for name, path in write_pictures(runs, drawn, folder).items()
    }
    write_atomic(markdown, to_markdown(title(runs), content, pictures, made_at))
    return ReportFiles(page if html else None, markdown)
