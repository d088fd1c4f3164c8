"""What a conversion refuses, how much memory it takes, and what it leaves when it fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.conftest import Run
from checkpoint.nxd_folders import Layout, Whole, model_of, nxd_checkpoint, random_whole
from checkpoint.test_converting import convert
from slurmllm.checkpoint.formats.converting import NxdMesh, plan_conversion, run_conversion
from slurmllm.checkpoint.state import TRAIN_STATE, TrainState
from slurmllm.errors import StorageError
from slurmllm.run.artifact_records import CheckpointManifest


def test_refusals(run: Run, tmp_path: Path) -> None:
    nxd_checkpoint(tmp_path / "c", random_whole("llama"), Layout(2))

    def refused(*arguments: object) -> str:
        result = run("c", "--out", "out", *arguments)
        assert result.exit_code == 2, result.output
        assert not (tmp_path / "out").exists()
        assert [p.name for p in tmp_path.iterdir()] == ["c"]
        return result.output

    output = refused("--to", "nxd", "--tensor", 3, "--pipeline", 3)
    assert "parallel.tensor: 3 does not divide 8 attention heads" in output
    assert "parallel.pipeline: 3 does not divide 4 layers" in output
    output = refused("--to", "nxd", "--virtual-pipeline", 2)
    assert "parallel.virtual_pipeline: 2 chunks a stage need more stages" in output
    output = refused("--to", "nxd", "--precision", "bf16_mixed", "--no-zero")
    assert "--precision: bf16_mixed: neuronx-distributed keeps fp32 master weights" in output
    assert "--tensor: the native format" in refused("--to", "native", "--tensor", 2)
    assert "--zero: the native format" in refused("--to", "native", "--no-zero")


def test_damage(run: Run, tmp_path: Path) -> None:
    whole = random_whole("neox")
    source = nxd_checkpoint(tmp_path / "c", whole, Layout(2, data=2))
    shard = source / "nxd/optim/dp_rank_01_tp_rank_01_pp_rank_00.pt"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    result = run("c", "--to", "native", "--out", "out")
    assert result.exit_code == 4
    assert f"{shard.name} does not match its checksum" in result.output
    # Gone after it was verified: nothing is left of the result.
    shard.write_bytes(content)
    for mesh in (None, NxdMesh(1, 2)):
        plan = plan_conversion(source, mesh)
        shard.unlink()
        with pytest.raises(StorageError, match=f"{shard.name} cannot be read"):
            run_conversion(plan, tmp_path / "out")
        assert [p.name for p in tmp_path.iterdir()] == ["c"]
        shard.write_bytes(content)
    names = json.loads((source / "nxd_layout.json").read_text())
    names["names"][0].remove("layers.2.mlp.up.bias")
    (source / "nxd_layout.json").write_text(json.dumps(names))
    with pytest.raises(StorageError, match=r"layers.2.mlp.up.bias: is missing; \[36\] was expect"):
        plan_conversion(source)


def test_a_native_checkpoint_that_lacks_moments_of_one(tmp_path: Path) -> None:
    whole = random_whole("neox")
    first = nxd_checkpoint(tmp_path / "c", whole, Layout())
    native = convert(first, tmp_path / "native", None)
    other = model_of("neox").model_copy(update={"num_layers": 5})
    state = TrainState.load(native / TRAIN_STATE)
    fields = {**state.fingerprint, "model.num_layers": other.num_layers}
    state.model_copy(update={"fingerprint": fields}).save(native / TRAIN_STATE)
    with pytest.raises(StorageError) as caught:
        plan_conversion(native, NxdMesh())
    assert "  exp_avg of layers.4.mlp.down.weight: is missing; [40, 36]" in str(caught.value)


_MEASURED = """
import os
import resource, sys
from pathlib import Path
import torch, torch.distributed.checkpoint.state_dict_saver, torch._subclasses.fake_tensor
from slurmllm.checkpoint.formats.converting import NxdMesh, plan_conversion, run_conversion

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1e3

source, out, mesh = sys.argv[1:]
before = peak()
plan = plan_conversion(Path(source), eval(mesh))
run_conversion(plan, Path(out))
print(before, peak())
"""


@pytest.mark.long
def test_memory(tmp_path: Path) -> None:
    """Of 42M parameters, 0.5 GB with the moments: a worker's share or a few pieces at a time."""
    sizes = {
        "num_layers": 8,
        "hidden_size": 512,
        "num_heads": 8,
        "num_kv_heads": 4,
        "ffn_hidden_size": 1536,
        "vocab_size": 16000,
    }
    model = model_of("llama").model_copy(update=sizes)
    whole = _large(model)
    nxd_checkpoint(tmp_path / "first", whole, Layout(2, 1, 2))
    state_mb = 3 * sum(t.nbytes for t in whole.weights.values()) / 1e6
    assert state_mb > 480
    del whole
    # glibc keeps freed blocks of up to 32 MB in its heap, by chance 40 to 180 MB of them.
    freed = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    for source, out, mesh in (
        ("first", "native", "None"),
        ("native", "nxd", "NxdMesh(4, 2, 2)"),
    ):
        answer = subprocess.run(
            [sys.executable, "-c", _MEASURED, tmp_path / source, tmp_path / out, mesh],
            capture_output=True,
            text=True,
            check=True,
            env=freed,
        )
        before, peak = map(float, answer.stdout.split())
        print(f"{source} → {out}: {peak - before:.0f} MB above {before:.0f} MB")
        shutil.rmtree(tmp_path / source)
        assert peak - before < state_mb / 3


def _large(model: Any) -> Whole:
    from slurmllm.plan.parameters import parameter_shapes

    weights = {name: torch.full(shape, 0.5) for name, shape in parameter_shapes(model).items()}
    return Whole(model, weights, dict.fromkeys(("exp_avg", "exp_avg_sq"), weights))


def test_nothing_is_left_of_a_conversion_that_fails_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = nxd_checkpoint(tmp_path / "c", random_whole("gpt3"), Layout())
    monkeypatch.setattr(CheckpointManifest, "save", _full)
    with pytest.raises(StorageError, match="No space left"):
        run_conversion(plan_conversion(first), tmp_path / "new/out")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


_LIMITED = """
import resource, signal, sys
from slurmllm.cli.main import cli
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
cli(["checkpoint", "convert", *sys.argv[1:]])
"""


def test_a_full_disk(tmp_path: Path) -> None:
    nxd_checkpoint(tmp_path / "c", random_whole("gpt3"), Layout())
    answer = subprocess.run(
        [sys.executable, "-c", _LIMITED, "c", "--to", "nxd", "--out", "out"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert answer.returncode == 4, answer.stderr
    assert "File too large" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")
