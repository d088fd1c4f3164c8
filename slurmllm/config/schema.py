"""The JSON schemas of recipes and cluster profiles, with the docstrings of their fields.

pydantic's `use_attribute_docstrings` would read the source of every section at each start.
"""

from __future__ import annotations

import ast
import inspect
import sys
from typing import Any, Literal

from slurmllm.config.cluster import Cluster
from slurmllm.config.command import REFUSED
from slurmllm.config.families import CHOSEN
from slurmllm.config.operation import Section
from slurmllm.config.profiles import shipped_dir
from slurmllm.config.recipe import Recipe
from slurmllm.config.resolve import OPEN

_ANNOTATIONS = ("title", "default", "description")

Kind = Literal["recipe", "cluster"]


def schema_line(kind: Kind) -> str:
    """Return the first line of a file that names its shipped schema to editors."""
    path = shipped_dir() / "configs" / "schemas" / f"{kind}.json"
    return f"# yaml-language-server: $schema={path.as_uri()}\n"


def file_schema(kind: Kind) -> dict[str, Any]:
    """Return the schema of a file, of which only one that extends no other must be whole."""
    schema = recipe_schema() if kind == "recipe" else cluster_schema()
    required = schema.pop("required")
    whole: dict[str, Any] = {"required": required, "properties": {}}
    if kind == "recipe":
        with_command = [name for name in required if name not in REFUSED] + ["command"]
        whole["anyOf"] = [{"required": names} for names in (required, with_command)]
        del whole["required"]
    for name, field in schema["properties"].items():
        for part in (field, *field.get("anyOf", ())):
            section = schema["$defs"].get(part.get("$ref", "").rpartition("/")[2], {})
            if "required" in section:
                whole["properties"][name] = {"required": section.pop("required")}
    for section in (schema, *schema["$defs"].values()):
        for field in section.get("properties", {}).values():
            _allow_null(field)
    for section in schema["$defs"].values():
        _allow_null(section)
    text = "A shipped one, or a .yaml file relative to this one; it has the values not set here."
    schema["properties"]["extends"] = {"type": "string", "description": text}
    return schema | {"if": {"not": {"required": ["extends"]}}, "then": whole}


def _allow_null(schema: dict[str, Any]) -> None:
    """Allow null, which takes a value or section of the extended file out."""
    if "anyOf" in schema:
        schema["anyOf"] += [{"type": "null"}] * ({"type": "null"} not in schema["anyOf"])
    elif "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        schema["type"] = list(dict.fromkeys([*kinds, "null"]))
        if "enum" in schema:
            schema["enum"].append(None)


def recipe_schema() -> dict[str, Any]:
    """Return the schema of a recipe's file."""
    schema = _schema(Recipe)
    fields = schema["properties"]
    # What `resolve` takes in place of sections and settings.
    fields["model"] = {"anyOf": [{"type": "string"}, fields["model"]]}
    fields["parallel"] = {"anyOf": [{"const": "auto"}, fields["parallel"]]}
    layout = schema["$defs"]["Layout"]["properties"]
    layout["parallel"] = {**layout["parallel"], **fields["parallel"]}
    layout["parallel"].pop("$ref", None)
    degrees = schema["$defs"]["ParallelConfig"]["properties"]
    for name, degree in degrees.items():
        if name != "auto":
            kind = {key: degree.pop(key) for key in [*degree] if key not in _ANNOTATIONS}
            degree["anyOf"] = [{"const": "auto"}, kind]
    train = schema["$defs"]["TrainConfig"]["properties"]
    for path in OPEN:  # null leaves them to the planner
        train[path.removeprefix("train.")]["anyOf"].append({"type": "null"})
    model = schema["$defs"]["ModelConfig"]
    model["required"] = [name for name in model["required"] if name not in CHOSEN]
    return schema


def cluster_schema() -> dict[str, Any]:
    """Return the schema of a whole profile's file, one that extends no other."""
    return _schema(Cluster)


def _schema(model: type[Section]) -> dict[str, Any]:
    schema = model.model_json_schema()
    docs = field_docstrings()
    for name, section in {**schema.get("$defs", {}), model.__name__: schema}.items():
        for field, values in section.get("properties", {}).items():
            if field in docs.get(name, {}):
                values["description"] = docs[name][field]
    return schema


def field_docstrings() -> dict[str, dict[str, str]]:
    """Return class → field → docstring of the sections of recipes and profiles."""
    docs: dict[str, dict[str, str]] = {}
    for module in {section.__module__ for section in Section.__subclasses__()}:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
        for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            texts = docs.setdefault(section.name, {})
            for field, below in zip(section.body, section.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    text = _text(below)
                    texts |= {field.target.id: text} if text else {}
    return docs


def _text(node: ast.stmt) -> str | None:
    """Return the text of a docstring's statement, on one line; None of any other."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return None
