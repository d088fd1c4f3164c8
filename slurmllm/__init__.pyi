from slurmllm.analysis.compare.result import Comparison
from slurmllm.analysis.status.runs import RunState, RunStates
from slurmllm.api import (
    compare_runs,
    load_recipe,
    plan_run,
    read_curves,
    read_status,
    read_statuses,
    submit_run,
)
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import SlurmllmError
from slurmllm.core.metrics.curves import Curve
from slurmllm.launch.submit.launch import SubmittedRun
from slurmllm.plan.output import Plan

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
