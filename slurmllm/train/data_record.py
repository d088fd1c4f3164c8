"""What a run reads, written down once: a later attempt that would read something else is refused.

A checkpoint says the same of itself; this also covers the time before the first one, and lets
`compare` tell whether two runs saw the same data.
"""

from __future__ import annotations

from slurmllm.errors import DataError
from slurmllm.records import DataRecord
from slurmllm.train.job import Job


def settle_data(job: Job) -> None:
    """Write `data.json` at the first attempt, compare with it at the others; one worker does it.

    Raises:
        DataError: the data are not those that the run began with.
    """
    if job.stage != "train" or job.worker.rank != 0:
        return
    reads = DataRecord.model_validate(job.stream.identity)
    if not job.run.data.is_file():
        reads.save(job.run.data)
        return
    changed = DataRecord.load(job.run.data).differences(reads)
    if changed:
        raise DataError(
            f"the data changed after {job.run.name} began: {'; '.join(changed)}; put the old ones "
            "back or start a new run"
        )
