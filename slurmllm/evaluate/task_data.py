"""LogiQA (Liu et al. 2020, arXiv 2007.08124) from its authors' own files.

A question is a block of lines: the letter of the answer, the passage, the question and four
options, each with its letter. The columns, and the blanks put after full stops, are those of the
data set that the harness's task was written for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slurmllm.evaluate.suites import suites_dir


def questions(**files: Any) -> dict[str, Any]:
    """The splits, as a task's `custom_dataset` gives them to the harness.

    Args:
        files: Split → address of a file, which is fetched once and then taken from the cache
            (HF_HOME); the harness adds settings of its own, which are passed over.
    """
    from datasets import Dataset, DownloadConfig, DownloadManager

    wanted = {split: place for split, place in files.items() if isinstance(place, str)}
    # Without asking for a newer one: a node without a network has the cache alone.
    manager = DownloadManager(download_config=DownloadConfig(use_etag=False))
    found: dict[str, str] = manager.download(wanted)
    return {split: Dataset.from_list(_rows(Path(path))) for split, path in found.items()}


def _rows(path: Path) -> list[dict[str, Any]]:
    blocks = path.read_text("utf-8").strip().split("\n\n")
    return [_row(*block.strip().split("\n")) for block in blocks]


def _row(label: str, passage: str, question: str, *options: str) -> dict[str, Any]:
    return {
        "label": label.strip(),
        "context": _spaced(passage),
        "question": _spaced(question),
        "options": [_spaced(option[2:]) for option in options],
    }


def _spaced(text: str) -> str:
    return text.replace(".", ". ").strip()


def shipped_lines(**files: Any) -> dict[str, Any]:
    """The splits of a task, as its YAML's `custom_dataset` gives them to the harness.

    Args:
        files: Split → a .jsonl file seen from the suites' folder; the harness adds settings of its
            own, which are passed over.
    """
    from datasets import Dataset

    folder = suites_dir()
    return {
        split: Dataset.from_list(
            [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]
        )
        for split, name in files.items()
        if isinstance(name, str) and name.endswith(".jsonl")
    }
