"""slurmllm's native backend, driven as its training loop drives it, torch.compile on."""

from __future__ import annotations

from contestants import task as settings
from contestants.child import Turn
from contestants.task import Task
from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.plan.mesh import make_mesh
from slurmllm.train.backends.base import Backend, MicroBatch, Worker, load_backend

PRECISIONS = {"fp32": "fp32", "bf16": "bf16_mixed"}


def config_of(task: Task) -> RunConfig:
    s = task.shape
    overrides = {
        "model.num_layers": s.layers,
        "model.hidden_size": s.hidden,
        "model.num_heads": s.heads,
        "model.num_kv_heads": s.kv_heads,
        "model.ffn_hidden_size": s.ffn,
        "model.vocab_size": s.vocab,
        "model.seq_len": task.seq,
        "train.global_batch": task.batch,
        "train.micro_batch": task.batch,
        "train.precision": PRECISIONS[task.precision],
        "train.compile": "true",
        "optim.lr": settings.LR,
        "optim.min_lr": settings.LR,
        "optim.betas": list(settings.BETAS),
        "optim.eps": settings.EPS,
        "optim.weight_decay": settings.WEIGHT_DECAY,
        "optim.grad_clip": settings.GRAD_CLIP,
    }
    assigned = [f"{key}={value}" for key, value in overrides.items()]
    return resolve(f"tiny_{s.family}", "local", assigned)


def start_backend(config: RunConfig) -> Backend:
    """Return the native backend of one worker, with model and optimizer."""
    backend = load_backend("native")(config, make_mesh(config, 1), Worker(0, 1, 0, "node"))
    backend.start()
    backend.build()
    return backend


def train(task: Task, turn: Turn) -> None:
    backend = start_backend(config_of(task))
    for tokens, labels in task.batches():
        loss = backend.forward_backward([MicroBatch(tokens, labels)], labels.size)
        backend.optimizer_step(settings.LR)
        turn.step_done(lambda loss=loss: float(loss))
