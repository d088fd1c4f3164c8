"""What tools/docs_fields.py writes; the site, AGENTS.md and SECURITY.md name what exists."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from present import load_script

from slurmllm.cli.main import cli

ROOT = Path(__file__).resolve().parent.parent.parent


def docs_fields() -> ModuleType:
    return load_script(ROOT / "tools" / "docs_fields.py")


def test_the_tables_have_every_field_with_its_docstring() -> None:
    script = docs_fields()
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    tables = {name: script.table(schema()) for name, schema in script.SCHEMAS.items()}
    assert "| `optim.lr` | – | Learning rate after the warm-up. |" in tables["recipe"]
    assert "| `slurm.directives.srun` |  | For srun, in both jobs. |" in tables["recipe"]
    assert "| `container.runtime` | – |" in tables["cluster"]
    for name, table in tables.items():
        assert f"build/fields/{name}.md" in page
        assert not [row for row in table.splitlines() if row.endswith("|  |")]


def test_the_first_page_is_the_start_of_the_readme() -> None:
    start = docs_fields().start()
    assert "build/fields/start.md" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert start.startswith("# slurmllm\n")
    assert "## Install" in start
    assert re.search(r"^Version \d+\.\d+\.\d+; source", start, re.MULTILINE)
    targets = re.findall(r'\]\(([^)#:]+)|src="([^"]+)', start)
    assert len(targets) > 3
    assert [a or b for a, b in targets if not (ROOT / "docs" / (a or b)).is_file()] == []


def test_words_that_newcomers_search_for() -> None:
    text = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))
    words = r"MoE|FP8|context parallel|SFT|fine-tune|torchrun|resume_run|price|32k"
    assert {*re.findall(words, text)} == {*words.split("|")}


@pytest.mark.long  # `make check` builds the site; seconds
def test_search_has_troubleshooting_and_the_api() -> None:
    pytest.importorskip("zensical")
    for command in (["tools/docs_fields.py"], ["-m", "zensical", "build", "--strict"]):
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    index = json.loads((ROOT / "build" / "site" / "search.json").read_text(encoding="utf-8"))
    titles = {item["location"]: item["title"] for item in index["items"]}
    assert titles[""] == "slurmllm"
    # A heading outranks every text: the browser's search lists it first.
    assert titles["troubleshooting/#cuda-out-of-memory"] == "CUDA out of memory"
    assert "api/#slurmllm.api.submit_run" in titles


def test_the_repository_is_linked_once_it_has_an_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert site.get("repo_url") == project.get("urls", {}).get("Repository")


TEXT = (ROOT / "AGENTS.md").read_text("utf-8")


def test_agents_md_is_short_and_names_what_exists() -> None:
    assert len(TEXT.splitlines()) <= 60
    paths = re.findall(r"`((?:slurmllm|tests|tools|docs|configs)/[\w./]*|\w+\.(?:md|toml))`", TEXT)
    missing = [path for path in paths if not (ROOT / path.replace("ROOM", "plan")).exists()]
    assert (len(paths) > 15, missing) == (True, [])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\S+)", TEXT, re.MULTILINE)) <= targets
    assert set(re.findall(r"bin/slurmllm (\w+)", TEXT)) <= {*cli.list_commands(None)}  # type: ignore[arg-type]


SECURITY = (ROOT / "SECURITY.md").read_text("utf-8")
ROWS = [
    line.strip("|").split("|")
    for line in SECURITY.splitlines()
    if re.match(r"\|.*`tests/.*\|$", line)
]


def test_names_in_security_md_exist() -> None:
    names = re.findall(r"`((?:slurmllm|tests|tools|docs)/[^`\s]+)`", SECURITY)
    assert len(names) > 20
    for name in names:
        file, _, test = name.partition("::")
        assert (ROOT / file).exists(), name
        if test:
            definition = re.search(
                rf"^def {test}\b", (ROOT / file).read_text("utf-8"), re.MULTILINE
            )
            assert definition is not None, name


def test_each_rule_is_enforced_and_tested() -> None:
    assert len(ROWS) > 5
    for _, rule, module, tests in ROWS:
        assert rule.strip(), ROWS
        assert re.search(r"`(slurmllm|tools)/", module), rule
        assert re.search(r"`tests/.*::", tests), rule
