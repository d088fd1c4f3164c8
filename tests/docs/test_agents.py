"""AGENTS.md is short, and names files, targets and verbs that exist."""

from __future__ import annotations

import re
from pathlib import Path

from slurmllm.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "AGENTS.md").read_text("utf-8")


def test_it_is_short_and_names_what_exists() -> None:
    assert len(TEXT.splitlines()) <= 60
    paths = re.findall(r"`((?:slurmllm|tests|tools|docs|configs)/[\w./]*|\w+\.(?:md|toml))`", TEXT)
    missing = [path for path in paths if not (ROOT / path.replace("ROOM", "plan")).exists()]
    assert (len(paths) > 15, missing) == (True, [])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\S+)", TEXT, re.MULTILINE)) <= targets
    assert set(re.findall(r"bin/slurmllm (\w+)", TEXT)) <= {*cli.list_commands(None)}  # type: ignore[arg-type]
