"""Events as a worker writes them."""

from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.worker_files import EventLog


def evaluation(run: RunDir, attempt: int, step: int, seconds: float = 1.5, **losses: float) -> None:
    """Append an evaluation to the events of an attempt."""
    run.events(attempt).parent.mkdir(exist_ok=True)
    log = EventLog(run.events(attempt), attempt)
    log.add("evaluation", step, seconds=seconds, waited_s=seconds, values=losses)
