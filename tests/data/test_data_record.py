from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slurmllm.data.stream import check_data
from slurmllm.errors import DataError
from slurmllm.run.artifact_records import DataRecord
from slurmllm.run.rundir import RunDir


def identity(**changed: Any) -> dict[str, Any]:
    corpus = {"path": "/a.arrow", "fingerprint": "12", "documents": 9, "weight": 1.0}
    fields = {"seed": 1, "seq_len": 8, "global_batch": 4, "mask": "none", "validation": 0.0}
    return {"corpora": [corpus], "tokenizer": "77", **fields, **changed}


def test_written_once_and_held_to(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.path.mkdir()
    check_data(run, identity())
    written = run.data.read_bytes()
    assert DataRecord.load(run.data).tokenizer == "77"
    check_data(run, identity())
    assert run.data.read_bytes() == written
    changed = {"path": "/a.arrow", "fingerprint": "34", "documents": 9, "weight": 1.0}
    with pytest.raises(DataError, match=r"corpora a\.arrow \(12\) and a\.arrow \(34\)"):
        check_data(run, identity(corpora=[changed]))
    with pytest.raises(DataError, match="seed 1 and 2"):
        check_data(run, identity(seed=2))


def test_a_damaged_record_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir(tmp_path)
    run.data.write_text("{")
    check_data(run, identity())
    assert "data.json is damaged" in caplog.text
    check_data(run, identity())
    with pytest.raises(DataError, match="seed"):
        check_data(run, identity(seed=2))
    run.data.unlink()
    os.mkfifo(run.data)
    check_data(run, identity())
    assert run.data.is_file()
