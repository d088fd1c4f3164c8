"""Records of a run, with values for the fields that a test does not care about."""

from pathlib import Path
from typing import Any

from slurmllm.core.config.resolve import resolve
from slurmllm.core.run import records
from slurmllm.core.run.artifact_records import CheckpointFile, CheckpointManifest
from slurmllm.core.run.rundir import RunDir


def make_run(path: Path, *overrides: str, recipe: str = "tiny_neox") -> RunDir:
    """Make the folder of a run with its configuration."""
    run = RunDir(path)
    run.path.mkdir(parents=True, exist_ok=True)
    run.config.write_text(resolve(recipe, overrides=overrides).to_yaml())
    return run


def make_attempt(
    number: int = 0, *, nodes: tuple[str, ...] = ("n1",), **fields: Any
) -> records.AttemptRecord:
    """Return a train attempt of one worker per node, which started at 0 s."""
    values = {"stage": "train", "job_id": None, "started_at": 0.0, "master_port": 1024}
    mesh = {"nodes": nodes, "world_size": len(nodes), "master_addr": nodes[0]}
    return records.AttemptRecord.model_validate({"attempt": number} | values | mesh | fields)


def save_attempt(run: RunDir, number: int = 0, **fields: Any) -> None:
    record = make_attempt(number, **fields)
    record.save(run.attempt(record.stage, number).record)


def save_manifest(run: RunDir, step: int, **fields: Any) -> None:
    """Write the manifest of a checkpoint, without its file."""
    files = (CheckpointFile(path="weights", bytes=0, sha256=""),)
    values = {"tokens": 0, "world_size": 1, "attempt": 0, "recipe": "r", "saved_at": 1.7e9}
    values |= {"save_s": 1.0, "fingerprint": "", "files": files}
    manifest = CheckpointManifest.model_validate({"step": step} | values | fields)
    manifest.save(run.checkpoint(step) / "manifest.json")


def save_submission(run: RunDir, **fields: Any) -> records.Submission:
    """Record the one submission of a run, by default of one node to Slurm."""
    values = {"submitted_at": 0.0, "nodes": 1, "local": False, "first_attempt": 0}
    sent = records.Submission.model_validate(values | fields)
    records.JobsRecord(submissions=(sent,)).save(run.jobs)
    return sent


def save_skips(run: RunDir, *, onset: int, last: int | None = None, **fields: Any) -> None:
    """Record that attempt 0 diverged from a step on, and which batches are skipped for it."""
    values = {"first": onset, "last": last or onset + 5, "roll_back_to": 10, "onset": onset}
    values |= {"attempt": 0, "reason": "spike"}
    skip = records.SkippedBatches.model_validate(values | fields)
    records.SkipsRecord(skips=(skip,)).save(run.skips)
