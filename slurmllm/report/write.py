"""Writes a report as HTML, Markdown and JSON.

The page is one file with script, style and data inside; it opens without a network, and its content
security policy forbids every request. The template escapes all texts.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pydantic_core

from slurmllm import __version__
from slurmllm.format import format_names, format_utc, printable
from slurmllm.report.document import (
    Bullets,
    Paragraph,
    Picture,
    ReportSection,
    file_part,
    sections,
)
from slurmllm.report.facts import RunFacts, scaling_rows
from slurmllm.report.figures import figures, page_data
from slurmllm.report.tables import Table
from slurmllm.run.rundir import report_path, write_atomic
from slurmllm.status.recoveries import sum_by_ending
from slurmllm.status.utilization import sum_utilization

_HERE = Path(__file__).parent
_MOST_NAMES = 4
_AXES = ("step", "tokens", "hours")
# Characters with a meaning in Markdown.
_SPECIAL = re.compile(r"([\\`*_{}\[\]|#~])")
# Characters that would end a script element, or a line within it.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def default_path(runs: Sequence[RunFacts]) -> Path:
    """`reports/report.html` of the first run; of several runs `report-<A>-<B>.html`."""
    names = [file_part(facts.name) for facts in runs[:_MOST_NAMES]] if len(runs) > 1 else []
    names += [f"and-{len(runs) - _MOST_NAMES}-more"] if len(runs) > _MOST_NAMES else []
    paths = (facts.path for facts in runs if facts.kind == "run")
    return report_path("report", names, next(paths, None), ".html")


def to_html(
    title: str, sections: Sequence[ReportSection], data: dict[str, Any], made_at: str
) -> str:
    """Return the whole page, with the data of its plots (`figures.page_data`)."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    # Only plotly.js is used, which plotly's Python package contains.
    from plotly.offline import (  # type: ignore[import-untyped]
        get_plotlyjs,
        get_plotlyjs_version,
    )

    # The x axes that at least one curve has.
    used_axes = {
        axis
        for figure in data["figures"].values()
        for series in figure.get("series", ())
        for axis in series["x"]
    }
    script_json = json.dumps(data, separators=(",", ":"), allow_nan=False)
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.get_template("report.html.j2")
    return template.render(
        title=title,
        version=__version__,
        made_at=made_at,
        sections=sections,
        axes=[axis for axis in _AXES if axis in used_axes],
        logarithmic={
            name for name, figure in data["figures"].items() if figure["kind"] in ("curve", "stack")
        },
        log_first={name for name, figure in data["figures"].items() if figure.get("log")},
        css=Markup((_HERE / "report.css").read_text(encoding="utf-8")),  # noqa: S704 (a file of ours)
        script=Markup((_HERE / "report.js").read_text(encoding="utf-8")),  # noqa: S704 (likewise)
        data=Markup(re.sub("[<>&\u2028\u2029]", lambda match: _UNSAFE[match[0]], script_json)),  # noqa: S704 (escaped)
        plotly=Markup(get_plotlyjs()),  # noqa: S704 (a file of plotly)
        plotly_version=get_plotlyjs_version(),
    )


def to_markdown(
    title: str, sections: Sequence[ReportSection], pictures: Mapping[str, str], made_at: str
) -> str:
    """Return the whole text; `pictures` has the paths of the existing ones, relative to it."""
    lines = [f"# {_safe(title)}", "", f"made {made_at}", ""]
    for section in sections:
        if body := list(_blocks(section, pictures)):
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
            rule = "|" + "|".join("---:" if number else "---" for number in block.numeric) + "|"
            yield "\n".join((_row(block.headings), rule, *map(_row, block.rows)))
            yield f"\n{_safe(block.caption)}\n" if block.caption else ""
        elif isinstance(block, Picture) and block.name in pictures:
            yield f"![{_safe(block.title)}]({pictures[block.name]})\n"


def _row(cells: Sequence[str]) -> str:
    # Leading spaces indent the heading of a row; Markdown would drop them.
    texts = (cell.lstrip(" ") for cell in cells)
    indents = (len(cell) - len(cell.lstrip(" ")) for cell in cells)
    shown = ("&nbsp;" * n + _safe(text) for n, text in zip(indents, texts, strict=True))
    return "| " + " | ".join(shown) + " |"


def _safe(text: str) -> str:
    flat = " ".join(printable(text).split())
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", flat)


# Of an analysis of spikes: the lists of single ones
_LISTS = {"spikes": True, "not_finite": True}
_EXCLUDED: Any = {**_LISTS, "grad_norm_spikes": _LISTS}
# Keys of a run in JSON that are fields or properties of its facts, or of its throughput
_OF_FACTS = (
    *("name", "path", "kind", "state", "recipe", "parameters", "nodes", "steps", "planned_steps"),
    *("tokens", "loss", "val_loss", "tokens_per_usd_bought", "usd", "restarts", "comparison"),
    *("data", "versions", "warnings"),
)
_OF_RATE = ("seq_per_s", "tokens_per_s", "seq_per_s_first_500", "tokens_per_usd", "mfu")


def write_report(
    runs: Sequence[RunFacts],
    page: Path,
    html: bool,
    sweeps: Sequence[Table] = (),
    heading: str | None = None,
) -> dict[str, str | None]:
    """Write a report: the .html page (`html`), the Markdown next to it, and its pictures.

    `sweeps` are the tables of sweeps, `heading` replaces the title that names the runs.

    Returns the paths of `html` and `markdown`; None: not requested.
    """
    from slurmllm.report.pictures import write_pictures  # loads matplotlib

    runs = [replace(facts, name=utf8(facts.name)) for facts in runs]
    drawn, made_at = figures(runs), format_utc(time.time())
    heading = heading or "Report of " + format_names([facts.name for facts in runs], 4)
    content = sections(runs, drawn, sweeps)
    if html:
        text = to_html(heading, content, page_data(runs, drawn), made_at)
        write_atomic(page, utf8(text))
    markdown, folder = page.with_suffix(".md"), page.with_name(f"{page.stem}_files")
    pictures = {
        name: f"{quote(folder.name)}/{path.name}"
        for name, path in write_pictures(runs, drawn, folder).items()
    }
    write_atomic(markdown, utf8(to_markdown(heading, content, pictures, made_at)))
    return {"html": str(page) if html else None, "markdown": str(markdown)}


def utf8(text: str) -> str:
    """Return a text with `?` for bytes of names that are no UTF-8."""
    return text.encode(errors="replace").decode()


def to_json(runs: Sequence[RunFacts], written: Mapping[str, str | None], **more: Any) -> str:
    """Return the whole document, with the files of `write_report`; unknown values are null."""
    used = [facts.used for facts in runs if facts.used is not None]
    document = {
        "runs": [_run(facts) for facts in runs],
        "total": sum_utilization(used) if used else None,
        "scaling": [row.to_json() for row in scaling_rows(runs)],
        "report": written,
        **more,
    }
    # pydantic's `to_json` refuses names that are no UTF-8.
    plain = pydantic_core.to_jsonable_python(document)
    return json.dumps(json.loads(json.dumps(plain), parse_constant=lambda _: None), indent=2)


def _run(facts: RunFacts) -> dict[str, Any]:
    rate, mesh, spikes = facts.rate, facts.mesh, facts.spikes
    return {
        **{name: getattr(facts, name) for name in _OF_FACTS},
        "mesh": None if mesh is None else mesh.to_json(),
        **{name: rate and getattr(rate, name) for name in _OF_RATE},
        "step_time_s": rate and rate.step_s,
        "checkpoints": [
            # An invalidated checkpoint is still on disk.
            asdict(checkpoint) | {"kept": checkpoint.state in ("kept", "invalidated")}
            for checkpoint in facts.saved
        ],
        "evaluations": facts.scores,
        "spikes": spikes and spikes.model_dump(exclude=_EXCLUDED),
        "utilization": facts.used,
        "recoveries": facts.lost,
        "endings": sum_by_ending(facts.lost),
    }
