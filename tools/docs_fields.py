"""Write what pages include into build/fields: all fields, README's start, and the version."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmllm.core.config.schema import cluster_schema, recipe_schema

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "fields"
END = "## On your Slurm site"
SCHEMAS = {"recipe": recipe_schema, "cluster": cluster_schema}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "start.md").write_text(start(), encoding="utf-8")
    for name, schema in SCHEMAS.items():
        (FOLDER / f"{name}.md").write_text(f"{table(schema())}\n", encoding="utf-8")


def start() -> str:
    """Return README.md up to `END`, with the version, and with paths as docs/index.md has them."""
    text, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition(f"\n{END}\n")
    if not rest:
        raise SystemExit(f"README.md: the heading {END!r}, where docs/index.md ends, is missing")
    text = text.replace("\n\n", f"\n\n{version()}\n\n", 1)
    return text.replace("](docs/", "](").replace('src="docs/', 'src="')


def version() -> str:
    """Return the version of these pages, with a link to the source if it has an address."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    source = f"[source]({address})" if address else "source: the clone that has these pages"
    return f"Version {project['version']}; {source}, `CHANGELOG.md` in it lists the changes."


def table(schema: Mapping[str, Any]) -> str:
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


if __name__ == "__main__":
    main()
