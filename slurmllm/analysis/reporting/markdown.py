"""The report as Markdown, with pictures beside it, as GitHub shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from slurmllm.analysis.reporting.blocks import Bullets, Picture, Section, Table, Text

# What Markdown or its HTML would take for more than the character.
_SPECIAL = re.compile(r"([\\`*_{}\[\]|#~])")


def to_markdown(
    title: str, sections: Sequence[Section], pictures: Mapping[str, str], made_at: str
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


def _blocks(section: Section, pictures: Mapping[str, str]) -> Iterator[str]:
    for block in section.blocks:
        if isinstance(block, Text):
            strong = f"**{_safe(block.strong)}:** " if block.strong else ""
            yield f"{strong}{_safe(block.words)}\n"
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
    """Leading spaces, which indent a heading of a row, are kept."""
    indent = len(text) - len(text.lstrip(" "))
    return "&nbsp;" * indent + _safe(text.lstrip(" "))


def _safe(text: str) -> str:
    flat = " ".join(text.split())
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", flat)
