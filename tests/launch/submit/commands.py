"""Calls of the command line on the fake cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from slurmllm.cli.main import cli
from slurmllm.core.run.artifact_records import GraphManifest
from slurmllm.core.run.rundir import RunDir

Inputs = tuple[str, ...]  # corpus and tokenizer, as --set options


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def call_json(*arguments: str) -> Any:
    return json.loads(call(*arguments, "--json").stdout)


def fails(code: int, *arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert result.stderr.startswith("error: ") or "Usage:" in result.stderr
    return result.stderr


def submitted(inputs: Inputs, *more: str) -> dict[str, object]:
    result = call("submit", "tiny_neox", "--nodes", "4", *inputs, "--json", *more)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def submitted_run(inputs: Inputs, *more: str) -> RunDir:
    return RunDir(Path(str(submitted(inputs, *more)["run_dir"])))


def graph_manifest(**fields: object) -> GraphManifest:
    """A manifest of complete graphs; only the given fields matter."""
    required = {"complete": True, "backend": "native", "versions": {}, "graphs": 0, "files": ()}
    archive = {"archive_bytes": 0, "archive_sha256": "", "cold_first_step_s": 1.0}
    return GraphManifest.model_validate({**required, **archive, **fields})
