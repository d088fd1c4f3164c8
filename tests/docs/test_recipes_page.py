"""What tools/docs_fields.py writes: docs/recipes.md's tables of fields, docs/index.md's start."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent.parent


def docs_fields() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_fields", ROOT / "tools" / "docs_fields.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


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
    targets = re.findall(r'\]\(([^)#:]+)|src="([^"]+)', start)
    assert len(targets) > 3
    assert [a or b for a, b in targets if not (ROOT / "docs" / (a or b)).is_file()] == []
