"""Train language models on a Slurm cluster: plan, submit, resume, compare and export runs.

    import slurmllm

    config = slurmllm.load_recipe("llama3_8b", "p5", {"optim.lr": 1e-4})
    plan = slurmllm.plan_run(config, nodes=[4, 8])
    run = slurmllm.submit_run(plan.best_config(8), nodes=8, name="first")
    print(slurmllm.read_status("first"))

Functions (`help(slurmllm.submit_run)` has arguments and an example):

    load_recipe        Return a recipe with a cluster profile: every value, with its source.
    plan_run           Rank the parallel layouts of a recipe, with memory, time and cost.
    submit_run         Submit the jobs that train a recipe, or train it on this machine.
    resume_run         Continue a run that was cancelled or has stopped.
    cancel_run         Cancel the jobs of a run, or of all runs of a sweep.
    read_status        Return the state of a run.
    read_statuses      Return the states of all runs.
    read_logs          Return the logs of a run.
    read_curves        Return the metrics of a run, or of another framework's log.
    compare_runs       Compare the loss and gradient norm of two runs.
    export_checkpoint  Export a checkpoint as a Hugging Face model folder.

They return records with `to_dict()`, many with `to_pandas()`, and raise `SlurmllmError`. The page
docs/api.md describes functions, records and errors.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from types import ModuleType

__version__ = "0.1.0"
# What is public, described in docs/api.md, by the module that has it and that is imported when the
# name is first used. For type checkers: __init__.pyi.
_PUBLIC = {
    "api": (
        "load_recipe plan_run submit_run read_status read_statuses read_curves compare_runs "
        "resume_run read_logs cancel_run export_checkpoint"
    ),
    "analysis.compare.result": "Comparison",
    "core.config.resolve": "RunConfig",
    "core.errors": "SlurmllmError",
    "core.metrics.curves": "Curve",
    "plan.output": "Plan",
    "analysis.status.logs": "RunLogs",
    "analysis.status.runs": "RunState RunStates",
    "launch.submit.deletion": "CancelledRun",
    "launch.submit.launch": "SubmittedRun",
    "train.checkpoint.formats.model_folders": "ExportedModel",
}
_ROOMS = {
    "core": "config display errors format log metrics plugins removed run slurm",
    "data": "corpus",
    "train": "backends checkpoint control model",
    "launch": "diagnose graphs init submit supervise",
    "analysis": "calibrate compare drill evaluate report spikes status track",
}
_WING_OF_ROOM = {room: wing for wing, rooms in _ROOMS.items() for room in rooms.split()}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names.split()}
# What `from slurmllm import *` imports and `help(slurmllm)` describes: not the records.
__all__ = [*_PUBLIC["api"].split(), "SlurmllmError"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'slurmllm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"slurmllm.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `slurmllm.ROOM…` from the wing that has the room since 0.1, until 0.2.

    Plugins and scripts of other packages import by these names. The finder is asked first: a
    checkout that was updated may have empty folders of the old names.
    """

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.partition(".")
        wing = _WING_OF_ROOM.get(name.partition(".")[0])
        if package != __name__ or wing is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=f"{__name__}.{wing}.{name}")

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        warnings.warn(
            f"{spec.name} has moved to {spec.origin}; the old name goes with 0.2",
            DeprecationWarning,
            stacklevel=2,
        )
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__  # the import system replaces it
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            module.__spec__ = spec.loader_state


sys.meta_path.insert(0, _MovedModules())
