"""Values of records that are refused."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from slurmllm.core.errors import StorageError
from slurmllm.core.run.records import ExcludedNode, JobsRecord, Submission


def test_a_job_id_of_a_record_is_one(tmp_path: Path) -> None:
    path, sent = tmp_path / "jobs.json", {"submitted_at": 1.0, "nodes": 1, "local": False}
    for job in ("7", "1234_5", "12+1"):
        fields = {**sent, "first_attempt": 0, "train_job": job}
        assert Submission.model_validate(fields).train_job == job
    for job in ("--user=root", "-u", "1 2", "12,13", "*", "", "7\n", "७"):
        fields = {**sent, "first_attempt": 0, "train_job": job}
        path.write_text(json.dumps({"submissions": [fields]}))
        with pytest.raises(StorageError, match=r"submissions\.0\.train_job"):
            JobsRecord.load(path)


@pytest.mark.parametrize("node", ["--help", "../../home/ada/x", "a,b", "a b", "", ".", "n1\n"])
def test_a_node_of_a_record_is_a_name(node: str) -> None:
    with pytest.raises(ValidationError, match="pattern"):
        ExcludedNode(node=node, reason="", since=0.0, until=1.0)


@pytest.mark.parametrize("pid", [-1, 0, 10**30])
def test_a_process_id_of_a_record_is_of_one_process(pid: int) -> None:
    with pytest.raises(ValidationError):
        Submission(submitted_at=1.0, nodes=1, local=True, first_attempt=0, pid=pid)
