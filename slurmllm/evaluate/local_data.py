"""Questions of the tasks that ship with slurmllm, read from files beside the suites."""

from __future__ import annotations

import json
from typing import Any

from slurmllm.evaluate.suites import suites_dir


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
