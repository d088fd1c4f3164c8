"""Print how the package reads in figures: files, lines, functions called once, comments, terms.

    python tools/house.py [--before REV] [--rooms]

`--before` puts the figures of another commit next to those of the work tree, as the table in
docs/architecture.md has them. `--rooms` prints a row for each package of the tree.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "slurmllm/"
# The terms that issue 15 counted; docs/glossary.md says what to write instead.
TERMS = {
    "words": r"\bwords?\b",
    "says, said, tells, told": r"\b(?:says?|said|tells?|told)\b",
    "lies, stands": r"\b(?:lies?|lay|stands?|stood|standing)\b",
    "None where": r"\b[Nn]one where\b",
    "beside": r"\bbesides?\b",
    "settle": r"\bsettl(?:es?|ed|ing)\b",
}
_SKIPPED = {
    tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
_NAMING_TERMS = ("docs/glossary.md",)
_DIRECTIVES = ("# noqa", "# fmt:", "# type:", "#!")  # for tools, not for readers

Sources = Mapping[str, str]  # path relative to the top of the tree → its text


@dataclass(frozen=True)
class Figures:
    """What is counted of a set of modules.

    Attributes:
        modules: Number of files.
        lines: Lines of all of them, blank ones included.
        median: Lines of the median file.
        code: Lines with code: no blank lines, comments or docstrings.
        comments: Comments for readers; directives such as `noqa` are not counted.
        once: Private functions that their own module names once, at their only call.
        repeated: Class names that two modules define.
        terms: Occurrences of each term of `TERMS`.
    """

    modules: int
    lines: int
    median: float
    code: int
    comments: int
    once: int
    repeated: int
    terms: Mapping[str, int]

    @property
    def once_per_1000(self) -> float:
        """Private functions called once in 1,000 lines of code."""
        return 1000 * self.once / max(self.code, 1)

    @property
    def comment_share(self) -> float:
        """Comments as a percentage of the lines of code."""
        return 100 * self.comments / max(self.code, 1)


def measure(sources: Sources) -> Figures:
    """Count one set of modules."""
    code = comments = once = 0
    classes: collections.Counter[str] = collections.Counter()
    for text in sources.values():
        tree = ast.parse(text)
        own_code, own_comments = code_and_comments(text, tree)
        code, comments = code + own_code, comments + own_comments
        once += len(called_once(text, tree))
        classes.update({node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)})
    sizes = [len(text.splitlines()) for text in sources.values()]
    return Figures(
        modules=len(sources),
        lines=sum(sizes),
        median=statistics.median(sizes) if sizes else 0,
        code=code,
        comments=comments,
        once=once,
        repeated=sum(count > 1 for count in classes.values()),
        terms=count_terms(sources.values()),
    )


def code_and_comments(text: str, tree: ast.Module) -> tuple[int, int]:
    """Return the number of lines with code, docstrings left out, and of comments."""
    code: set[int] = set()
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += not token.string.startswith(_DIRECTIVES)
        elif token.type not in _SKIPPED:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        holder = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, holder) and ast.get_docstring(node, clean=False) is not None:
            code.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code), comments


def called_once(text: str, tree: ast.Module) -> list[str]:
    """Private functions and methods that occur only once after their definition.

    Decorated ones are left out: a property, a validator or a click callback is called by others.
    """
    names = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
            continue
        if node.name.startswith("_") and not node.name.startswith("__"):
            uses = len(re.findall(rf"(?<!\w){re.escape(node.name)}(?!\w)", text)) - 1
            if uses == 1:
                names.append(node.name)
    return names


def count_terms(texts: Iterable[str]) -> dict[str, int]:
    """Occurrences of each term of `TERMS`."""
    joined = "\n".join(texts)
    return {term: len(re.findall(pattern, joined)) for term, pattern in TERMS.items()}


def file_cycles(sources: Sources) -> list[list[str]]:
    """Groups of modules that import each other, imports inside functions included."""
    modules = {
        path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): text
        for path, text in sources.items()
    }
    imports: dict[str, set[str]] = {}
    for module, text in modules.items():
        found = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.add(whole if whole in modules else node.module)
        imports[module] = found & set(modules) - {module}
    reached = {module: set(direct) for module, direct in imports.items()}
    changed = True
    while changed:
        changed = False
        for module, found in reached.items():
            further = set().union(*(imports[one] for one in found)) if found else set()
            if not further <= found:
                reached[module] = found | further
                changed = True
    cyclic = sorted(module for module, found in reached.items() if module in found)
    groups = {tuple(other for other in cyclic if other in reached[one]) for one in cyclic}
    return sorted(list(group) for group in groups)


def read_tree(pattern: str) -> dict[str, str]:
    """The files of the work tree that git knows."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "--", pattern)
    paths = [path for path in listed.splitlines() if (ROOT / path).is_file()]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}


def read_revision(revision: str, pattern: str) -> dict[str, str]:
    """The files of a commit."""
    listed = _git("ls-tree", "-r", "--name-only", revision).splitlines()
    match = re.compile(re.escape(pattern).replace(r"\*", ".*") + "$")
    return {path: _git("show", f"{revision}:{path}") for path in listed if match.match(path)}


def _prose(pages: Sources) -> Sources:
    """Return the pages without the glossary and the table of figures, which name the terms."""
    return {
        path: re.sub(r"^\| (?:term: |these terms).*$", "", text, flags=re.MULTILINE)
        for path, text in pages.items()
        if path not in _NAMING_TERMS
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def rows(package: Sources, prose: Sources) -> Iterator[tuple[str, str]]:
    """The lines of the table: what is counted, and the figure."""
    found = measure(package)
    yield "modules", f"{found.modules}"
    yield "lines", f"{found.lines:,}"
    yield "median file, lines", f"{found.median:g}"
    yield "private functions called once, in 1,000 lines of code", f"{found.once_per_1000:.1f}"
    yield "class names defined twice", f"{found.repeated}"
    yield "comments, share of the lines of code", f"{found.comment_share:.1f} %"
    yield "groups of files that import each other", f"{len(file_cycles(package))}"
    for term, count in found.terms.items():
        yield f"term: {term}", f"{count}"
    yield "these terms in docs and README", f"{sum(count_terms(prose.values()).values())}"


def print_rooms(sources: Sources) -> None:
    """Print a row for each package."""
    rooms: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for path, text in sources.items():
        parts = path.removeprefix(PACKAGE).split("/")
        rooms[parts[0] if len(parts) > 1 else "(ground floor)"][path] = text
    print("room            modules   lines  median  once/1,000  comments  terms")
    for room, own in sorted(rooms.items()):
        found = measure(own)
        print(
            f"{room:<15}{found.modules:>8}{found.lines:>8,}{found.median:>8g}"
            f"{found.once_per_1000:>12.1f}{found.comment_share:>8.1f} %"
            f"{sum(found.terms.values()):>7}"
        )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--before", metavar="REV", help="a commit to compare with")
    parser.add_argument("--rooms", action="store_true", help="a row for each package")
    options = parser.parse_args()
    package = read_tree(f"{PACKAGE}*.py")
    if options.rooms:
        print_rooms(package)
        return 0
    now = dict(rows(package, _prose(read_tree("docs/*.md") | read_tree("README.md"))))
    if options.before is None:
        for name, figure in now.items():
            print(f"{name:<55}{figure:>10}")
        return 0
    prose = read_revision(options.before, "docs/*.md") | read_revision(options.before, "README.md")
    before = dict(rows(read_revision(options.before, f"{PACKAGE}*.py"), _prose(prose)))
    print("| | before | now |\n|---|---|---|")
    for name, figure in now.items():
        print(f"| {name} | {before[name]} | {figure} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
