"""The file that `slurmllm init --recipe` writes: the fields of a recipe that people change."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import Any

from slurmllm.config.profiles import any_command, find_yaml, name_of
from slurmllm.config.resolve import RunConfig, recipes_dir, resolve
from slurmllm.config.schema import field_docstrings, schema_line
from slurmllm.config.yaml_source import flatten, write_yaml
from slurmllm.errors import ConfigError
from slurmllm.run.rundir import write_bytes

# Section → its fields that people change.
_FIELDS = {
    "model": "seq_len",
    "data": "source corpus tokenizer validation",
    "train": "steps global_batch seed precision init_from",
    "optim": "lr min_lr warmup_steps weight_decay",
    "eval": "every_steps",
    "checkpoint": "every_steps keep",
    "slurm": "time",
}
# Of a recipe with a command
_COMMAND_FIELDS = {
    "command": "run folder resume save_signal checkpoints completion_file progress steps",
    "watchdog": "min_step_s",
    "slurm": "time",
}
# In a comment, unless the other recipe sets the field.
_EXAMPLES: dict[str, Any] = {
    "data.corpus": "/data/corpus",
    "data.tokenizer": "/data/tokenizer.json",
    "data.validation": 0.01,
    "train.init_from": "/data/checkpoint",
}
# Always in a comment: the other recipe's layout may not suit another cluster.
_LAST = {"parallel": "auto", "trackers": ["wandb"]}


def write_recipe(path: Path, base: str, *, force: bool = False) -> RunConfig:
    """Write a recipe that extends another, with the fields that people change; returns the other.

    Args:
        base: Name of a shipped recipe, or path of a file.
        force: Whether to replace a file.

    Raises:
        ConfigError: the path is not that of a new .yaml file, or there is no such recipe.
        StorageError: the file cannot be written.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--recipe {path}: a recipe's file ends in .yaml; write {path}.yaml")
    config = resolve(base, None, any_command(base))
    file = find_yaml(base, recipes_dir(), "recipe", "slurmllm recipes")
    if path.exists() and (not force or path.samefile(file)):
        raise ConfigError(f"--recipe {path}: exists; name another file, or replace it with --force")
    is_shipped = recipes_dir().parent in file.parents
    extended = base if is_shipped else os.path.relpath(file, path.parent)
    text = _recipe_text(config, path, extended)
    write_bytes(path, text.encode(), f"cannot write {path}", "name another file with --recipe")
    return config


def _recipe_text(config: RunConfig, path: Path, extended: str) -> str:
    """Return the text of the file `path`, which extends the recipe of `config`."""
    docs, values = field_docstrings(), flatten(config.values())
    lines = [
        f"# What is not set here is as in {extended}. `#field: value` is an example: remove its #.",
        f"# All values: slurmllm recipes {path.name} --explain",
        _field("extends", extended),
        _field("name", name_of(path, "recipe")),
        _field("description", f"From {extended}"),
    ]
    has_command = config.recipe.command is not None
    for section, names in (_COMMAND_FIELDS if has_command else _FIELDS).items():
        lines += ["", f"{section}:"]
        texts = docs[type(getattr(config.recipe, section)).__name__]
        for name in names.split():
            field = f"{section}.{name}"
            is_example = field in _EXAMPLES and not config.is_set(field)
            value = _EXAMPLES[field] if is_example else values[field]
            sentence = re.split(r"(?<=\.)\s", texts[name])[0]
            lines += [*_comment(sentence, "  "), f"  {'#' * is_example}{_field(name, value)}"]
    for name, example in () if has_command else _LAST.items():
        text = docs["Recipe"].get(name) or docs["ParallelConfig"]["auto"]
        lines += ["", *_comment(text), f"#{_field(name, example)}"]
    return schema_line("recipe") + "\n".join(lines) + "\n"


def _comment(text: str, indent: str = "") -> list[str]:
    prefix = f"{indent}# "
    return textwrap.wrap(text, 100, initial_indent=prefix, subsequent_indent=prefix)


def _field(name: str, value: Any) -> str:
    return write_yaml({name: value}, inline=True)
