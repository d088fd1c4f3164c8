"""What neuronx-cc is asked for (NEURON_CC_FLAGS), by precision; torch-free.

Sources: as in `environment.py`.
"""

from __future__ import annotations

from slurmllm.config.resolve import RunConfig


def compiler_flags(config: RunConfig) -> dict[str, str]:
    """The compiler's flags in order, each with its source."""
    flags = {
        "--model-type=transformer": "neox_20b.sh, HLAT, run_llama2_70B_tp_pp.sh",
        "--distribution-strategy=llm-training": "neox_20b.sh, HLAT",
    }
    if config.recipe.train.precision != "fp32":
        # Sums of bf16 values, such as softmax and norms, in fp32.
        flags["--enable-mixed-precision-accumulation"] = "neox_20b.sh, NxDT"
    # Nothing is cast behind the model's back. AWS says so for fp32 (train_setup.sh) and autocast
    # (NxDT); its other modes cast the whole model by XLA_USE_BF16, where we cast what shall be bf16
    # ourselves. Said aloud, because releases differ in the default (matmult, later none).
    flags["--auto-cast=none"] = "train_setup.sh, NxDT"
    return flags
