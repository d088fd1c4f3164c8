"""The rehearsal backend: figures that depend on every batch and on the whole history."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from slurmllm.core.errors import ConfigError, StorageError
from slurmllm.plan.mesh import make_mesh
from slurmllm.train.backends.base import MicroBatch, Worker, load_backend
from slurmllm.train.backends.environment import load_environment
from slurmllm.train.backends.rehearsal.runtime import RehearsalBackend
from slurmllm.train.control.plane import ControlPlane
from train.gang import control_planes, small_config

STEPS, LABELS = 6, 8 * 32
TOKENS = np.random.default_rng(0).integers(0, 512, (STEPS, 8, 33))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMLLM_REHEARSAL_STEP_S", "0")
    monkeypatch.setenv("SLURMLLM_REHEARSAL_BYTES", "8024")  # 1003 numbers: uneven shares


def trained(
    nodes: int,
    tokens: np.ndarray,
    *options: str,
    load: Path | None = None,
    save: Path | None = None,
) -> list[tuple[float, float, float]]:
    """The figures of each step, which all workers must agree on."""
    config = small_config("backend=rehearsal", "train.micro_batch=1", *options)
    mesh = make_mesh(config, nodes)

    def work(control: ControlPlane) -> list[tuple[float, float, float]]:
        rank = control.rank
        backend = RehearsalBackend(config, mesh, Worker(rank, nodes, 0, f"n{rank}"), control)
        backend._step_s = 0.0
        backend.build()
        if load is not None:
            backend.load_shards(load)
        results = []
        for number, step in enumerate(tokens):
            rows = np.split(step, mesh.data)[mesh.data_rank(rank)]
            batches = [MicroBatch(row[None, :-1], row[None, 1:]) for row in rows]
            loss = backend.forward_backward(batches, LABELS)
            results.append((loss, backend.optimizer_step(1e-3 * number), backend.param_norm()))
        if save is not None:
            saving = backend.save_shards(save)
            backend.optimizer_step(1.0)  # goes on, and is not in the save
            assert saving.wait() == [backend.state.file_name]
            control.barrier()
        backend.stop()
        return results

    with control_planes(nodes) as planes, ThreadPoolExecutor(nodes) as pool:
        first, *others = pool.map(work, planes)
    assert all(other == first for other in others)
    return first


def test_figures_are_the_same_on_any_mesh_and_differ_after_any_other_history() -> None:
    right = trained(1, TOKENS)
    assert right == trained(4, TOKENS)
    assert right == trained(8, TOKENS, "parallel.tensor=2", "parallel.pipeline=2")
    assert len({figure for step in right for figure in step}) == 3 * STEPS
    changed = TOKENS.copy()
    changed[1, 5, 7] += 1
    swapped, doubled = TOKENS[[0, 2, 1, 3, 4, 5]], TOKENS[[0, 0, 1, 2, 3, 4]]
    for wrong in (changed, swapped, doubled, TOKENS[[0, 2, 3, 4, 5]]):
        figures = trained(2, wrong)
        assert figures[0] == right[0]
        assert not {step[0] for step in figures[1:]} & {step[0] for step in right[1:]}


def test_a_resume_on_another_mesh_is_exact(tmp_path: Path) -> None:
    right = trained(2, TOKENS)
    trained(4, TOKENS[:3], save=tmp_path)
    # lr is numbered within a call; the first step after the resume has that of step 0 there too.
    resumed = trained(2, TOKENS[3:], load=tmp_path)
    assert resumed[0][0] == right[3][0]
    assert trained(8, TOKENS[3:], load=tmp_path) == resumed
    (tmp_path / "state_00001_of_00004.npy").unlink()
    with pytest.raises(StorageError, match="3 shards"):
        trained(1, TOKENS, load=tmp_path)


def test_what_it_cannot_do_is_said_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("backend=rehearsal", "train.init_from=/a", "train.micro_batch=auto")
    faults = load_environment("rehearsal").unsupported(config)
    assert [fault.partition(":")[0] for fault in faults] == ["train.init_from", "train.micro_batch"]
    config = small_config("backend=rehearsal")
    monkeypatch.setenv("SLURMLLM_REHEARSAL_STEP_S", "soon")
    backend = load_backend("rehearsal")(
        config, make_mesh(config, 1), Worker(0, 1, 0, "n"), ControlPlane()
    )
    with pytest.raises(ConfigError, match=r"STEP_S: 'soon' is not a number"):
        backend.start()


def test_its_worker_loads_no_torch() -> None:
    code = (
        "import sys, slurmllm.train.worker, slurmllm.train.loop, slurmllm.train.hooks\n"
        "from slurmllm.train.backends.base import load_backend; load_backend('rehearsal')\n"
        "print(*({'torch', 'pyarrow', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("", "")
