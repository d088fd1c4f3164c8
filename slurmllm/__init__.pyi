from slurmllm.analysis.compare.result import Comparison as Comparison
from slurmllm.analysis.status.logs import RunLogs as RunLogs
from slurmllm.analysis.status.runs import RunState as RunState
from slurmllm.analysis.status.runs import RunStates as RunStates
from slurmllm.api import (
    cancel_run,
    compare_runs,
    export_checkpoint,
    load_recipe,
    plan_run,
    read_curves,
    read_logs,
    read_status,
    read_statuses,
    resume_run,
    submit_run,
)
from slurmllm.core.config.resolve import RunConfig as RunConfig
from slurmllm.core.errors import SlurmllmError
from slurmllm.core.metrics.curves import Curve as Curve
from slurmllm.launch.submit.deletion import CancelledRun as CancelledRun
from slurmllm.launch.submit.launch import SubmittedRun as SubmittedRun
from slurmllm.plan.output import Plan as Plan
from slurmllm.train.checkpoint.formats.model_folders import ExportedModel as ExportedModel

__version__: str
__all__ = [
    "SlurmllmError",
    "cancel_run",
    "compare_runs",
    "export_checkpoint",
    "load_recipe",
    "plan_run",
    "read_curves",
    "read_logs",
    "read_status",
    "read_statuses",
    "resume_run",
    "submit_run",
]
