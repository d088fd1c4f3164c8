"""Print how large and how plain the code is, and hold it to the budget in pyproject.toml.

    python tools/house.py [--before REV] [--rooms] [--hard] [--check]

`--before` puts the figures of another commit next to those of the work tree. `--rooms` prints a row
for each package of the tree, `--hard` the functions over 60 lines or 25 branches. `--check` fails
if a figure is above its budget (`[tool.house]`); who raises one says in the commit what it buys.
"""

from __future__ import annotations

import argparse
import ast
import collections
import functools
import io
import re
import statistics
import subprocess
import sys
import tarfile
import tokenize
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "slurmllm/"
# Pronouns and participles that say nothing of the value (docs/developing/glossary.md has nouns).
_PRONOUNS = """found one own given known kept several again wanted what where there most least rest
others shown sent text part place at of"""
PRONOUNS = frozenset(_PRONOUNS.split())
MOST_FIELDS = 20  # of a record
MOST_LINES, MOST_BRANCHES = 60, 25
_LOOPS = (ast.For, ast.While, ast.comprehension)
_BRANCHES = (*_LOOPS, ast.If, ast.IfExp, ast.match_case, ast.ExceptHandler)
_LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_DIRECTIVES = ("# noqa", "# fmt:", "# type:", "#!")  # for tools, not for readers

Sources = Mapping[str, str]  # path relative to the top of the tree → its text
Nodes = Sequence[ast.AST]  # all of a module, its own first
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def nodes_of(text: str) -> Nodes:
    return [*ast.walk(ast.parse(text))]


def code_and_comments(text: str, nodes: Nodes) -> tuple[int, int]:
    """Return the number of lines with code, docstrings left out, and of comments for readers."""
    code: set[int] = set()
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += not token.string.startswith(_DIRECTIVES)
        elif token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    holder = (ast.Module, ast.ClassDef, *FUNCTIONS)
    for node in nodes:
        if isinstance(node, holder) and ast.get_docstring(node, clean=False) is not None:
            code.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code), comments


def called_once(text: str, nodes: Nodes) -> list[str]:
    """Return private functions that occur only once after their definition.

    Decorated ones are left out: a property, a validator or a click callback is called by others.
    """
    words = collections.Counter(re.findall(r"\w+", text))
    return [
        node.name
        for node in nodes
        if isinstance(node, FUNCTIONS) and not node.decorator_list
        if re.match(r"_(?!_)", node.name) and words[node.name] == 2
    ]


def pronouns(nodes: Nodes) -> int:
    """Return how many variables, arguments, functions and classes bear a name of `PRONOUNS`."""
    count = 0
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            count += node.id in PRONOUNS
        elif isinstance(node, ast.arg):
            count += node.arg in PRONOUNS
        elif isinstance(node, FUNCTIONS):
            count += node.name in PRONOUNS
    return count


def packed_conditions(nodes: Nodes) -> int:
    """Return how many texts and lists are multiplied by a condition, and calls unpack a tuple."""
    count = 0
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            counts = any(_is_number(side) for side in sides)
            count += not counts and any(_is_sequence(side) for side in sides)
        elif isinstance(node, ast.Call):
            unpacked = [a.value for a in node.args if isinstance(a, ast.Starred)]
            count += any(isinstance(value, ast.Tuple) for value in unpacked)
    return count


def _is_sequence(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text or isinstance(node, ast.List | ast.Tuple | ast.JoinedStr)


def _is_number(node: ast.AST) -> bool:
    """Whether an operand is a count: a number, a length, a sum of them, or a name that says so."""
    if isinstance(node, ast.Name):
        return node.id in ("count", "depth") or node.id.startswith("num_")
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int) and not isinstance(node.value, bool)
    if isinstance(node, ast.BinOp):
        return True
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


def large_records(nodes: Nodes) -> int:
    """Return how many classes have more than `MOST_FIELDS` annotated fields."""
    return sum(
        sum(isinstance(line, ast.AnnAssign) for line in node.body) > MOST_FIELDS
        for node in nodes
        if isinstance(node, ast.ClassDef)
    )


def hard_functions(nodes: Nodes) -> list[tuple[str, int, int]]:
    """Return name, lines and branches of the functions above `MOST_LINES` or `MOST_BRANCHES`."""
    hard = []
    for node in nodes:
        if isinstance(node, FUNCTIONS):
            lines = (node.end_lineno or 0) - node.lineno + 1
            parts = list(ast.walk(node))
            branches = sum(isinstance(part, _BRANCHES) for part in parts)
            branches += sum(len(part.values) - 1 for part in parts if isinstance(part, ast.BoolOp))
            if lines > MOST_LINES or branches > MOST_BRANCHES:
                hard.append((node.name, lines, branches))
    return hard


def file_cycles(sources: Sources) -> list[list[str]]:
    """Return the groups of modules that import each other, imports in functions included."""
    modules = {
        path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): text
        for path, text in sources.items()
    }
    imports: dict[str, set[str]] = {}
    for module, text in modules.items():
        targets = set()
        for node in nodes_of(text):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    targets.add(whole if whole in modules else node.module)
        imports[module] = targets & set(modules) - {module}
    reached = {module: set(direct) for module, direct in imports.items()}
    changed = True
    while changed:
        changed = False
        for module, targets in reached.items():
            further = set().union(*(imports[target] for target in targets)) if targets else set()
            if not further <= targets:
                reached[module] = targets | further
                changed = True
    cyclic = sorted(module for module, targets in reached.items() if module in targets)
    groups = {tuple(b for b in cyclic if b in reached[a]) for a in cyclic}
    return sorted(list(group) for group in groups)


def figures(package: Sources) -> dict[str, float]:
    code = comments = once = dialect = hard = num_nodes = packed = records = 0
    classes: collections.Counter[str] = collections.Counter()
    for text in package.values():
        nodes = nodes_of(text)
        file_code, file_comments = code_and_comments(text, nodes)
        code, comments = code + file_code, comments + file_comments
        once += len(called_once(text, nodes))
        num_nodes += len(nodes)
        dialect += pronouns(nodes)
        packed += packed_conditions(nodes)
        records += large_records(nodes)
        hard += len(hard_functions(nodes))
        classes.update({node.name for node in nodes if isinstance(node, ast.ClassDef)})
    sizes = [len(text.splitlines()) for text in package.values()]
    return {
        "modules": len(package),
        "nodes": num_nodes,
        "nodes per line of code": num_nodes / max(code, 1),
        "median file, lines": statistics.median(sizes) if sizes else 0,
        "pronouns as names, in 1,000 lines": 1000 * dialect / max(sum(sizes), 1),
        "texts and lists multiplied by a condition": packed,
        f"records over {MOST_FIELDS} fields": records,
        "fmt: skip": sum(text.count("# fmt: " + "skip") for text in package.values()),
        "functions over 60 lines or 25 branches": hard,
        "class names defined twice": sum(count > 1 for count in classes.values()),
        "groups of files that import each other": len(file_cycles(package)),
        "private functions called once, in 1,000 lines of code": 1000 * once / max(code, 1),
        "comments, % of the lines of code": 100 * comments / max(code, 1),
    }


def tree_figures(read: Reader) -> dict[str, float]:
    """Return all figures of a tree, whose files `read` returns by prefix."""
    scripts = [text for path, text in read("tools/").items() if _is_python(path, text)]
    tests = [text for path, text in read("tests/").items() if path.endswith(".py")]
    pages = {**read("docs/"), **read("README.md")}
    return figures({p: text for p, text in read(PACKAGE).items() if p.endswith(".py")}) | {
        "tools lines": _lines(scripts),
        "tests lines": _lines(tests),
        "docs words": sum(len(t.split()) for path, t in pages.items() if path.endswith(".md")),
    }


def _is_python(path: str, text: str) -> bool:
    return path.endswith(".py") or text.startswith("#!/usr/bin/env python")


def _lines(texts: Iterable[str]) -> int:
    return sum(len(text.splitlines()) for text in texts)


class Reader:
    """Reads the text files of a commit, or of the work tree as far as git knows them."""

    def __init__(self, revision: str | None = None) -> None:
        self.revision = revision

    def __call__(self, prefix: str) -> dict[str, str]:
        """Return path → text of the files whose path begins with `prefix`."""
        contents = self._of_commit(prefix) if self.revision else self._of_work_tree(prefix)
        return {path: data.decode(errors="replace") for path, data in contents if b"\0" not in data}

    def _of_work_tree(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "--", prefix)
        for path in listed.decode().splitlines():
            if (ROOT / path).is_file():
                yield path, (ROOT / path).read_bytes()

    def _of_commit(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        archive = io.BytesIO(_git("archive", str(self.revision), prefix))
        with tarfile.open(fileobj=archive) as tar:
            for member in tar:
                if (file := tar.extractfile(member)) is not None:
                    yield member.name, file.read()


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def over_budget(now: Mapping[str, float], budget: Mapping[str, float]) -> Iterator[str]:
    for name, most in budget.items():
        if name not in now:
            yield f"[tool.house] {name}: no such figure; there are {', '.join(now)}"
        elif now[name] > most:
            yield f"{name}: {now[name]:,g}, budget {most:,g} ([tool.house] in pyproject.toml)"


def _print_rooms(package: Sources) -> None:
    rooms: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for path, text in package.items():
        parts = path.removeprefix(PACKAGE).split("/")
        rooms[parts[0] if len(parts) > 1 else "(top)"][path] = text
    names = ("modules", "nodes", "nodes per line of code", "pronouns as names, in 1,000 lines")
    print(f"| room | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for room, sources in sorted(rooms.items()):
        values = figures(sources)
        print(f"| {room} | {' | '.join(f'{round(values[name], 1):,}' for name in names)} |")


def _print_hard(package: Sources) -> None:
    for path, text in sorted(package.items()):
        for name, lines, branches in hard_functions(nodes_of(text)):
            print(f"{path}: {name}: {lines} lines, {branches} branches")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--before", metavar="REV", help="a commit to compare with")
    parser.add_argument("--rooms", action="store_true", help="a row for each package")
    parser.add_argument("--hard", action="store_true", help="the functions that are too long")
    parser.add_argument("--check", action="store_true", help="fail above the budget")
    options = parser.parse_args()
    read = Reader()
    if options.rooms or options.hard:
        package = {path: text for path, text in read(PACKAGE).items() if path.endswith(".py")}
        (_print_rooms if options.rooms else _print_hard)(package)
        return 0
    now = tree_figures(read)
    if options.check:
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        faults = list(over_budget(now, settings["tool"]["house"]))
        for fault in faults:
            print(fault, file=sys.stderr)
        return bool(faults)
    before = tree_figures(Reader(options.before)) if options.before else {}
    heading = ("", "before", "now") if before else ("", "now")
    print(f"| {' | '.join(heading)} |\n|{'---|' * len(heading)}")
    for name in now:
        cells = (f"{round(values[name], 1):,}" for values in (before, now) if values)
        print(f"| {name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
