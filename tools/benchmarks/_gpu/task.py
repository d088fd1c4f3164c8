"""What all trainers of `gpu.py` train, its cost, and the planner's prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.parameters import model_flops
from slurmllm.plan.search import predict
from slurmllm.plan.step import peak_flops

LR = 3e-4
_LLAMA = (  # TinyLlama 1.1B (Zhang et al. 2024, arXiv 2401.02385)
    "model.num_layers=22",
    "model.hidden_size=2048",
    "model.num_heads=32",
    "model.num_kv_heads=4",
    "model.ffn_hidden_size=5632",
    "model.vocab_size=32000",
    "model.seq_len=2048",
)
# Name → recipe, overrides, and sequences in a step: on 80 GB they leave the peers, whose logits are
# tensors, room.
MODELS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "gpt3_1.3b": ("gpt3_1.3b", (), 8),
    "llama_1.1b": ("tiny_llama", _LLAMA, 8),
}
_FP8 = ("train.precision=fp8_mixed",)
_MUON = ("optim.name=muon",)
_SR = ("train.precision=bf16_sr",)
# Of ours alone, the most important first.
VARIANTS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "gpt3_1.3b, fp8": ("gpt3_1.3b", _FP8, 8),
    "llama_1.1b, fp8": ("tiny_llama", (*_LLAMA, *_FP8), 8),
    "gpt3_1.3b, muon": ("gpt3_1.3b", _MUON, 8),
    "gpt3_1.3b, bf16_sr": ("gpt3_1.3b", _SR, 8),
}
TINY: dict[str, tuple[str, tuple[str, ...], int]] = {
    "tiny_gpt3": ("tiny_gpt3", ("model.num_layers=2", "model.seq_len=64"), 2),
    "tiny_llama": ("tiny_llama", ("model.num_layers=2", "model.seq_len=64"), 2),
}
TINY_VARIANTS = {
    "tiny_gpt3, fp8": ("tiny_gpt3", (*TINY["tiny_gpt3"][1], *_FP8), 2),
    "tiny_gpt3, muon": ("tiny_gpt3", (*TINY["tiny_gpt3"][1], *_MUON), 2),
    "tiny_gpt3, bf16_sr": ("tiny_gpt3", (*TINY["tiny_gpt3"][1], *_SR), 2),
}
# ms of a step on an H200.
AIMS = {"gpt3_1.3b": 258, "llama_1.1b": 221, "gpt3_1.3b, fp8": 230, "llama_1.1b, fp8": 195}
# Logits at a time in the head, as powers of two; on a CPU of the tiny models.
HEAD_CHUNKS = {"cuda": (27, 28, 29), "cpu": (17, 18, 19)}
# Part of a GPU's name → cluster profile with its figures.
PROFILES = {"H100": "p5", "H200": "p5e", "A100": "p4d"}


@dataclass(frozen=True)
class Task:
    """One measurement: a model's training by one trainer on one device."""

    model: str
    device: str
    profile: str  # whose hardware figures apply
    memory_bytes: int | None  # of the device; None: as the profile has it
    steps: int  # timed ones; 0: only the first step, which compiles
    compiled: bool  # by Inductor; otherwise graphs are only captured
    extras: tuple[str, ...] = ()  # measured after the steps: methods of `Ours`

    def config(self) -> RunConfig:
        """The run configuration: one device, bf16 products, fp32 weights and optimizer state."""
        recipe, overrides, batch = (MODELS | VARIANTS | TINY | TINY_VARIANTS)[self.model]
        options = [
            "backend=native",
            f"cluster.device={self.device}",
            "cluster.devices_per_node=1",
            "parallel.tensor=1",
            "parallel.pipeline=1",
            "parallel.zero=1",
            f"train.global_batch={batch}",
            f"train.micro_batch={batch}",
            "train.activation_checkpointing=none",
            f"train.compile={str(self.compiled).lower()}",
            f"optim.lr={LR}",
            "optim.grad_clip=1.0",
        ]
        if self.memory_bytes is not None:
            options.append(f"cluster.hardware.memory_gib={self.memory_bytes / 2**30:.1f}")
        return resolve(recipe, self.profile, ["train.precision=bf16_mixed", *overrides, *options])


def forecast(task: Task) -> dict[str, float]:
    """Return the planner's prediction, and what turns a measured time into utilization.

    `memory_bytes` is the peak; `tokens` and `model_flops` are of a step, the latter as
    `slurmllm plan` counts them for MFU; `peak_flops` is the device's in bf16, per second.
    """
    config = task.config()
    mesh = make_mesh(config, 1)
    prediction = predict(config, mesh)
    return {
        "step_s": prediction.step.total,
        "memory_bytes": prediction.memory.peak,
        "tokens": mesh.global_batch * config.recipe.model.seq_len,
        "model_flops": model_flops(config.recipe.model, mesh.global_batch),
        "peak_flops": peak_flops(config),
    }


def profile_of(gpu: str) -> str | None:
    """Return the profile that has the figures of a GPU; None if no shipped profile has."""
    return next((profile for part, profile in PROFILES.items() if part in gpu), None)


Measured = dict[str, Any]  # a trainer's result, as `child.py` prints it
