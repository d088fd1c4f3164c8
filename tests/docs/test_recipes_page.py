"""docs/recipes.md: the site's tables of all fields are made from the schemas."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_page_gets_every_field_with_its_docstring() -> None:
    spec = importlib.util.spec_from_file_location("docs_fields", ROOT / "tools" / "docs_fields.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = hook.on_page_markdown((ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"))
    assert "<!--" not in page
    assert "| `optim.lr` | – | Learning rate after the warm-up. |" in page
    assert "| `slurm.directives.srun` |  | For srun, in both jobs. |" in page
    assert "| `container.runtime` | – |" in page
    rows = page[page.index("| `name` | – |") :].splitlines()
    assert not [row for row in rows if row.startswith("| `") and row.endswith("|  |")]
