"""The claims of the four source documents (claims.yaml), and what this project prints for each.

python tools/reproduce claims                  list them
python tools/reproduce claims --run N3 L14     run the commands of some, compare the output
python tools/reproduce claims --all            run all: about an hour
python tools/reproduce claims --write          write the table of docs/reproduce.md again
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = Path(__file__).parent / "claims.yaml"
PAGE = ROOT / "docs" / "reproduce.md"
VERDICTS = ("works", "on CPU", "predicted", "needs Trainium")
_HEADING = "| | claim | command | prints | verdict |"
_BAR = r"\|"  # in a cell of Markdown
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Claim:
    """A claim of a source document."""

    id: str  # letter of the document and number in it
    claim: str
    command: str
    prints: str  # part of the output; `…` stands for any text, a space for any blanks
    verdict: str
    seconds: int  # about, on two cores
    agrees: str = ""  # whether our number is the source's, and why not
    tolerance: float = 0.0  # relative, for the numbers of `prints`, which then has no `…`


@dataclass(frozen=True)
class Document:
    """A source document and its claims."""

    title: str
    url: str
    claims: Sequence[Claim]


def read_claims(path: Path = CLAIMS) -> Mapping[str, Document]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {
        letter: Document(
            values["title"],
            values["url"],
            [Claim(f"{letter}{i}", **row) for i, row in enumerate(values["claims"], 1)],
        )
        for letter, values in content.items()
    }


def is_printed(prints: str, output: str, tolerance: float = 0.0) -> bool:
    """Whether `output` has the text `prints`, with numbers within a relative tolerance."""
    words = [
        ".*?" if word == "…" else _pattern(word, tolerance)
        for word in prints.replace("…", " … ").split()
    ]
    # Not from or to the middle of a number.
    text = r"\s*".join(words)
    pattern = re.compile(rf"(?<![\d.,]){text}(?!\d)", re.DOTALL)
    expected = [_value(number) for number in _NUMBER.findall(prints)]
    return any(
        all(
            abs(_value(number) - value) <= tolerance * abs(value)
            for number, value in zip(match.groups(), expected, strict=bool(tolerance))
        )
        for match in pattern.finditer(output)
    )


def _pattern(word: str, tolerance: float) -> str:
    if not tolerance:
        return re.escape(word)
    return f"({_NUMBER.pattern})".join(map(re.escape, _NUMBER.split(word)))


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def table(documents: Mapping[str, Document]) -> str:
    """Return the table of docs/reproduce.md, in Markdown."""
    lines = [_HEADING, "|---|---|---|---|---|"]
    for document in documents.values():
        lines.append(f"| | **[{document.title}]({document.url})** | | | |")
        for claim in document.claims:
            prints = "" if claim.command.startswith("pytest ") else f"`{claim.prints}`"
            verdict = f"{claim.verdict}; {claim.agrees}" if claim.agrees else claim.verdict
            cells = [claim.id, claim.claim, f"`{claim.command}`", prints, verdict]
            lines.append(f"| {' | '.join(cell.replace('|', _BAR) for cell in cells)} |")
    return "\n".join(lines)


def write_table(documents: Mapping[str, Document], page: Path = PAGE) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    start = lines.index(_HEADING)
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    lines[start:end] = table(documents).splitlines()
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_claim(claim: Claim) -> tuple[bool, str]:
    """Run a claim's command; return whether it prints what it should, and its output."""
    program, *arguments = shlex.split(claim.command)
    command = {
        "slurmllm": [sys.executable, "-m", "slurmllm"],
        "pytest": [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        "python": [sys.executable],
    }[program]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    output = done.stdout + done.stderr
    return not done.returncode and is_printed(claim.prints, output, claim.tolerance), output


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="reproduce claims",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", nargs="+", metavar="ID", default=[])
    parser.add_argument("--all", action="store_true", help="run all")
    parser.add_argument("--write", action="store_true", help="write the table of docs/reproduce.md")
    options = parser.parse_args(arguments)
    documents = read_claims()
    claims = {claim.id: claim for document in documents.values() for claim in document.claims}
    unknown = [name for name in options.run if name not in claims]
    if unknown:
        parser.error(f"no claim {', '.join(unknown)}; there are {', '.join(claims)}")
    if options.write:
        write_table(documents)
        return 0
    names = list(claims) if options.all else options.run
    failures = 0
    for claim in map(claims.__getitem__, names):
        start = time.monotonic()
        ok, output = run_claim(claim)
        duration = f"{time.monotonic() - start:5.0f} s"
        print(claim.id.ljust(4), "pass" if ok else "FAIL", duration, claim.claim, flush=True)
        if not ok:
            failures += 1
            print(f"{claim.command}\nexpected {claim.prints!r} in\n{output[-3000:]}", flush=True)
    if names:
        print(f"{len(names) - failures} of {len(names)} print what the table has")
    else:
        for claim in claims.values():
            print(f"{claim.id:4} {claim.verdict:14} {claim.claim}: {claim.command}")
    return int(failures > 0)
