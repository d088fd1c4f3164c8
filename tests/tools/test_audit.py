"""`tools/audit.py`: what was not looked up is named, and is no success."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import audit  # noqa: E402

SOUND = {"name": "click", "version": "8.1", "vulns": []}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}
FAULT = {"id": "PYSEC-1", "fix_versions": ["3.2"], "aliases": [], "description": "…"}


def test_codes() -> None:
    assert audit.summarize([SOUND], "db")[1] == 0
    text, code = audit.summarize([SOUND, SKIPPED], "db")
    assert code == 2
    assert "1 packages are not in db, or it cannot be reached: torch" in text
    text, code = audit.summarize([SKIPPED, {**SOUND, "vulns": [FAULT]}], "db")
    assert code == 1
    assert "click 8.1: PYSEC-1; fixed in 3.2" in text
    editable = {"name": "slurmllm", "skip_reason": "distribution marked as editable"}
    assert audit.summarize([SOUND, editable], "db")[1] == 0
    assert audit.summarize([], "db")[1] == 2


@pytest.mark.long
def test_without_the_database() -> None:
    pytest.importorskip("pip_audit")
    unreachable = {**os.environ, "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/audit.py")],
        env=unreachable,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "not done: pypi's database (pypi.org) cannot be reached" in done.stderr
