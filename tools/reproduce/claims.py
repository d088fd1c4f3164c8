"""The claims of the four source documents (claims.yaml), and whether this project agrees.

python tools/reproduce claims                  list all: how each is shown, whether it agrees
python tools/reproduce claims --run N3 L14     run the commands of some; 1 if one does not agree
python tools/reproduce claims --all            run all: about an hour
python tools/reproduce claims --write          save what ran; docs/developing/reproduce.md's tables
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = Path(__file__).parent / "claims.yaml"
MEASURED = Path(__file__).parent / "measured.yaml"  # claim → what its command printed
PAGE = ROOT / "docs" / "developing" / "reproduce.md"
SHOWN = ("works", "on CPU", "plan", "needs Trainium")
_HEADING = "| | source | claims | agree | do not | not shown |"
_BAR = r"\|"  # in a cell of Markdown
_NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
_START = r"(?<![\d.,])"  # not the middle of a number
_PUBLISHED = re.compile(r"([<>]?) ?([\d.,]+)(?: to ([\d.,]+))? ?(.*)")
Outcome = float | bool  # the number that a command printed, or whether it printed the text


@dataclass(frozen=True)
class Claim:
    """A claim of a source document."""

    claim: str
    command: str
    # Part of the output; `…` is any text, `#` any number, `{}` ours. Of two ours is the ratio.
    prints: str
    shown: str
    seconds: int  # about, on two cores
    published: str = ""  # a number, a bound (`> 90`) or a range (`2 to 3`), and its unit
    tolerance: float = 0.1  # relative, of a published number; the planner's interval
    why: str = ""  # ours differs, or is not the same thing


@dataclass(frozen=True)
class Document:
    """A source document and its claims."""

    title: str
    url: str
    claims: Sequence[Claim]


def read_claims(path: Path = CLAIMS) -> Mapping[str, Document]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {
        letter: Document(row["title"], row["url"], [Claim(**claim) for claim in row["claims"]])
        for letter, row in content.items()
    }


def by_id(documents: Mapping[str, Document]) -> dict[str, Claim]:
    """Return the claims by letter of the document and number in it."""
    return {
        f"{letter}{number}": claim
        for letter, document in documents.items()
        for number, claim in enumerate(document.claims, 1)
    }


def read_outcome(claim: Claim, output: str) -> Outcome:
    """Return the number, or ratio of two, that `{}` stands for in the output, or whether its text
    is in there.
    """
    pattern = re.escape(claim.prints).replace(r"\ …\ ", f".*?{_START}").replace(r"\ ", r"\s+")
    pattern = pattern.replace(r"\#", _NUMBER).replace(r"\{\}", f"({_NUMBER})")
    match = re.search(rf"{_START}{pattern}(?!\d)", output, re.DOTALL)
    if match is None or not match.groups():
        return match is not None
    numbers = [_value(number) for number in match.groups()]
    return numbers[-1] / numbers[0] if len(numbers) == 2 else numbers[0]


def agreement(claim: Claim, ours: Outcome) -> tuple[bool, str]:
    """Return whether a command's outcome is what was published, and by how much it differs."""
    if not claim.published or isinstance(ours, bool):
        return bool(ours) and not claim.published, ""
    match = _PUBLISHED.fullmatch(claim.published)
    assert match is not None, claim.published
    bound, *ends, unit = match.groups()
    low, high = (_value(end or ends[0]) for end in ends)
    slack = claim.tolerance if not bound and low == high else 0.0
    least = 0.0 if bound == "<" else low * (1 - slack)
    most = math.inf if bound == ">" else high * (1 + slack)
    nearest = min(max(ours, low), high)
    factor = max(ours / nearest, nearest / ours)
    difference = f"{abs(ours / nearest - 1):.1%}" if factor < 1.5 else f"{factor:.2g} ×"
    if unit == "%":
        difference = f"{abs(ours - nearest):.2g} points"
    difference = (
        "" if ours == nearest else f", {difference} {'higher' if ours > nearest else 'lower'}"
    )
    return least <= ours <= most, f"{ours:,.4g} for {claim.published}{difference}"


def verdict(claim: Claim, ours: Outcome | None) -> str:
    """Return `yes` or `no`, by how much and why."""
    if ours is None:
        return "not run for this table yet"
    agrees, difference = agreement(claim, ours)
    word = "yes" if agrees else "no"
    if claim.shown == "needs Trainium":
        word = "not shown"
    return "; ".join(filter(None, [": ".join(filter(None, [word, difference])), claim.why]))


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def table(documents: Mapping[str, Document], measured: Mapping[str, Outcome | None]) -> str:
    """Return the tables of docs/developing/reproduce.md: counts by source, claims not shown."""
    counts = [_HEADING, "|---|---|--:|--:|--:|--:|"]
    rows = ["| | claim | command | agrees |", "|---|---|---|---|"]
    for letter, document in documents.items():
        words: Counter[str] = Counter()
        for name, claim in by_id({letter: document}).items():
            outcome = verdict(claim, measured[name])
            word = re.split("[:;]", outcome)[0]
            words[word] += 1
            if word != "yes":
                cells = [name, claim.claim, f"`{claim.command}`", outcome]
                rows.append(f"| {' | '.join(cell.replace('|', _BAR) for cell in cells)} |")
        numbers = [len(document.claims), *(words[word] for word in ("yes", "no", "not shown"))]
        link = f"[{document.title}]({document.url})"
        counts.append(f"| {letter} | {link} | {' | '.join(map(str, numbers))} |")
    return "\n".join([*counts, "", *rows])


def write_table(documents: Mapping[str, Document], measured: Mapping[str, Outcome | None]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    start = page.index(_HEADING)
    end = page.index("\n\n", page.index("\n\n", start) + 2)
    PAGE.write_text(page[:start] + table(documents, measured) + page[end:], encoding="utf-8")


@functools.cache  # figures have several claims
def _run(command: str) -> tuple[int, str]:
    program, *arguments = shlex.split(command)
    module = {"slurmllm": ["-m", "slurmllm"], "pytest": ["-m", "pytest", "-p", "no:cacheprovider"]}
    done = subprocess.run(
        [sys.executable, *module.get(program, []), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "SLURMLLM_TEST_ALL": "1"},  # long tests too
    )
    return done.returncode, done.stdout + done.stderr


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="reproduce claims",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", nargs="+", metavar="ID", default=[])
    parser.add_argument("--all", action="store_true", help="run all")
    parser.add_argument(
        "--write", action="store_true", help="write the tables of docs/developing/reproduce.md"
    )
    options = parser.parse_args(arguments)
    documents = read_claims()
    claims = by_id(documents)
    if unknown := [name for name in options.run if name not in claims]:
        parser.error(f"no claim {', '.join(unknown)}; there are {', '.join(claims)}")
    saved = yaml.safe_load(MEASURED.read_text(encoding="utf-8"))
    measured = {name: saved.get(name) for name in claims}
    names = list(claims) if options.all else options.run
    disagreeing = []
    for name in names:
        claim, start = claims[name], time.monotonic()
        code, output = _run(claim.command)
        ours = not code and read_outcome(claim, output)
        before, text = verdict(claim, measured[name]), verdict(claim, ours)
        print(f"{name:4}{time.monotonic() - start:5.0f} s  {claim.claim}: {text}", flush=True)
        if text != before and not options.write:
            print(f"    the table has: {before}")
        if not agreement(claim, ours)[0]:
            disagreeing.append(name)
            if isinstance(ours, bool):
                print(f"{claim.command}\nexpected {claim.prints!r} in\n{output[-2000:]}")
        measured[name] = ours if isinstance(ours, bool) else float(f"{ours:.4g}")
    if names:
        others = f"; not {', '.join(disagreeing)}" if disagreeing else ""
        print(f"{len(names) - len(disagreeing)} of {len(names)} agree{others}")
    if options.write:
        MEASURED.write_text(yaml.safe_dump(measured, sort_keys=False))
        write_table(documents, measured)
    elif not names:
        for name, claim in claims.items():
            print(f"{name:4} {claim.claim}\n     {claim.shown}: {verdict(claim, measured[name])}")
            print(f"     {claim.command}")
    return int(bool(disagreeing))
