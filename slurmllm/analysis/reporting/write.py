"""A report on its way into its files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from slurmllm.analysis.reporting.document import sections, title
from slurmllm.analysis.reporting.facts import RunFacts
from slurmllm.analysis.reporting.figures import figures, page_data
from slurmllm.analysis.reporting.html import to_html
from slurmllm.analysis.reporting.markdown import to_markdown
from slurmllm.analysis.reporting.names import pictures_folder
from slurmllm.analysis.reporting.pictures import write_pictures
from slurmllm.analysis.reporting.words import moment
from slurmllm.rundir import write_atomic


@dataclass(frozen=True)
class Written:
    """The files of a report.

    Attributes:
        html: The page; None where it was not asked for.
        markdown: The same as Markdown.
    """

    html: Path | None
    markdown: Path


def write_report(runs: Sequence[RunFacts], page: Path, html: bool = True) -> Written:
    """Write a report: the page, the Markdown beside it, and its pictures.

    Args:
        runs: What it is of.
        page: The .html file; the Markdown has its name with .md.
        html: Whether the page itself is wanted.

    Raises:
        StorageError: a file cannot be written.
    """
    drawn, made_at = figures(runs), moment(time.time())
    content = sections(runs, drawn)
    if html:
        write_atomic(page, to_html(title(runs), content, page_data(runs, drawn), made_at))
    markdown, folder = page.with_suffix(".md"), pictures_folder(page)
    pictures = {
        name: f"{quote(folder.name)}/{path.name}"
        for name, path in write_pictures(runs, drawn, folder).items()
    }
    write_atomic(markdown, to_markdown(title(runs), content, pictures, made_at))
    return Written(page if html else None, markdown)
