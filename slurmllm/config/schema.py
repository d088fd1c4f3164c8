"""The JSON schemas of recipes and cluster profiles, with the docstrings of their fields.

pydantic's `use_attribute_docstrings` would read the source of every section at each start.
"""

from __future__ import annotations

import ast
import inspect
import sys
from typing import Any

from slurmllm.config.cluster import Cluster
from slurmllm.config.families import CHOSEN
from slurmllm.config.operation import Section
from slurmllm.config.recipe import Recipe
from slurmllm.config.resolve import OPEN


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
