"""Check that every relative link and `#anchor` in the Markdown files leads somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent


def anchors(path: Path) -> set[str]:
    """The anchors of a Markdown file's headings, as GitHub makes them."""
    tokens = MarkdownIt().parse(path.read_text(encoding="utf-8"))
    headings = (
        tokens[index + 1].content for index, t in enumerate(tokens) if t.type == "heading_open"
    )
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def broken_links(path: Path) -> list[str]:
    """The links of one file that lead nowhere."""
    faults = []
    for block in MarkdownIt().parse(path.read_text(encoding="utf-8")):
        for token in block.children or []:
            target = token.attrGet("href") or token.attrGet("src")
            if not isinstance(target, str) or re.match(r"^[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.exists() or (anchor and anchor not in anchors(file)):
                faults.append(f"{path.relative_to(ROOT)}: {target}")
    return faults


def main() -> int:
    """Check all files; returns 1 where a link is broken."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    faults = [fault for path in files for fault in broken_links(path)]
    print("\n".join(faults) if faults else f"links: {len(files)} files, none broken")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
