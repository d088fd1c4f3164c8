"""Questions that we made up, in the folders and columns of the data sets that suites ask for.

`datasets.load_dataset("cais/mmlu", …)` takes a folder of that name in the working directory before
it asks a hub. So the harness's and the library's own code reads these as it reads the real ones,
but for the download. What the data sets, their parts (MMLU's 57 subjects, BBH's 27 tasks) and
splits are called comes from the harness's own files; the columns are those of the real ones.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from string import Template
from typing import Any

import yaml

from slurmllm.analysis.evaluate.suites import suites_dir

# In each split: enough for 7 examples and the question.
PER_SPLIT = 9
_COLOURS = ("red", "blue", "green", "black", "white")
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
# Data set → the template of its rows, in YAML
ROWS = dict(
    line.split(" ", 1)
    for line in Path(__file__).with_name("made_rows.txt").read_text().splitlines()
)
Row = dict[str, Any]


def write_hub(folder: Path, names: Iterable[str]) -> None:
    """Write the data sets of some tasks and groups of the harness.

    Args:
        folder: Gets a folder a data set, such as `cais/mmlu`.
        names: Of tasks and groups.
    """
    from slurmllm.analysis.evaluate.harness import task_manager

    index = task_manager(None).task_index
    splits_of: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        for task in _tasks(index, name):
            path, part, splits = _reads(task)
            splits_of[path][part] |= splits
    for path, parts in splits_of.items():
        write_data_set(folder, path, parts)


def write_data_set(folder: Path, path: str, parts: dict[str, set[str]]) -> None:
    """Write a data set: JSON lines for each part's splits, and the card that lists them."""
    configs, home = [], folder / path
    for part, splits in parts.items():
        (home / part).mkdir(parents=True)
        files = []
        for number, split in enumerate(sorted(splits)):
            rows = (made_row(path, part, number * PER_SPLIT + i) for i in range(PER_SPLIT))
            lines = [json.dumps(row) for row in rows]
            (home / part / f"{split}.jsonl").write_text("\n".join(lines))
            files.append({"split": split, "path": f"{part}/{split}.jsonl"})
        configs.append({"config_name": part, "data_files": files})
    (home / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")


def write_humaneval(folder: Path) -> None:
    """Write the problems that our own humaneval_samples reads."""
    write_data_set(folder, "openai/openai_humaneval", {"openai_humaneval": {"test"}})


def write_logiqa(folder: Path) -> None:
    """Write LogiQA's files as its authors have them, where `datasets` keeps what it has fetched."""
    from datasets.utils.file_utils import hash_url_to_filename

    task = yaml.safe_load((suites_dir() / "pythia" / "logiqa.yaml").read_text().replace("!f", "f"))
    for number, split in enumerate(("test", "train", "validation")):  # as write_data_set has them
        places = range(number * PER_SPLIT, (number + 1) * PER_SPLIT)
        rows = [made_row("EleutherAI/logiqa", "", place) for place in places]
        blocks = [
            "\n".join(
                [
                    "",
                    row["label"],
                    row["context"].replace(". ", "."),
                    row["question"],
                    *(
                        f"{letter}.{text}"
                        for letter, text in zip("ABCD", row["options"], strict=True)
                    ),
                ]
            )
            for row in rows
        ]
        place = task["dataset_kwargs"][split]
        (folder / hash_url_to_filename(place, etag=None)).write_text("\n".join(blocks) + "\n")


def _tasks(index: dict[str, Any], name: str) -> Iterator[Any]:
    """The tasks of a group or tag; a task itself."""
    entry = index[name]
    if entry.cfg is None:
        children = sorted(entry.tags)
    elif "group" in entry.cfg:
        children = entry.cfg["task"]
    else:
        yield entry
        return
    for child in children:
        yield from _tasks(index, child)


def _reads(task: Any) -> tuple[str, str, set[str]]:
    """The data set, its part and the splits that a task reads."""
    from lm_eval.tasks._yaml_loader import load_yaml

    if "class" in task.cfg:  # written in Python
        made = load_yaml(task.yaml_path)["class"]
        return made.DATASET_PATH, made.DATASET_NAME, {"validation"}
    splits = {split for key in _SPLITS if (split := task.cfg.get(key))}
    return task.cfg["dataset_path"], task.cfg.get("dataset_name") or "default", splits


def made_row(path: str, part: str, i: int) -> Row:
    """The row of a number in a part of a data set, by its template."""
    a, b, c, d = (_COLOURS[(i + k) % len(_COLOURS)] for k in range(4))
    values: Row = {"i": i, "next": i + 1, "fourth": i % 4, "odd": i % 2, "even": 1 - i % 2}
    values |= {"upper": "ABCD"[i % 4], "lower": "abcd"[i % 4], "first_or_second": 1 + i % 2}
    values |= {"a": a, "b": b, "c": c, "d": d, "A": a.title(), "B": b.title(), "part": part}
    values |= {"a_or_b": (a, b)[i % 2], "support": f"Stone {i} is {a}." if i % 2 else ""}
    template = ROWS.get(f"{path}/{part}") or ROWS[path]
    row: Row = yaml.safe_load(Template(template).substitute(values, words=part.replace("_", " ")))
    return row
