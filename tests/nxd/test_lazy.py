"""On lazy XLA, as on a device: one worker, operations recorded and run when a step is marked.

torch-xla's own CPU client; only the closed wheels are stood in for. Collectives between workers
cannot run there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nxd.conftest import CPU

pytestmark = pytest.mark.nxd

_WORKER = """
import json, os, sys, tempfile
from pathlib import Path
import torch, torch_xla
import nxd_on_cpu
sys.meta_path.insert(0, nxd_on_cpu._Closed())
import torch_xla.core.xla_env_vars as names
names.HOST_WORLD_SIZE = "HOST_WORLD_SIZE"
import torch_xla.debug.metrics as metrics
from mesh_pool import counted, micro_batches, small_run
from slurmllm.train.backends.base import Worker, load_backend
from slurmllm.plan.mesh import make_mesh
from slurmllm.train.schedules import learning_rate

def count(name):
    found = metrics.metric_data(name)
    return found[0] if found else 0

family, steps, *overrides = sys.argv[1:]
config = small_run(family, 1, 1, 1, "backend=nxd", *overrides)
mesh = make_mesh(config, 1)
backend = load_backend("nxd")(config, mesh, Worker(0, 1, 0, "node"))
backend.start()
backend.build()
seen = {"device": backend.device.type, "late": backend.deferred_metrics, "compiled": {}, "read": 0,
        "evaluated": {}}

def step(number):
    compiled, read = count("CompileTime"), count("TransferFromDeviceTime")
    batches = micro_batches(backend, number)
    loss = backend.forward_backward(batches, counted(config, number))
    norm = backend.optimizer_step(learning_rate(config.recipe.optim, 3000, number))
    figures = loss, norm, backend.param_norm()
    seen["read"] += count("TransferFromDeviceTime") - read
    if count("CompileTime") > compiled:
        seen["compiled"][number] = count("CompileTime") - compiled
    return figures

rows, unread = [], None
for number in range(1, int(steps) + 1):
    figures = step(number)
    if unread is not None:
        rows.append([float(figure) for figure in unread])
    unread = figures
    if number >= 3 and config.recipe.eval.every_steps is not None:
        before = count("CompileTime")
        loss = float(backend.evaluate(micro_batches(backend, 1000)[: number % 4 + 1], 7 * number))
        seen["evaluated"][number] = count("CompileTime") - before
    if number == 3:
        backend.precompile_resume()
folder = Path(tempfile.mkdtemp())
saving = backend.save_shards(folder)
saving.wait(), saving.finish()
before, compiled = count("CompileTime"), dict(seen["compiled"])
backend.load_shards(folder)
step(int(steps) + 1)
seen["compiled by a resume"] = count("CompileTime") - before
seen["compiled"] = compiled
seen["on the host"] = [name for name in metrics.counter_names() if name.startswith("aten::")]
seen["loss"] = [row[0] for row in rows[:3]]
print(json.dumps(seen))
"""


LONG = ("train.steps=3000", "optim.min_lr=1e-5")


def lazily(family: str, steps: int, *overrides: str) -> dict[str, Any]:
    tools = Path(__file__).resolve().parents[2] / "tools" / "benchmarks"
    folders = [str(CPU), str(tools), os.environ.get("NXD_SRC", "")]
    with_port = {
        "PYTHONPATH": os.pathsep.join(folders),
        "PJRT_DEVICE": "CPU",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "HOST_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29611",
        "NXD_LOG_LEVEL": "error",
        "XLA_DISABLE_FUNCTIONALIZATION": "0",
    }
    environment = {k: v for k, v in os.environ.items() if k != "NXD_CPU_MODE"} | with_port
    done = subprocess.run(
        [sys.executable, "-c", _WORKER, family, str(steps), *overrides],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        # The learning rates and warm-ups at which numbers in the graph would round to 1.
        (
            "neox",
            (
                *("train.precision=bf16_sr", "parallel.zero=0", "optim.lr=9.7e-5"),
                *("optim.warmup_steps=100", "optim.weight_decay=0.01", *LONG),
            ),
        ),
        (
            "llama",
            (
                *("train.precision=bf16_mixed", "optim.lr=1.5e-4", "optim.warmup_steps=2000"),
                *("optim.weight_decay=0.1", "data.mask=document", *LONG),
            ),
        ),
        (
            "gpt3",
            (
                "train.precision=fp32",
                "train.activation_checkpointing=selective",
                "data.mask=document",
            ),
        ),
    ],
    ids=["neox", "llama", "gpt3"],
)
def test_the_graphs_of_three_steps_are_all(family: str, overrides: tuple[str, ...]) -> None:
    seen = lazily(family, 120, *overrides)
    assert seen["device"] == "xla"
    assert seen["late"]
    steps = [int(number) for number in seen["compiled"]]
    assert max(steps) <= 3, "a later step has another graph than precompile's"
    assert seen["read"] == 0, "something waits for the device inside a step"
    assert seen["compiled by a resume"] == 0
    assert set(seen["on the host"]) <= {"aten::_local_scalar_dense"}
    assert all(5 < loss < 8 for loss in seen["loss"])


def test_an_evaluation_has_graphs_of_its_own() -> None:
    overrides = ("train.precision=bf16_mixed", "eval.every_steps=1", "data.validation=0.1")
    seen = lazily("llama", 12, *overrides, "train.activation_checkpointing=full", *LONG)
    first, *others = seen["evaluated"].values()
    assert 1 <= first <= 2
    assert others == [0] * len(others), "another number of sequences has other graphs"
    assert max(int(number) for number in seen["compiled"]) <= 3, (
        "training has other graphs after it"
    )
    assert seen["compiled by a resume"] == 0
