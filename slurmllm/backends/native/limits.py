"""What the native backend cannot do yet, told before anything is submitted; torch-free."""

from __future__ import annotations

from slurmllm.config.resolve import RunConfig
from slurmllm.config.rules import choose, divisors


def unsupported(config: RunConfig) -> list[str]:
    """The settings of a run that this backend refuses: one line each with value, rule, remedy."""
    recipe = config.recipe
    tensor, model = recipe.parallel.tensor, recipe.model
    faults = []
    if model.kv_heads % tensor:
        faults.append(
            f"parallel.tensor: {tensor} does not divide {model.kv_heads} key and value heads, "
            "which the native backend does not replicate; "
            f"{choose(divisors(model.kv_heads))} with --set parallel.tensor"
        )
    if tensor > 1 and recipe.train.compile and recipe.train.activation_checkpointing == "selective":
        # torch 2.13 puts the DeviceMesh among the tensors that the compiled forward saves.
        faults.append(
            "train.activation_checkpointing: selective cannot be compiled under parallel.tensor "
            f"{tensor}; --set train.activation_checkpointing=full or none, or train.compile=false"
        )
    share = model.padded_vocab_size // tensor
    if share * (tensor - 1) >= model.vocab_size:
        faults.append(
            f"model.vocab_pad_multiple: {model.vocab_pad_multiple} pads {model.vocab_size} entries "
            f"to {model.padded_vocab_size}, and the last of {tensor} tensor-parallel workers has "
            f"nothing but padding; set a smaller multiple of {tensor}"
        )
    if config.cluster.device == "neuron":
        faults.append(
            "backend: native: the native backend computes on cpu and cuda devices, not on neuron; "
            "--set backend=nxd, or choose another --cluster"
        )
    return faults
