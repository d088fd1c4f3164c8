"""What a run reads, written down once: a later attempt that would read something else is refused.

A checkpoint says the same of itself; this also covers the time before the first one, and lets
`compare` tell whether two runs saw the same data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmllm.errors import DataError
from slurmllm.records import DataRecord
from slurmllm.rundir import RunDir


def settle_data(run: RunDir, identity: Mapping[str, Any]) -> None:
    """Write `data.json` at the first attempt, compare with it at the others.

    Args:
        run: The run.
        identity: Of the stream that is about to be read (`PackedStream.identity`).

    Raises:
        DataError: the data are not those that the run began with.
    """
    reads = DataRecord.model_validate(identity)
    if not run.data.is_file():
        reads.save(run.data)
        return
    changed = DataRecord.load(run.data).differences(reads)
    if changed:
        raise DataError(
            f"the data changed after {run.name} began: {'; '.join(changed)}; put the old ones "
            "back or start a new run"
        )
