"""What the native backend cannot do yet, told before anything is submitted; torch-free."""

from __future__ import annotations

from slurmllm.config.resolve import RunConfig


def unsupported(config: RunConfig) -> list[str]:
    """The settings of a run that this backend refuses: one line each with value, rule, remedy."""
    recipe = config.recipe
    parallel, train = recipe.parallel, recipe.train
    faults = []
    for name, degree in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline)):
        if degree > 1:
            faults.append(
                f"parallel.{name}: {degree}: the native backend is data-parallel only so far; "
                f"--set parallel.{name}=1"
            )
    if train.precision not in ("fp32", "bf16_mixed"):
        faults.append(
            f"train.precision: {train.precision}: the native backend computes in fp32 or "
            "bf16_mixed; --set train.precision=bf16_mixed"
        )
    if train.activation_checkpointing == "selective":
        faults.append(
            "train.activation_checkpointing: selective: the native backend knows none and full; "
            "--set train.activation_checkpointing=full"
        )
    if config.cluster.device == "neuron":
        faults.append(
            "backend: native: the native backend computes on cpu and cuda devices, not on neuron; "
            "--set backend=nxd, or choose another --cluster"
        )
    return faults
