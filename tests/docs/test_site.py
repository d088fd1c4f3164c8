"""The site that `make docs` builds: what its search finds, and its repository."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.long  # `make check` builds the site; seconds
def test_search_has_troubleshooting_and_not_the_api() -> None:
    pytest.importorskip("zensical")
    for command in (["tools/docs_fields.py"], ["-m", "zensical", "build", "--strict"]):
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    index = json.loads((ROOT / "build" / "site" / "search.json").read_text(encoding="utf-8"))
    titles = {item["location"]: item["title"] for item in index["items"]}
    # A heading outranks every text: the browser's search lists it first.
    assert titles["troubleshooting/#cuda-out-of-memory"] == "CUDA out of memory"
    assert not [location for location in titles if location.startswith("api/")]
    assert titles[""] == "slurmllm"


def test_the_repository_is_linked_once_it_has_an_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert site.get("repo_url") == project.get("urls", {}).get("Repository")
