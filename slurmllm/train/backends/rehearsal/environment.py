"""The environment of the rehearsal backend, which has no model and so compiles no graphs."""

from __future__ import annotations

from pathlib import Path

from slurmllm.core.config.resolve import RunConfig
from slurmllm.train.backends.environment import BackendEnvironment, Variable


class RehearsalEnvironment(BackendEnvironment):
    """Variables that keep a worker small, and settings that need a model."""

    @staticmethod
    def variables(config: RunConfig, profiles: Path | None = None) -> dict[str, Variable]:
        return {
            "MALLOC_ARENA_MAX": Variable("1", "glibc: fewer arenas, less memory held by threads"),
            "OMP_NUM_THREADS": Variable("1", "rehearsal: no computation to parallelize"),
            "OPENBLAS_NUM_THREADS": Variable("1", "numpy: no thread pool"),
            "TOKENIZERS_PARALLELISM": Variable("false", "tokenizers: no thread pool"),
        }

    @staticmethod
    def unsupported(config: RunConfig) -> list[str]:
        faults = []
        if config.recipe.train.init_from is not None:
            faults.append(
                "train.init_from: the rehearsal backend has no weights; leave it out with "
                "--set train.init_from=null"
            )
        if config.recipe.train.micro_batch == "auto" and config.cluster.device != "neuron":
            faults.append(
                "train.micro_batch: auto: the rehearsal backend has no model whose memory could be "
                "measured; give a number with --set train.micro_batch=1"
            )
        return faults


ENVIRONMENT = RehearsalEnvironment()
