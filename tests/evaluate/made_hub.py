"""Questions that we made up, in the folders and columns of the data sets that suites ask for.

`datasets.load_dataset("cais/mmlu", …)` takes a folder of that name in the working directory before
it asks a hub. So the harness's and the library's own code reads these as it reads the real ones,
but for the download. What the data sets, their parts (MMLU's 57 subjects, BBH's 27 tasks) and
splits are called comes from the harness's own files; the columns are those of the real ones.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from slurmllm.evaluate.suites import suites_dir

# In each split: enough for 7 examples and the question.
PER_SPLIT = 9
_COLOURS = ("red", "blue", "green", "black", "white")
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
Row = dict[str, Any]


def write_hub(folder: Path, names: Iterable[str]) -> None:
    """Write the data sets of some tasks and groups of the harness.

    Args:
        folder: Gets a folder a data set, such as `cais/mmlu`.
        names: Of tasks and groups.
    """
    from slurmllm.evaluate.harness import task_manager

    index = task_manager(None).task_index
    splits_of: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        for task in _tasks(index, name):
            path, part, splits = _reads(task)
            splits_of[path][part] |= splits
    for path, parts in splits_of.items():
        write_data_set(folder / path, ROWS[path], parts)


def write_data_set(home: Path, row: Callable[[str, int], Row], parts: dict[str, set[str]]) -> None:
    """Write a data set: JSON lines for each part's splits, and the card that lists them."""
    configs = []
    for part, splits in parts.items():
        (home / part).mkdir(parents=True)
        files = []
        for number, split in enumerate(sorted(splits)):
            lines = [json.dumps(row(part, number * PER_SPLIT + i)) for i in range(PER_SPLIT)]
            (home / part / f"{split}.jsonl").write_text("\n".join(lines))
            files.append({"split": split, "path": f"{part}/{split}.jsonl"})
        configs.append({"config_name": part, "data_files": files})
    (home / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")


def write_humaneval(folder: Path) -> None:
    """Write the problems that our own humaneval_samples reads."""
    path = "openai/openai_humaneval"
    write_data_set(folder / path, ROWS[path], {"openai_humaneval": {"test"}})


def write_logiqa(folder: Path) -> None:
    """Write LogiQA's files as its authors have them, where `datasets` keeps what it has fetched."""
    from datasets.utils.file_utils import hash_url_to_filename

    task = yaml.safe_load((suites_dir() / "pythia" / "logiqa.yaml").read_text().replace("!f", "f"))
    for number, split in enumerate(("test", "train", "validation")):  # as write_data_set has them
        rows = [_logiqa("", number * PER_SPLIT + i) for i in range(PER_SPLIT)]
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


def _mixed(i: int, count: int) -> list[str]:
    return [_COLOURS[(i + k) % len(_COLOURS)] for k in range(count)]


def _lettered(i: int, count: int) -> Row:
    return {"label": list("ABCDE"[:count]), "text": _mixed(i, count)}


def _mmlu(part: str, i: int) -> Row:
    return {
        "question": f"Which colour has the {part.replace('_', ' ')} book {i}?",
        "subject": part,
        "choices": _mixed(i, 4),
        "answer": i % 4,
    }


def _bbh(part: str, i: int) -> Row:
    return {"input": f"{part.replace('_', ' ')}: what is {i} plus 1?", "target": str(i + 1)}


def _piqa(_: str, i: int) -> Row:
    first, second = _mixed(i, 2)
    return {
        "goal": f"Paint door {i}",
        "sol1": f"in {first}",
        "sol2": f"in {second}",
        "label": i % 2,
    }


def _hellaswag(_: str, i: int) -> Row:
    return {
        "ind": i,
        "activity_label": "Painting a door",
        "ctx_a": f"A man opens can {i}.",
        "ctx_b": "he",
        "ctx": f"A man opens can {i}. he",
        "endings": [f"[step] paints it {colour}." for colour in _mixed(i, 4)],
        "source_id": f"made~{i}",
        "split": "made",
        "split_type": "indomain",
        "label": str(i % 4),
    }


def _winogrande(_: str, i: int) -> Row:
    first, second = _mixed(i, 2)
    return {
        "sentence": f"The {first} can and the {second} one: door {i} took the _ one.",
        "option1": first,
        "option2": second,
        "answer": str(1 + i % 2),
    }


def _arc(part: str, i: int) -> Row:
    return {
        "id": f"{part}_{i}",
        "question": f"Which colour has leaf {i}?",
        "choices": _lettered(i, 4),
        "answerKey": "ABCD"[i % 4],
    }


def _openbookqa(_: str, i: int) -> Row:
    return {
        "id": str(i),
        "question_stem": f"The colour of leaf {i} is",
        "choices": _lettered(i, 4),
        "answerKey": "ABCD"[i % 4],
    }


def _nq_open(_: str, i: int) -> Row:
    return {"question": f"what colour is the flag of land {i}", "answer": _mixed(i, 2)}


def _trivia_qa(_: str, i: int) -> Row:
    colour, other = _mixed(i, 2)
    return {
        "question": f"What colour is house {i}",
        "question_id": str(i),
        "question_source": "made",
        "answer": {
            "aliases": [colour.title(), other.title()],
            "normalized_aliases": [colour, other],
            "value": colour.title(),
            "normalized_value": colour,
            "type": "made",
        },
    }


def _super_glue(part: str, i: int) -> Row:
    colour, other = _mixed(i, 2)
    if part == "boolq":
        return {
            "question": f"is house {i} {colour}",
            "passage": f"House {i} is {(colour, other)[i % 2]}.",
            "idx": i,
            "label": 1 - i % 2,
        }
    return {
        "text": f"Ann saw car {i} because it was {colour} .",
        "span1_index": 2,
        "span2_index": 5,
        "span1_text": f"car {i}",
        "span2_text": "it",
        "idx": i,
        "label": i % 2,
    }


def _gsm8k(_: str, i: int) -> Row:
    return {
        "question": f"Ann has 7 cans and {i} lids. How many cans has she?",
        "answer": "She has <<7=7>>7 cans.\n#### 7",
    }


def _humaneval(_: str, i: int) -> Row:
    return {
        "task_id": f"Made/{i}",
        "prompt": f"def next_{i}(x):\n    return x",
        "canonical_solution": " + 1\n",
        "test": f"def check(candidate):\n    assert candidate({i}) == {i + 1}\n",
        "entry_point": f"next_{i}",
    }


def _lambada(_: str, i: int) -> Row:
    (colour,) = _mixed(i, 1)
    return {"text": f"Ann painted door {i} {colour}. Now the door is {colour}"}


def _sciq(_: str, i: int) -> Row:
    right, *wrong = _mixed(i, 4)
    return {
        "question": f"Which colour has stone {i}?",
        "distractor3": wrong[2],
        "distractor1": wrong[0],
        "distractor2": wrong[1],
        "correct_answer": right,
        "support": f"Stone {i} is {right}." if i % 2 else "",
    }


def _logiqa(_: str, i: int) -> Row:
    return {
        "label": "abcd"[i % 4],
        "context": f"There are four cans. Can {i} is the third.",
        "question": "Which colour has it?",
        "options": _mixed(i, 4),
    }


# Data set → its rows, by part and number.
ROWS: dict[str, Callable[[str, int], Row]] = {
    "EleutherAI/lambada_openai": _lambada,
    "EleutherAI/logiqa": _logiqa,
    "Rowan/hellaswag": _hellaswag,
    "SaylorTwift/bbh": _bbh,
    "allenai/ai2_arc": _arc,
    "allenai/openbookqa": _openbookqa,
    "allenai/sciq": _sciq,
    "allenai/winogrande": _winogrande,
    "aps/super_glue": _super_glue,
    "baber/piqa": _piqa,
    "cais/mmlu": _mmlu,
    "google-research-datasets/nq_open": _nq_open,
    "mandarjoshi/trivia_qa": _trivia_qa,
    "openai/gsm8k": _gsm8k,
    "openai/openai_humaneval": _humaneval,
}
