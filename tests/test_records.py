"""Keys of records that version 0.1 wrote under other names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmllm.records import GraphManifest, HangRecord, NodeRecord, Record

MANIFEST = {
    "complete": True, "backend": "native", "versions": {}, "graphs": 0, "archive_bytes": 0,
    "archive_sha256": "", "cold_first_step_s": 1.0, "files": [],
}  # fmt: skip
HANG = {"found_at": 1.0, "phase": "stepping", "step": 3, "waited_s": 9.0, "limit_s": 5.0}


@pytest.mark.parametrize(
    ("kind", "fields", "old", "new", "value"),
    [
        (NodeRecord, {"node": "n1"}, "graphs_added", "new_graphs", ["a"]),
        (HangRecord, HANG, "silent_nodes", "unresponsive_nodes", ["n1"]),
        (GraphManifest, MANIFEST, "absent_nodes", "missing_nodes", ["n1"]),
        (GraphManifest, MANIFEST, "taken_from", "reused_from", "other"),
    ],
)
def test_old_keys_are_read_and_new_ones_written(
    kind: type[Record], fields: dict[str, object], old: str, new: str, value: object, tmp_path: Path
) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**fields, old: value}))
    kind.load(path).save(path)
    written = json.loads(path.read_text())
    assert written[new] == value
    assert old not in written
    assert kind.load(path) == kind.model_validate({**fields, new: value}, strict=False)
