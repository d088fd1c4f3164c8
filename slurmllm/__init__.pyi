from slurmllm.api import (
    compare_runs,
    load_recipe,
    plan_run,
    read_curves,
    read_status,
    read_statuses,
    submit_run,
)
from slurmllm.compare.comparison import Comparison
from slurmllm.config.resolve import RunConfig
from slurmllm.errors import SlurmllmError
from slurmllm.metrics.curves import Curve
from slurmllm.plan.output import Plan
from slurmllm.status.runs import RunState, RunStates
from slurmllm.submit.launch import SubmittedRun

__version__: str
__all__ = [
    "Comparison",
    "Curve",
    "Plan",
    "RunConfig",
    "RunState",
    "RunStates",
    "SlurmllmError",
    "SubmittedRun",
    "compare_runs",
    "load_recipe",
    "plan_run",
    "read_curves",
    "read_status",
    "read_statuses",
    "submit_run",
]
