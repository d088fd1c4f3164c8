"""Write the tables of all fields into docs/recipes.md as the site is built: a hook of mkdocs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from slurmllm.config.schema import cluster_schema, recipe_schema

SCHEMAS = {"recipe": recipe_schema, "cluster profile": cluster_schema}


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace each comment `<!-- all fields of a … -->` by the table of those fields."""
    for kind, schema in SCHEMAS.items():
        mark = f"<!-- all fields of a {kind} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, table(schema()))
    return markdown


def table(schema: Mapping[str, Any]) -> str:
    """Return a row for each field: path, default, docstring."""
    rows = (
        f"| `{path}` | {default} | {' '.join(field.get('description', '').split())} |"
        for path, field, default in fields(schema, schema["$defs"])
    )
    return "\n".join(("| field | default | meaning |", "|---|---|---|", *rows))


def fields(
    section: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield path, schema and default (a dash: it must be set) of all fields of a section."""
    for name, field in section["properties"].items():
        kinds = (field, *field.get("anyOf", ()), *field.get("allOf", ()))
        names = [kind["$ref"].rpartition("/")[2] for kind in kinds if "$ref" in kind]
        inner = next((definitions[n] for n in names if "properties" in definitions[n]), None)
        if inner is None:
            required = name in section.get("required", ())
            default = (
                "–" if required else json.dumps(field["default"]) if "default" in field else ""
            )
            yield prefix + name, field, default.replace("null", "none")
        else:
            yield from fields(inner, definitions, f"{prefix}{name}.")
