"""SECURITY.md names modules and tests that exist, and each of its rules has both."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text("utf-8")
ROWS = [
    line.strip("|").split("|") for line in TEXT.splitlines() if re.match(r"\|.*`tests/.*\|$", line)
]


def test_names_exist() -> None:
    names = re.findall(r"`((?:slurmllm|tests|tools|docs)/[^`\s]+)`", TEXT)
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
