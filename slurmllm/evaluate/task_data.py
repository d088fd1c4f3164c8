"""Data of tasks: LogiQA (Liu et al. 2020, arXiv 2007.08124), and the files of shipped tasks.

A question of LogiQA is a block of lines: the letter of the answer, the passage, the question and
four options, each with its letter. The columns, and the blanks inserted after full stops, are those
of the data set that the harness's task was written for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slurmllm.evaluate.suites import suites_dir


def questions(**files: Any) -> dict[str, Any]:
    """The splits of LogiQA, for a task's `custom_dataset`.

    Args:
        files: Split → URL of a file, which is downloaded once and then read from the cache
            (HF_HOME); the harness adds arguments of its own, which are ignored.
    """
    from datasets import Dataset, DownloadConfig, DownloadManager

    urls = {split: url for split, url in files.items() if isinstance(url, str)}
    # use_etag=False: no request for a newer version, because a node may have no network.
    manager = DownloadManager(download_config=DownloadConfig(use_etag=False))
    paths: dict[str, str] = manager.download(urls)
    return {split: Dataset.from_list(_rows(Path(path))) for split, path in paths.items()}


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
    """The splits of a shipped task, for its YAML's `custom_dataset`.

    Args:
        files: Split → a .jsonl file, relative to the suites' folder; the harness adds arguments of
            its own, which are ignored.
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
