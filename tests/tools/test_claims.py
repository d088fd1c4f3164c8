"""tools/reproduce claims: the table of docs/reproduce.md is the data, and each command exists."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import click
import pytest

from slurmllm.cli.main import cli

ROOT = Path(__file__).parents[2]
TWO_CORES_S = 3600  # all commands together


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    # After tests/, which has packages of the same names as tools/.
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "tools")])


def test_the_table_of_the_page() -> None:
    from reproduce.claims import VERDICTS, read_claims, table

    documents = read_claims()
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    assert f"\n{table(documents)}\n" in page, "python tools/reproduce claims --write"
    claims = [claim for document in documents.values() for claim in document.claims]
    assert len(claims) == 61
    assert {claim.verdict for claim in claims} == set(VERDICTS)
    # A command that several claims share, such as that of a figure's runs, is counted once.
    assert sum({claim.command: claim.seconds for claim in claims}.values()) < TWO_CORES_S
    for claim in claims:
        assert not (claim.tolerance and "…" in claim.prints), claim.id


def test_every_command_exists() -> None:
    from reproduce.claims import read_claims
    from reproduce.figures import read_catalogue

    figures = read_catalogue().figures
    for document in read_claims().values():
        for claim in document.claims:
            program, first, *rest = shlex.split(claim.command)
            if program == "slurmllm":
                verb = cli.get_command(click.Context(cli), first)
                assert verb is not None, claim.id
                verb.make_context(first, list(rest))
            elif program == "python":
                assert (ROOT / first).exists(), claim.id
                assert first != "tools/reproduce" or set(rest) <= set(figures), claim.id
            else:
                assert program == "pytest", claim.id
                path, _, name = first.partition("::")
                text = (ROOT / path).read_text(encoding="utf-8")
                tests = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
                assert not name or name in tests, claim.id
                words = re.findall(r"[a-z_]{9,}", rest[1]) if rest else []
                assert all(any(word in test for test in tests) for word in words), claim.id


@pytest.mark.parametrize(
    ("prints", "output", "tolerance", "printed"),
    [
        ("1 passed", "1 passed in 2.1s", 0.0, True),
        ("1 passed", "11 passed in 2.1s", 0.0, False),
        ("1 passed", "2 passed, 1 failed", 0.0, False),
        ("step 1.5", "step 1.55", 0.0, False),
        ("a … d", "a b\nc d", 0.0, True),
        ("a … d", "d c b a", 0.0, False),
        ("64 212.0 209.4", "4 13.6 13.6\n64  212.0  207.0", 0.02, True),
        ("64 212.0 209.4", "64 212.0 199.0", 0.02, False),
        ("utilization 99.34 %", "utilization  98.81 %", 0.002, False),
        ("31,317 node hours", "31,000 node hours", 0.02, True),
    ],
)
def test_what_is_printed(prints: str, output: str, tolerance: float, printed: bool) -> None:
    from reproduce.claims import is_printed

    assert is_printed(prints, output, tolerance) == printed


def test_a_claim_that_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from reproduce import claims

    rows = [
        claims.Claim(f"N{i}", "a recipe", "slurmllm recipes tiny_neox", prints, "works", 2)
        for i, prints in enumerate(("family: neox", "family: llama"), 1)
    ]
    document = claims.Document("A post", "https://example.com", rows)
    monkeypatch.setattr(claims, "read_claims", lambda: {"N": document})
    assert claims.main(["--run", "N1"]) == 0
    assert claims.main(["--all"]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 print what the table has" in out
    assert "expected 'family: llama'" in out
    with pytest.raises(SystemExit):
        claims.main(["--run", "N9"])
    assert "no claim N9; there are N1, N2" in capsys.readouterr().err
