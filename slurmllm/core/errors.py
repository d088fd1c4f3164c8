"""Every error that slurmllm raises on purpose, with its exit code and who is to blame.

    SlurmllmError                   exit  blame            the message names a fix
    ├── UserError                      2  user
    │   ├── ConfigError                2  user             recipe, --set, cluster profile, mesh
    │   ├── DataError                  2  user             corpus, tokenizer, input files
    │   └── RunError                   2  user             run names, run directories, metrics files
    ├── InfrastructureError            3  infrastructure
    │   ├── SlurmError                 3  infrastructure   commands absent, failing or refusing
    │   ├── NodeError                  3  infrastructure   a node, its disk or the network
    │   └── StorageError               4  infrastructure   disk full, unreadable or damaged files
    │       └── CheckpointError        4  infrastructure   no checkpoint that verifies
    └── CodeError                     70  code
        ├── PluginError               70  code             a plugin's hook that raised
        ├── DivergenceError           71  code             a loss or norm that went wrong
        │   └── StaleGraphsError      71  code             at once, with graphs compiled before
        └── OutOfMemoryError          72  code             a run on a device or its host

Three more exit codes are no class of ours: 1, a check that failed (`compare`: the runs differ;
`evaluate`: some tasks were not scored), 5, a check that tested nothing (`drill`), and 75,
`EX_TEMPFAIL`: a stage stopped early, saved its work and is to be started again. 130 is an interrupt
from the keyboard and 141 a closed output pipe, as in every shell.

A message names the value, the rule and the fix:
"parallel.tensor 6 does not divide 64 attention heads; choose 1, 2, 4, 8, 16, 32 or 64".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from slurmllm.core.format import format_lines

Blame = Literal["user", "infrastructure", "code"]

EXIT_OK = 0
EXIT_NEGATIVE = 1
EXIT_NOT_TESTED = 5
EXIT_OUT_OF_MEMORY = 72
EXIT_REQUEUE = 75
EXIT_INTERRUPTED = 130


class SlurmllmError(Exception):
    """The root: what the command line prints without a traceback."""

    exit_code: ClassVar[int] = 70
    blame: ClassVar[Blame] = "code"


class UserError(SlurmllmError):
    """Invalid input or configuration."""

    exit_code = 2
    blame = "user"


class ConfigError(UserError):
    """One or more faults of a recipe, an override, a cluster profile or a mesh.

    Attributes:
        faults: One line a fault, each beginning with its dotted path.
    """

    def __init__(self, title: str, faults: Sequence[str] = ()) -> None:
        self.title = title
        self.faults = tuple(faults)
        super().__init__(title + format_lines(faults))


class DataError(UserError):
    """A corpus, a tokenizer or an input file that is unusable."""


class RunError(UserError):
    """An unusable run name or run directory, or a metrics file without readable rows."""


class InfrastructureError(SlurmllmError):
    """The machines, the network, the disks or Slurm failed, not the user and not the code."""

    exit_code = 3
    blame = "infrastructure"


class SlurmError(InfrastructureError):
    """A Slurm command is absent, failed or refused; the message quotes Slurm."""


class NodeError(InfrastructureError):
    """A node, its local disk or the network between nodes failed."""


class StorageError(InfrastructureError):
    """The shared file system is full, refuses to write or holds a damaged file."""

    exit_code = 4


class CheckpointError(StorageError):
    """A checkpoint could not be written, or none of the existing ones verifies."""


class CodeError(SlurmllmError):
    """A fault of the training code or of slurmllm itself."""

    exit_code = 70
    blame = "code"


class PluginError(CodeError):
    """A hook of another package raised."""


class DivergenceError(CodeError):
    """The loss or the gradient norm is not finite, or a spike of the norm persisted."""

    exit_code = 71


class StaleGraphsError(DivergenceError):
    """The first step's loss or norm is not finite, with graphs that were compiled before."""


class OutOfMemoryError(CodeError):
    """A run that ended because a device's or the host's memory was full."""

    exit_code = EXIT_OUT_OF_MEMORY


def by_exit_code(code: int) -> type[SlurmllmError]:
    """Return the most general class of errors with an exit code; CodeError for others."""
    kinds = (UserError, InfrastructureError, StorageError, DivergenceError, OutOfMemoryError)
    return next((kind for kind in kinds if kind.exit_code == code), CodeError)
