"""The formats of other frameworks' logs: names of metrics, lines of text, counting of steps.

formats.yaml holds a table for each framework, with the source file that defines the names. The
framework is recognized by the name of its loss; its names come first, then those that mean the same
in all frameworks (`throughput` does not: in Megatron-LM it is TFLOP/s).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from slurmllm.core.errors import RunError, UserError
from slurmllm.core.format import Texts, by_key, format_names
from slurmllm.core.metrics.curves import COLUMNS, Convention, StepUnit

METRICS = ("step", *COLUMNS)
Tags = Mapping[str, str]  # metric → the tag, column or key that holds it
ANY_FRAMEWORK = "any framework"  # its entry in formats.yaml
PATTERN_EXAMPLE = r"'step (?P<step>\d+).*loss (?P<loss>\S+)'"
# Kinds of logs, by their suffixes
TEXTS = (".log", ".txt", ".out", ".err")
TABLES = (".csv", ".tsv")
JSON_LINES = (".jsonl", ".ndjson")
FILES = (*TEXTS, *TABLES, *JSON_LINES, ".json")


class LineFormat(BaseModel, frozen=True, extra="forbid"):
    """A line of a framework's text output; see formats.yaml."""

    head: str
    pair: str | None = None
    following: bool = False
    step_of_bar: bool = False
    steps_from: Literal[0, 1] | None = None
    epochs_from: Literal[0, 1] = 1
    counts: StepUnit = "steps"


class LogFormat(Convention):
    """What is known of a framework's logs; see formats.yaml."""

    source: str
    printed_by: Literal["first", "last"] = "first"
    mark: str = ""
    tags: dict[str, Texts] = Field(default_factory=dict)
    recognized_by: Texts = ()  # names of the loss; all of them if empty
    file: str = ""
    lines: tuple[LineFormat, ...] = ()


def log_formats() -> Mapping[str, LogFormat]:
    return {name: log_format for name, log_format in all_formats().items() if name != ANY_FRAMEWORK}


def common_names(metric: str) -> Texts:
    """Return the names of a metric, or of `step`, that mean the same in all frameworks."""
    return all_formats()[ANY_FRAMEWORK].tags.get(metric, ())


@cache
def all_formats() -> Mapping[str, LogFormat]:
    """Return the formats, and the names and lines that mean the same in all frameworks."""
    from slurmllm.core.run.error_patterns import read_table  # our own runs' metrics need no yaml

    return {
        name: LogFormat(name=name, **values)
        for name, values in read_table(Path(__file__).with_name("formats.yaml")).items()
    }


def find_format(progress: str) -> LogFormat:
    """Return the format of a name; case, `_`, `-` and spaces are equal, and its end may be missing.

    Raises ValueError if there is none, or several.
    """
    formats = {_plain(name): log_format for name, log_format in log_formats().items()}
    if (name := _plain(progress)) in formats:
        return formats[name]
    begun = [f for f in log_formats().values() if name and name in _beginnings(f.name)]
    fitting = [f for f in begun if f.lines] or begun
    if len(fitting) != 1:
        names = [f.name for f in fitting or log_formats().values()]
        raise ValueError(
            f"progress {progress!r} is {'several formats' if fitting else 'no known format'}; "
            f"give one of {', '.join(names)}; a pattern such as {PATTERN_EXAMPLE}; or the path "
            f"of a file of metrics ({', '.join(FILES)}) or of a folder of TensorBoard events"
        )
    return fitting[0]


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _beginnings(name: str) -> set[str]:
    """Return the plain first words of a name: `hugging`, `huggingface`; of each of `A or B`."""
    parts = (re.split(r"[\s_-]+", alternative) for alternative in name.split(" or "))
    return {_plain("".join(words[:n])) for words in parts for n in range(1, len(words) + 1)}


@dataclass(frozen=True)
class TagChoice:
    """The tags (columns, keys) that hold the metrics of a log."""

    tags: Tags  # by metric
    rivals: Mapping[str, Texts]  # metric → other tags that match
    format: LogFormat | None  # None if not recognized
    missing: Texts  # warnings: tags that the user named and the log lacks


# pytorch/torchtitan components/metrics.py: tokens per second per device
_PER_DEVICE = ("throughput(tps)", "tps", "tgs (tokens/gpu/second)")


def parse_tags(values: Sequence[str]) -> dict[str, str]:
    """Parse the values of `--tag METRIC=TAG`, by metric; raise UserError for others."""
    tags: dict[str, str] = {}
    for value in values:
        metric, equals, tag = (piece.strip() for piece in value.partition("="))
        if not (equals and metric and tag):
            raise UserError(f"--tag {value!r}: give METRIC=TAG, such as loss=train/my_loss")
        check_metric(metric, f"--tag {value!r}")
        if tags.get(metric, tag) != tag:
            raise UserError(
                f"--tag {value!r}: {metric} is {tags[metric]!r} already; give each metric once"
            )
        tags[metric] = tag
    return tags


def check_metric(metric: str, option: str) -> None:
    if metric not in METRICS:
        raise UserError(f"{option}: no metric {metric!r}; one of {', '.join(METRICS)}")


def check_pattern(pattern: str, option: str = "--pattern") -> None:
    """Raise UserError if a pattern does not compile, or its groups are not `step`, `loss`, …"""
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise UserError(
            f"{option} '{pattern}' is not a regular expression: {error}; give one such as "
            f"{PATTERN_EXAMPLE}"
        ) from error
    for name in groups:
        check_metric(name, f"{option} '{pattern}'")
    for needed in ("step", "loss"):
        if needed not in groups:
            raise UserError(
                f"{option} '{pattern}' has no group (?P<{needed}>…); give one such as "
                f"{PATTERN_EXAMPLE}"
            )


def choose_tags(
    counts: Mapping[str, int],
    requested: Tags,
    source: Path,
    log_format: LogFormat | None = None,
) -> TagChoice:
    """Choose the tags of a log (tag → number of values) that hold the metrics.

    Tags that the user requested, by metric, may be of another of several logs. Raises RunError
    without a loss or gradient norm, or if a requested tag is missing and no other matches.
    """
    chosen = {m: tag for m, tag in requested.items() if tag in counts and m != "step"}
    framework = log_format
    for candidate in log_formats().values() if log_format is None else ():
        losses = candidate.tags.get("loss", ())
        marked = not candidate.mark or find_tags(counts, [candidate.mark])
        if source.name != candidate.file:
            losses = candidate.recognized_by or losses
        elif candidate.file:
            marked = True
        if marked and find_tags(counts, losses):
            framework = candidate
            break
    rivals = {}
    missing = []
    for metric in COLUMNS:
        if metric in chosen:
            continue
        names = framework.tags.get(metric, ()) if framework is not None else ()
        fitting = find_tags(counts, (*names, *common_names(metric)))
        free = [tag for tag in fitting if tag not in chosen.values()]
        # A mean at the end, or by epoch, is no alternative to values of every step.
        top = max((counts[tag] for tag in free), default=0)
        free = [tag for tag in free if 2 * counts[tag] > top]
        if free:
            chosen[metric] = free[0]
            rivals[metric] = tuple(free[1:])
        if metric in requested:
            reason = f"{source} has no {requested[metric]!r} (--tag {metric}={requested[metric]})"
            if not free:
                raise RunError(f"{reason}; there are {list_tags(counts)}")
            missing.append(f"{reason}; {metric} is taken from {free[0]!r}")
    if not {"loss", "grad_norm"} & chosen.keys():  # `spikes` works with either
        if not counts:
            raise RunError(f"no loss in {source}: its lines hold steps and no values")
        is_validated = "val_loss" in chosen
        reason = "it has only that of a validation" if is_validated else "none of its tags is known"
        raise RunError(
            f"no loss in {source}: {reason}; there are {list_tags(counts)}; name it with "
            f"--tag loss={chosen.get('val_loss', 'TAG')}"
        )
    return TagChoice(chosen, rivals, framework, tuple(missing))


def choose_step_key(counts: Mapping[str, int], requested: Tags) -> str | None:
    """Choose the key of the step by how often keys occur: some rows may lack the likeliest.

    It is the first that occurs at least half as often as the most frequent one; None without any.
    """
    candidates = step_keys(counts, requested)
    highest = max((counts[key] for key in candidates), default=0)
    return next((key for key in candidates if 2 * counts[key] >= highest), None)


def step_keys(tags: Collection[str], requested: Tags) -> list[str]:
    """Return the keys or columns that may hold the step, the likeliest first."""
    if requested.get("step") in tags:
        return [requested["step"]]
    return find_tags(tags, common_names("step"))


def per_device(tag: str) -> bool:
    return tag in _PER_DEVICE or any(name in tag for name in ("/device", "per_device", "per_gpu"))


def list_tags(tags: Collection[str]) -> str:
    return format_names([repr(tag)[1:-1] for tag in sorted(tags)], 20) or "none at all"


def find_tags(tags: Collection[str], names: Iterable[str]) -> list[str]:
    """Return the tags that match names, in the order of the names.

    `NAME*` matches every tag with that prefix. Case, and which of space, `-` and `_`, is ignored.
    """
    by_name = by_key((_normalize(tag), tag) for tag in tags)
    matches: dict[str, None] = {}
    for name in map(_normalize, names):
        prefixed = [key for key in by_name if name[-1] == "*" and key.startswith(name[:-1])]
        for key in prefixed or [name]:
            matches |= dict.fromkeys(by_name.get(key, ()))
    return list(matches)


@lru_cache(1 << 14)
def _normalize(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", name.strip().lower())
