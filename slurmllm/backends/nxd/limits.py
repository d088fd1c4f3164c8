"""What the NxD backend cannot do, told before anything is submitted; torch-free."""

from __future__ import annotations

from slurmllm.config.resolve import RunConfig

_SIZES = (1, 2, 4, 8, 16, 32)


def unsupported(config: RunConfig) -> list[str]:
    """The settings of a run that this backend refuses: one line each with value, rule, remedy."""
    recipe = config.recipe
    parallel, train, model = recipe.parallel, recipe.train, recipe.model
    faults = []
    if config.cluster.device == "cuda":
        faults.append(
            "backend: nxd: neuronx-distributed computes on neuron devices (for tests, on cpu), not "
            "on cuda; --set backend=native, or choose another --cluster"
        )
    if parallel.zero > 1:
        faults.append(
            f"parallel.zero: {parallel.zero}: neuronx-distributed shares out optimizer state alone "
            "(ZeRO-1); --set parallel.zero=1"
        )
    if train.precision == "bf16_mixed" and parallel.zero == 0:
        faults.append(
            "train.precision: bf16_mixed: neuronx-distributed keeps fp32 master weights in its "
            "ZeRO-1 optimizer; --set parallel.zero=1, or train.precision=bf16_sr"
        )
    if parallel.sequence and model.seq_len % parallel.tensor:
        faults.append(
            f"model.seq_len: {model.seq_len} is not a multiple of parallel.tensor "
            f"{parallel.tensor}, which sequence parallelism shares it out over; "
            "--set parallel.sequence=false, or change the length"
        )
    if config.cluster.device == "neuron" and parallel.tensor not in _SIZES:
        faults.append(
            f"parallel.tensor: {parallel.tensor}: the collectives of trn1 work on "
            f"{', '.join(map(str, _SIZES))} cores"
        )
    return faults
