"""slurmllm: from one line on a Slurm cluster to a trained, requeued and compared language model."""

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
    "api": "load_recipe plan_run submit_run read_status read_statuses read_curves compare_runs",
    "analysis.compare.result": "Comparison",
    "core.config.resolve": "RunConfig",
    "core.errors": "SlurmllmError",
    "core.metrics.curves": "Curve",
    "plan.output": "Plan",
    "analysis.status.runs": "RunState RunStates",
    "launch.submit.launch": "SubmittedRun",
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
__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'slurmllm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"slurmllm.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


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
