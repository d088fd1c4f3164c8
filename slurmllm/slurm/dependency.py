"""Dependencies on other jobs that can never be met, found before a job is submitted."""

from __future__ import annotations

import re

from slurmllm.errors import SlurmError
from slurmllm.slurm.client import ACTIVE_STATES, SlurmClient


def check_dependency(text: str, client: SlurmClient) -> list[str]:
    """Look up the jobs of an sbatch dependency; returns warnings about unknown ones.

    Raises:
        SlurmError: a job has ended so that the dependency can never be met.
    """
    jobs = re.findall(r"\d+", re.sub(r"\+\d+", "", text))
    queue = client.queue(jobs)
    states = {row.job_id: row.state for row in client.accounting(*jobs)}
    states |= {job.job_id: job.state for job in queue.values()}
    warnings, never = [], []
    for kind, ids in re.findall(r"(after[a-z]*)((?::[\d_*+]+)+)", text):
        for job in re.findall(r":(\d+)", ids):
            state = states.get(job)
            if state is None:
                warnings.append(f"--dependency={text}: Slurm knows no job {job}")
            elif state not in ACTIVE_STATES and (
                (kind == "afterok" and state != "COMPLETED")
                or (kind == "afternotok" and state == "COMPLETED")
            ):
                never.append(f"job {job} has ended as {state}")
    # `?` separates alternatives, of which one is enough.
    if never and "?" not in text:
        raise SlurmError(
            f"--dependency={text} can never be met: {'; '.join(never)}; leave it out, or name a "
            "job that is yet to end"
        )
    return warnings
