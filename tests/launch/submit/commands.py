"""Calls of the command line on the fake cluster."""

from pathlib import Path

from command_line import answer, call

from slurmllm.core.run.artifact_records import GraphManifest
from slurmllm.core.run.rundir import RunDir

Inputs = tuple[str, ...]  # corpus and tokenizer, as --set options


def submitted(inputs: Inputs, *more: str) -> dict[str, object]:
    return dict(answer(call("submit", "tiny_neox", "--nodes", "4", *inputs, "--json", *more)))


def run_of(sent: dict[str, object]) -> RunDir:
    return RunDir(Path(str(sent["run_dir"])))


def submitted_run(inputs: Inputs, *more: str) -> RunDir:
    return run_of(submitted(inputs, *more))


def graph_manifest(**fields: object) -> GraphManifest:
    """A manifest of complete graphs; only the given fields matter."""
    required = {"complete": True, "backend": "native", "versions": {}, "graphs": 0, "files": ()}
    archive = {"archive_bytes": 0, "archive_sha256": "", "cold_first_step_s": 1.0}
    return GraphManifest.model_validate({**required, **archive, **fields})
