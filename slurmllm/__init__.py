"""slurmllm: from one line on a Slurm cluster to a trained, requeued and compared language model."""

from __future__ import annotations

import importlib

__version__ = "0.1.0"
# What is public, described in docs/api.md, by the module that has it and that is imported when the
# name is first used. For type checkers: __init__.pyi.
_PUBLIC = {
    "api": "load_recipe plan_run submit_run read_status read_statuses read_curves compare_runs",
    "compare.comparison": "Comparison",
    "config.resolve": "RunConfig",
    "errors": "SlurmllmError",
    "metrics.curves": "Curve",
    "plan.output": "Plan",
    "status.runs": "RunState RunStates",
    "submit.launch": "SubmittedRun",
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'slurmllm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"slurmllm.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
