"""Private names of torch and lm_eval that slurmllm uses, which another version may not have.

What needs a missing one does without it or refuses, and nothing else fails. `doctor` reports them
by `python -m slurmllm.train.model.private_names`, which prints a line for each feature that is
affected.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NamedTuple


class PrivateNames(NamedTuple):
    """Names of a module that a feature needs."""

    module: str
    names: tuple[str, ...]
    without: str  # what follows if one of them is missing

    def missing(self) -> str | None:
        """Return what is missing and what follows; None if all names exist."""
        try:
            module = importlib.import_module(self.module)
        except ImportError:
            return f"no module {self.module}: {self.without}"
        names = [name for name in self.names if not hasattr(module, name)]
        return f"no {', '.join(names)} in {self.module}: {self.without}" if names else None

    def get(self) -> tuple[Any, ...]:
        module = importlib.import_module(self.module)
        return tuple(getattr(module, name) for name in self.names)


SIGNED_OBJECTS = PrivateNames(
    "torch.distributed.distributed_c10d",
    ("_pickler", "_unpickler", "_tensor_to_object"),
    "the objects that torch's workers exchange are not signed (docs/developing/security.md)",
)
CHECKPOINT_INDEX = PrivateNames(
    "torch.distributed.checkpoint.filesystem",
    ("_StorageInfo",),
    "slurmllm reads the native checkpoints that it writes, and torch itself does not",
)
FLIGHT_RECORDER = PrivateNames(
    "torch._C._distributed_c10d",
    ("_dump_fr_trace",),
    "a hang on CPUs does not name the collective in which ranks wait",
)
MUON_UPDATE = PrivateNames(
    "torch.optim._muon",
    ("_zeropower_via_newtonschulz", "_adjust_lr"),
    "optim.name=muon is refused",
)
TASK_FUNCTIONS = PrivateNames(
    "lm_eval.tasks._yaml_loader",
    ("_mk_function_ctor",),
    "tasks that come neither with lm_eval nor with slurmllm need --allow-code-execution",
)
FEATURES = (SIGNED_OBJECTS, CHECKPOINT_INDEX, FLIGHT_RECORDER, MUON_UPDATE, TASK_FUNCTIONS)


def missing_names() -> list[str]:
    """Return a line for each feature that lacks a name; packages that are absent lack none."""
    installed = (f for f in FEATURES if importlib.util.find_spec(f.module.partition(".")[0]))
    return [message for feature in installed if (message := feature.missing()) is not None]


if __name__ == "__main__":
    print(*missing_names(), sep="\n")
