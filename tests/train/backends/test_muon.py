"""The example package of docs/examples: installed by pip, trained with on meshes and by a run."""

from __future__ import annotations

import json
import site
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from amounts import amount, sample
from click.testing import CliRunner, Result
from mesh_pool import Case, MeshPool, Outcome, deviation
from mesh_pool import small_run as small
from rounding import training_rounding

from slurmllm.cli.main import cli
from slurmllm.core.config.resolve import RunConfig
from train.gang import Gang, curve, make_data, make_run, small_config

pytestmark = pytest.mark.numerics

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "slurmllm_muon"
MUON = ("optim.name=muon", "optim.lr=0.02", "optim.settings.adamw_lr=3e-3")
# bf16 rounds a difference in the last bit to another number now and then.
FP32 = (*MUON, "optim.settings.ns_precision=fp32")
FEW, SEQUENCE = "train.micro_batch=4", "parallel.sequence=true"
STEPS, LR = amount(4, of=12), 0.02
HALF = STEPS // 2
# Muon makes the rounding of small singular values larger, of which loss and norm have the least.
ROUNDING = training_rounding(small("llama"), STEPS)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    source = tmp_path_factory.mktemp("source") / "slurmllm_muon"
    subprocess.run(["cp", "-r", str(EXAMPLE), str(source)], check=True)  # pip may write into it
    subprocess.run(
        [*pip, "--no-index", "--target", str(target), str(source)], check=True, timeout=600
    )
    return target


@pytest.fixture(scope="module")
def unsharded(pool: MeshPool, installed: Path) -> list[Outcome]:
    return pool.run(case(installed, small("llama", 1, 1, 1, *FP32), last=STEPS))


def case(installed: Path, config: RunConfig, **settings: object) -> Case:
    prepare = partial(site.addsitedir, str(installed))
    return Case(config, lr=LR, prepare=prepare, **settings)


@pytest.mark.parametrize(
    "config",
    sample(
        1,
        [
            small("llama", 2, 1, 2, *FP32, FEW, SEQUENCE),
            small("llama", 1, 1, 4, *FP32, "parallel.zero=3"),
            small("llama", 2, 2, 1, *FP32, FEW),
        ],
    ),
    ids=["tp2-dp2", "dp4", "tp2-pp2"],
)
def test_sharded_is_unsharded(
    pool: MeshPool, installed: Path, unsharded: list[Outcome], config: RunConfig
) -> None:
    assert max(deviation(pool.run(case(installed, config, last=STEPS)), unsharded)) < ROUNDING


@pytest.mark.long
def test_resumes_bit_for_bit_and_on_another_mesh(
    pool: MeshPool, installed: Path, unsharded: list[Outcome], tmp_path: Path
) -> None:
    config = small("llama", 2, 2, 1, *FP32, FEW)
    whole = pool.run(case(installed, config, last=STEPS))
    pool.run(case(installed, config, last=HALF, save=tmp_path))
    outcomes = pool.run(case(installed, config, first=HALF, last=STEPS, load=tmp_path))
    assert outcomes[0].rows == whole[0].rows[HALF:]
    other = small("llama", 1, 1, 4, *FP32, "parallel.zero=3")
    outcomes = pool.run(case(installed, other, first=HALF, last=STEPS, load=tmp_path))
    assert max(deviation(outcomes, unsharded)) < ROUNDING


def test_plain_tensors_have_the_bits_of_pytorch(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    from slurmllm_muon.muon import ShardedMuon

    torch.manual_seed(0)
    ours = [torch.randn(24, 16), torch.randn(8, 32)]
    theirs = [tensor.clone() for tensor in ours]
    options = {"lr": 0.1, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = [ShardedMuon(ours, fp32=False, **options), torch.optim.Muon(theirs, **options)]
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_a_run_trains_with_both_parts(installed: Path, tmp_path: Path) -> None:
    data = make_data(tmp_path)
    settings = (
        "cluster.devices_per_node=2",
        "train.steps=8",
        "optim.decay_steps=8",
        *MUON,
        "checkpoint.every_steps=4",
        "hooks.layer_norms.every=2",
        "optim.warmup_steps=2",
    )
    path = {"PYTHONPATH": str(installed)}
    whole = Gang(make_run(tmp_path / "whole", data, *settings), 2, env=path).finish()
    run = make_run(tmp_path / "run", data, *settings, "train.steps=4")
    Gang(run, 2, env=path).finish()
    run.config.write_text(whole.config.read_text())
    Gang(run, 2, attempt=1, env=path).finish()
    assert curve(run, 0, 1) == curve(whole), "bit-identical"

    written = [
        json.loads(line) for line in whole.hook_rows("layer_norms", 0).read_text().splitlines()
    ]
    assert [row.pop("step") for row in written] == [2, 4, 6, 8]
    assert list(written[0]) == ["layer_norm/0", "layer_norm/1", "layer_norm/rest"]
    total = sum(norm**2 for norm in written[-1].values()) ** 0.5
    assert total == pytest.approx(curve(whole)[8][2], rel=1e-6)
    assert b"layer_norm/rest" in next(whole.tensorboard.glob("events*")).read_bytes()

    # Muon's state does not keep weights from being exported.
    checkpoint = str(whole.checkpoint(8))
    assert call("export", checkpoint, "--out", str(tmp_path / "hub")).exit_code == 0

    # A resume with another optimizer starts from no checkpoint of this one.
    adamw = ("optim.name=adamw", "optim.settings={}")
    run.config.write_text(small_config(*settings, *adamw, data=data).to_yaml())
    gang = Gang(run, 2, attempt=2, env=path)
    assert gang.wait() == [2, 2]
    assert "optim.name: the checkpoint has 'muon', the run 'adamw'" in gang.output()
    # Without the package, before the first step.
    run.config.write_text(whole.config.read_text())
    gang = Gang(run, 2, attempt=3)
    assert gang.wait() == [2, 2]
    assert "hooks.layer_norms: 'layer_norms' is unknown: no installed package" in gang.output()


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["checkpoint", *arguments])
