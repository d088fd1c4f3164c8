"""The file that `slurmllm init --recipe` writes: the fields of a recipe that people change."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import Any

from slurmllm.config.profiles import find_yaml, name_of
from slurmllm.config.resolve import RunConfig, recipes_dir, resolve
from slurmllm.config.schema import field_docstrings, schema_line
from slurmllm.config.yaml_source import flatten, write_yaml
from slurmllm.errors import ConfigError
from slurmllm.run.rundir import write_bytes

# Section → field → example, if the other recipe does not set the field; None: its default.
_FIELDS: dict[str, dict[str, Any]] = {
    "model": {"seq_len": None},
    "data": {
        "source": None,
        "corpus": "/data/corpus",
        "tokenizer": "/data/tokenizer.json",
        "validation": 0.01,
    },
    "train": {
        "steps": None,
        "global_batch": None,
        "init_from": "/data/checkpoint",
        "seed": None,
        "precision": None,
    },
    "optim": {"lr": None, "min_lr": None, "warmup_steps": None, "weight_decay": None},
    "eval": {"every_steps": 100},
    "checkpoint": {"every_steps": None, "keep": None},
    "slurm": {"time": None},
}
# Always examples. A layout belongs to hardware: the other recipe's may not suit another cluster.
_EXAMPLES = {"parallel": "auto", "trackers": ["wandb"]}


def write_recipe(path: Path, base: str, *, force: bool = False) -> None:
    """Write a recipe that extends another, with the fields that people change.

    Args:
        base: Name of a shipped recipe, or path of a file.
        force: Whether to replace a file.

    Raises:
        ConfigError: the path is not that of a new .yaml file, or there is no such recipe.
        StorageError: the file cannot be written.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--recipe {path}: a recipe's file ends in .yaml; write {path}.yaml")
    config, file = resolve(base), find_yaml(base, recipes_dir(), "recipe", "slurmllm recipes")
    if path.exists() and (not force or path.samefile(file)):
        raise ConfigError(f"--recipe {path}: exists; name another file, or replace it with --force")
    extended = base if file.parent == recipes_dir() else os.path.relpath(file, path.parent)
    text = recipe_text(config, path, extended)
    write_bytes(path, text.encode(), f"cannot write {path}", "name another file with --recipe")


def recipe_text(config: RunConfig, path: Path, extended: str) -> str:
    """Return the text of the file `path`, which extends the recipe of `config`."""
    docs, values = field_docstrings(), flatten(config.values())
    lines = [
        f"# What is not set here is as in {extended}. `#field: value` is an example: remove its #.",
        f"# All values: slurmllm recipes {path.name} --explain",
        _field("extends", extended),
        _field("name", name_of(path, "recipe")),
        _field("description", f"From {extended}"),
    ]
    for section, fields in _FIELDS.items():
        examples, texts = dict[str, Any](), docs[type(getattr(config.recipe, section)).__name__]
        body: list[str] = []
        for name, example in fields.items():
            value = values[f"{section}.{name}"]
            comment = _comment(re.split(r"(?<=\.)\s", texts[name])[0], "  ")
            if config.is_set(f"{section}.{name}"):
                body += [*comment, f"  {_field(name, value)}"]
            elif (shown := value if example is None else example) is not None:
                examples[name] = shown
                body += [*comment, f"  #{_field(name, shown)}"]
        if any(config.is_set(f"{section}.{name}") for name in fields):
            lines += ["", f"{section}:", *body]
        else:
            lines += ["", *_comment(" ".join(texts[name] for name in examples))]
            lines += [f"#{_field(section, examples)}"]
    for name, example in _EXAMPLES.items():
        text = docs["Recipe"].get(name) or docs["ParallelConfig"]["auto"]
        lines += ["", *_comment(text), f"#{_field(name, example)}"]
    return schema_line("recipe") + "\n".join(lines) + "\n"


def _comment(text: str, indent: str = "") -> list[str]:
    prefix = f"{indent}# "
    return textwrap.wrap(text, 100, initial_indent=prefix, subsequent_indent=prefix)


def _field(name: str, value: Any) -> str:
    return write_yaml({name: value}, inline=True)
