"""docs/recipes.md: the site's tables of all fields are made from the schemas."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_tables_have_every_field_with_its_docstring() -> None:
    spec = importlib.util.spec_from_file_location("docs_fields", ROOT / "tools" / "docs_fields.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    tables = {name: script.table(schema()) for name, schema in script.SCHEMAS.items()}
    assert "| `optim.lr` | – | Learning rate after the warm-up. |" in tables["recipe"]
    assert "| `slurm.directives.srun` |  | For srun, in both jobs. |" in tables["recipe"]
    assert "| `container.runtime` | – |" in tables["cluster"]
    for name, table in tables.items():
        assert f"build/fields/{name}.md" in page
        assert not [row for row in table.splitlines() if row.endswith("|  |")]
