"""docs/trn1.md says what `submit --dry-run` prints, and explains every difference.

After a change of the environment or of NxD's arguments,
`SLURMLLM_WRITE_GOLDENS=1 pytest tests/docs/test_trn1.py` writes the page's column "ours" anew;
rows that came or went are for people to write, because they need an explanation.
"""

import getpass
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import answer, call

from slurmllm.core.config.yaml_source import flatten

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "trn1.md"
COMMAND = re.compile(r"^slurmllm (submit \S+ --nodes \d+ --fetch --dry-run)$", re.MULTILINE)
ROW = re.compile(r"^\| `([^`]+)` \| (.+?) \| (.+?) \| (.*?) ?\|$")
LIST = re.compile(r"^(?:Same in both|Only ours(?: \(l\))?): ")
ITEM = re.compile(r"`(--[^`]+|[^`=]+)(?:=([^`]*))?`")  # a compiler's flag is name and value
OWN = re.compile(ITEM.pattern + r" (\([^`]*\))(?=[,.])")  # with the reason
NOT_OURS = "–"
# A section that names another one has that one's rows, except those that it has itself.
REST = re.compile(r"missing here are as for \[(\S+)\]")
COMPLETE = ("model.", "optim.", "parallel.")  # sections of which every value must be in the table
REFUSED = {"parallel.shard_nodes"} | {  # by NxD
    f"optim.{name}" for name in ("adamw_lr", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")
}


def sections() -> list[str]:
    """The parts of the page that hold a command, one a recipe."""
    parts = re.split(r"^(?=## )", PAGE.read_text(), flags=re.M)
    return [part for part in parts if COMMAND.search(part)]


def tables(section: str) -> dict[str, dict[str, tuple[str, str, str]]]:
    """Heading → name → (ours, theirs, why), with the rows of the section that it refers to."""
    settings = section_tables(section)
    if reference := REST.search(section):
        (base,) = (other for other in SECTIONS if other.startswith(f"## {reference[1]},"))
        for heading, rows in section_tables(base).items():
            changed = settings.setdefault(heading, {})
            base_rows = {
                name: row
                for name, row in rows.items()
                if not any(f"{name}.".startswith(f"{other}.") for other in changed)
            }
            settings[heading] = base_rows | changed
    return settings


def section_tables(section: str) -> dict[str, dict[str, tuple[str, str, str]]]:
    """Heading → name → (ours, theirs, why), as the section itself has them."""
    settings: dict[str, dict[str, tuple[str, str, str]]] = {}
    for part in re.split(r"^### ", section, flags=re.M)[1:]:
        heading, *lines = part.splitlines()
        rows = [match.groups() for line in lines if (match := ROW.match(line))]
        assert len(rows) == sum(line.startswith("| `") for line in lines), f"{heading}: odd row"
        for line in filter(LIST.match, lines):
            if line.startswith("Only ours: "):
                rows += [(name, value or name, "–", why) for name, value, why in OWN.findall(line)]
                continue
            theirs, why = ("–", "(l)") if "(l)" in line else (None, "")
            items = [(name, value or name) for name, value in ITEM.findall(line)]
            rows += [(name, value, theirs or value, why) for name, value in items]
        names = [name for name, *_ in rows]
        assert len(set(names)) == len(names), f"{heading}: a row stands twice"
        settings[heading] = {name: (ours, theirs, why) for name, ours, theirs, why in rows}
    return settings


def shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "[]"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value) or "''"


def printed(arguments: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """What a dry run prints, by the page's headings."""
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    dry = answer(call(*arguments.split(), "--json", "--runs-dir", "/fsx/runs"))
    environment = {row["name"]: row["value"] for row in dry["environment"]}
    flags = environment.pop("NEURON_CC_FLAGS").split()
    parts: dict[str, dict[str, Any]] = {
        "Environment": environment,
        "Compiler flags": {flag: flag for flag in flags},
        "Arguments of NxD": flatten(dry["backend_arguments"]),
        "Hyperparameters": flatten(dry["config"]),
    }
    return {
        heading: {name: shown(value) for name, value in values.items()}
        for heading, values in parts.items()
    }


def with_ours(section: str, settings: dict[str, dict[str, str]]) -> str:
    """The section with its column "ours" written anew."""
    heading, lines = "", []
    for line in section.splitlines():
        heading = line.removeprefix("### ") if line.startswith("### ") else heading
        match, values = ROW.match(line), settings.get(heading, {})
        if match and match[2] != NOT_OURS and match[1] in values:
            cells = (f"`{match[1]}`", f"`{values[match[1]]}`", match[3], match[4])
            line = f"| {' | '.join(cells)} |".replace("|  |", "| |")
        elif LIST.match(line) and heading != "Compiler flags":
            for name, value in ITEM.findall(line):
                line = line.replace(f"`{name}={value}`", f"`{name}={values.get(name, value)}`")
        lines.append(line)
    return "\n".join(lines) + "\n"


def same(ours: str, theirs: str) -> bool:
    try:
        return float(ours.strip("`")) == float(theirs.strip("`"))
    except ValueError:
        return ours == theirs


SECTIONS = sections()


def test_the_page_has_the_runs_that_were_published() -> None:
    recipes = [COMMAND.findall(section)[0].split()[1] for section in SECTIONS]
    assert recipes == ["neox_20b", "pythia_6.9b", "llama2_7b", "llama2_70b"]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.split(",")[0].split()[1])
def test_ours_is_what_the_dry_run_prints_and_every_difference_is_explained(
    section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (arguments,) = COMMAND.findall(section)
    settings = printed(arguments, monkeypatch)
    if os.environ.get("SLURMLLM_WRITE_GOLDENS") == "1":
        PAGE.write_text(PAGE.read_text().replace(section, with_ours(section, settings)))
        section = with_ours(section, settings)
    page = tables(section)
    assert page.keys() == settings.keys()
    for heading, rows in page.items():
        ours = {name: cell.strip("`") for name, (cell, _, _) in rows.items() if cell != NOT_OURS}
        expected = settings[heading]
        if heading == "Hyperparameters":
            expected = {
                name: value
                for name, value in expected.items()
                if name in ours or (name.startswith(COMPLETE) and name not in REFUSED)
            }
        assert ours == expected, heading
    notes = set(re.findall(r"^- \*\*(\([a-z]\))", PAGE.read_text(), flags=re.M))
    for heading, rows in tables(section).items():
        for name, (value, theirs, why) in rows.items():
            assert why or same(value, theirs), f"{heading}: {name}: {value}, {theirs}, no why"
            assert set(re.findall(r"\([a-z]\)", why)) <= notes, f"{name}: no such note"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.split(",")[0].split()[1])
def test_theirs_is_what_the_scripts_have(section: str) -> None:
    page = {name: row[1] for rows in tables(section).values() for name, row in rows.items()}
    scripts = yaml.safe_load((Path(__file__).parent / "aws_scripts.yaml").read_text())
    lines = scripts[COMMAND.findall(section)[0].split()[1]]
    flags = set(re.findall(r"--[\w-]+", lines.pop("flags")))
    listed = {name for name, theirs in page.items() if theirs != NOT_OURS and name[:2] == "--"}
    assert flags == {name.partition("=")[0] for name in listed}
    for name, line in lines.items():
        value = re.split(r"[= ]", line)[-1].strip('[]}"').replace(",", ", ").lower()
        if name in page:
            theirs = page[name].partition(" (")[0].partition(", and")[0].strip("`")
            assert same(theirs, value or "''"), f"{name}: {theirs} and {line}"
        else:
            assert f"`{name}=" in PAGE.read_text(), f"{name}: the page does not have it"


def test_the_job_script_is_the_one_that_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    (part,) = re.findall(r"^## The job script$(.*?)^## ", PAGE.read_text(), flags=re.M | re.S)
    rows = [line.split("|")[2].strip() for line in part.splitlines() if line.startswith("| ")][1:]
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    dry = call("submit", "neox_20b", "--nodes", "4", "--dry-run", "--json")
    script = json.loads(dry.stdout)["scripts"]["train"]
    ours = [row.strip("`") for row in rows if row != NOT_OURS]
    assert len(ours) == 6
    for part in ours:
        assert part in script
