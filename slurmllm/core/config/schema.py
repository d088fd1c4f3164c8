"""The JSON schemas of recipes and profiles with their fields' docstrings, and `init --recipe`.

pydantic's `use_attribute_docstrings` would read the source of every section at each start.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from slurmllm.core.config.cluster import Cluster
from slurmllm.core.config.command import REFUSED
from slurmllm.core.config.families import CHOSEN
from slurmllm.core.config.operation import Section
from slurmllm.core.config.profiles import any_command, find_yaml, name_of, shipped_dir
from slurmllm.core.config.recipe import Recipe
from slurmllm.core.config.resolve import RunConfig, recipes_dir, resolve
from slurmllm.core.config.validate import OPEN
from slurmllm.core.config.yaml_source import Values, flatten, write_yaml
from slurmllm.core.errors import ConfigError
from slurmllm.core.run.rundir import write_bytes

_ANNOTATIONS = ("title", "default", "description")

Kind = Literal["recipe", "cluster"]
Schema = dict[str, Any]
Docstrings = dict[str, dict[str, str]]  # class → field → docstring

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
_EXAMPLES: Values = {
    "data.corpus": "/data/corpus",
    "data.tokenizer": "/data/tokenizer.json",
    "data.validation": 0.01,
    "train.init_from": "/data/checkpoint",
}
# Always in a comment: the other recipe's layout may not suit another cluster.
_LAST = {"parallel": "auto", "trackers": ["wandb"]}


def schema_line(kind: Kind) -> str:
    """Return the first line of a file that names its shipped schema to editors."""
    path = shipped_dir() / "configs" / "schemas" / f"{kind}.json"
    return f"# yaml-language-server: $schema={path.as_uri()}\n"


def file_schema(kind: Kind) -> Schema:
    """Return the schema of a file, of which only one that extends no other must be whole."""
    schema = recipe_schema() if kind == "recipe" else cluster_schema()
    required = schema.pop("required")
    whole = {"required": required, "properties": {}}
    if kind == "recipe":
        with_command = [name for name in required if name not in REFUSED] + ["command"]
        whole["anyOf"] = [{"required": names} for names in (required, with_command)]
        del whole["required"]
    for name, field in schema["properties"].items():
        for option in (field, *field.get("anyOf", ())):
            section = schema["$defs"].get(option.get("$ref", "").rpartition("/")[2], {})
            if "required" in section:
                whole["properties"][name] = {"required": section.pop("required")}
    for section in (schema, *schema["$defs"].values()):
        for field in section.get("properties", {}).values():
            _allow_null(field)
    for section in schema["$defs"].values():
        _allow_null(section)
    rule = "A shipped one, or a .yaml file relative to this one; it has the values not set here."
    schema["properties"]["extends"] = {"type": "string", "description": rule}
    return schema | {"if": {"not": {"required": ["extends"]}}, "then": whole}


def _allow_null(schema: Schema) -> None:
    """Allow null, which takes a value or section of the extended file out."""
    if "anyOf" in schema:
        if {"type": "null"} not in schema["anyOf"]:
            schema["anyOf"] += [{"type": "null"}]
    elif "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        schema["type"] = list(dict.fromkeys([*kinds, "null"]))
        if "enum" in schema:
            schema["enum"].append(None)


def recipe_schema() -> Schema:
    schema = _schema(Recipe)
    fields = schema["properties"]
    # What `resolve` takes in place of sections and settings.
    fields["model"] = {"anyOf": [{"type": "string"}, fields["model"]]}
    fields["parallel"] = {"anyOf": [{"const": "auto"}, fields["parallel"]]}
    sections = schema["$defs"]
    layout = sections["Layout"]["properties"]
    layout["parallel"] = {**layout["parallel"], **fields["parallel"]}
    layout["parallel"].pop("$ref", None)
    for name, degree in sections["ParallelConfig"]["properties"].items():
        if name != "auto":
            kind = {key: degree.pop(key) for key in [*degree] if key not in _ANNOTATIONS}
            degree["anyOf"] = [{"const": "auto"}, kind]
    train = sections["TrainConfig"]["properties"]
    for path in OPEN:  # null leaves them to the planner
        train[path.removeprefix("train.")]["anyOf"].append({"type": "null"})
    model = sections["ModelConfig"]
    model["required"] = [name for name in model["required"] if name not in CHOSEN]
    return schema


def cluster_schema() -> Schema:
    """Return the schema of a whole profile's file, one that extends no other."""
    return _schema(Cluster)


def _schema(model: type[Section]) -> Schema:
    schema = model.model_json_schema()
    docs = field_docstrings()
    for name, section in {**schema.get("$defs", {}), model.__name__: schema}.items():
        for field, values in section.get("properties", {}).items():
            if field in docs.get(name, {}):
                values["description"] = docs[name][field]
    return schema


def field_docstrings() -> Docstrings:
    """Return class → field → docstring of the sections of recipes and profiles."""
    docs: Docstrings = {}
    for module in {section.__module__ for section in Section.__subclasses__()}:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
        for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            texts = docs.setdefault(section.name, {})
            for field, below in pairwise(section.body):
                if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                    continue
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                    texts[field.target.id] = " ".join(str(below.value.value).split())
    return docs


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
    file = find_yaml(base, recipes_dir(), "recipe", "`slurmllm recipes` lists them")
    if path.exists() and path.samefile(file):
        raise ConfigError(f"--recipe {path}: is the recipe of --from; name another file")
    if path.exists() and not force:
        raise ConfigError(f"--recipe {path}: exists; name another file, or replace it with --force")
    is_shipped = recipes_dir().parent in file.parents
    content = _recipe_text(config, path, base if is_shipped else os.path.relpath(file, path.parent))
    write_bytes(path, content.encode(), f"cannot write {path}", "name another file with --recipe")
    return config


def _recipe_text(config: RunConfig, path: Path, extended: str) -> str:
    docs = field_docstrings()
    values = flatten(config.values())
    lines = [
        f"# What is not set here is as in {extended}. `#field: value` is an example: remove its #.",
        f"# All values: slurmllm recipes {path.name} --explain",
        _field("extends", extended),
        _field("name", name_of(path.stem, "recipe")),
        _field("description", f"From {extended}"),
    ]
    has_model = config.recipe.worker.has_model
    for section, names in (_FIELDS if has_model else _COMMAND_FIELDS).items():
        lines += ["", f"{section}:"]
        texts = docs[type(getattr(config.recipe, section)).__name__]
        for name in names.split():
            field = f"{section}.{name}"
            is_example = field in _EXAMPLES and not config.is_set(field)
            value = _EXAMPLES[field] if is_example else values[field]
            sentence = re.split(r"(?<=\.)\s", texts[name])[0]
            mark = "#" if is_example else ""
            lines += [*_comment(sentence, "  "), f"  {mark}{_field(name, value)}"]
    for name, example in _LAST.items() if has_model else ():
        sentence = docs["Recipe"].get(name) or docs["ParallelConfig"]["auto"]
        lines += ["", *_comment(sentence), f"#{_field(name, example)}"]
    return schema_line("recipe") + "\n".join(lines) + "\n"


def _comment(sentence: str, indent: str = "") -> list[str]:
    prefix = f"{indent}# "
    return textwrap.wrap(sentence, 100, initial_indent=prefix, subsequent_indent=prefix)


def _field(name: str, value: Any) -> str:
    return write_yaml({name: value}, inline=True)
