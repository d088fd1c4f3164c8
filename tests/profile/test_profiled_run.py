"""A profiled run: the same numbers, traces of the named ranks, and parts that add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from train.gang import Gang, make_data, make_run

from slurmllm.cli.main import cli
from slurmllm.profile.trace import PARTS, RankProfile, summarize
from slurmllm.run.records import MetricsRow
from slurmllm.run.rundir import RunDir

TWO = ("cluster.devices_per_node=2", "train.steps=6", "checkpoint.every_steps=3")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("profiled")
    data = make_data(folder)
    plain = Gang(make_run(folder / "plain", data, *TWO), world=2)
    profile = ("profile.steps=[3, 4]", "profile.ranks=[0, 1]", "profile.memory=true")
    run = Gang(make_run(folder / "run", data, *TWO, *profile), world=2)
    plain.finish()
    return run.finish()


def losses(run: RunDir) -> list[tuple[float, float, float]]:
    lines = run.metrics(0).read_text().splitlines()
    rows = [MetricsRow.model_validate_json(line) for line in lines]
    return [(row.loss, row.grad_norm, row.param_norm) for row in rows]


def test_training_is_bit_identical(profiled: RunDir) -> None:
    plain = RunDir(profiled.path.parent / "plain")
    assert losses(profiled) == losses(plain)
    assert len(losses(plain)) == 6
    assert not plain.profiles.exists()


def test_every_instant_is_of_one_part(profiled: RunDir) -> None:
    assert list(profiled.profiled()) == [0]
    files = profiled.profiled()[0]
    assert [worker.rank for worker in files] == [0, 1]
    for worker in files:
        profile = RankProfile.load(worker.summary)
        assert (profile.rank, profile.first_step, profile.last_step) == (worker.rank, 3, 4)
        assert set(profile.parts) == set(PARTS)
        assert all(seconds >= 0 for seconds in profile.parts.values())
        for part in ("data", "forward", "backward", "communication", "optimizer"):
            assert profile.parts[part] > 0, part
        # The parts divide the window of both steps.
        start, end = profile.window
        assert sum(profile.parts.values()) == pytest.approx((end - start) / 2e6, abs=1e-5)
        assert sum(operation.self_s for operation in profile.operations) <= profile.step_s
        assert any(operation.name == "aten::mm" for operation in profile.operations)
        assert profile.peak_bytes is not None
        assert profile.peak_bytes > 1e5
        assert not profile.device
        assert profile == summarize(worker.trace, worker.rank, profile.node)


def test_the_verb(profiled: RunDir) -> None:
    result = CliRunner().invoke(cli, ["profile", str(profiled.path), "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert [worker["rank"] for worker in values["ranks"]] == [0, 1]
    for worker in values["ranks"]:
        assert sum(worker["parts"].values()) == pytest.approx(worker["step_s"])
        assert len(worker["operations"]) == 10
        assert Path(worker["trace"]).is_file()
    result = CliRunner().invoke(cli, ["profile", str(profiled.path), "--rank", "1"])
    assert result.exit_code == 0, result.output
    assert "rank 1:" in result.output
    assert "ui.perfetto.dev" in result.output
    assert "allocated at most" in result.output
    for option, value in (("--rank", "7"), ("--attempt", "3")):
        result = CliRunner().invoke(cli, ["profile", str(profiled.path), option, value])
        assert (result.exit_code, "has no profile" in result.stderr) == (2, True)
    result = CliRunner().invoke(cli, ["profile", str(profiled.path.parent / "plain")])
    assert result.exit_code == 2
    assert "slurmllm resume plain --set 'profile.steps=[FIRST, LAST]'" in result.stderr


def test_a_damaged_summary_is_read_from_the_trace(profiled: RunDir) -> None:
    files = profiled.profiled()[0][1]
    text = files.summary.read_text()
    files.summary.write_text("{")
    try:
        result = CliRunner().invoke(cli, ["profile", str(profiled.path), "--json"])
    finally:
        files.summary.write_text(text)
    assert result.exit_code == 0, result.output
    expected = json.loads(text)["step_s"]
    assert json.loads(result.stdout)["ranks"][1]["step_s"] == pytest.approx(expected)


def test_ranks_that_do_not_exist_are_refused_before_submission(tmp_path: Path) -> None:
    verb = f"submit tiny_neox --nodes 2 --dry-run --runs-dir {tmp_path}".split()
    result = CliRunner().invoke(cli, [*verb, "profile.steps=[3, 4]", "profile.ranks=[1, 2]"])
    assert "profile.ranks: 2: the run has 2 workers; choose ranks from 0 to 1" in result.output


def test_steps_that_are_not_reached_yet(profiled: RunDir, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((profiled.path / "config.yaml").read_text())
    result = CliRunner().invoke(cli, ["profile", str(tmp_path)])
    assert "profile.steps is [3, 4] of 6 steps; wait for step 4" in result.output
