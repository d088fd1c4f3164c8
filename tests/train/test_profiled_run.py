"""A profiled run: the same numbers, and traces of the named ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from click.testing import CliRunner

from slurmllm.cli.main import cli

from .gang import Gang, curve, make_data, make_run

TWO = ("cluster.devices_per_node=2", "train.steps=6", "checkpoint.every_steps=3")


def test_training_is_bit_identical_and_each_rank_has_a_trace(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    plain = Gang(make_run(tmp_path / "plain", data, *TWO), world=2)
    profile = ("profile.steps=[3, 4]", "profile.ranks=[0, 1]", "profile.memory=true")
    profiled = Gang(make_run(tmp_path / "run", data, *TWO, *profile), world=2)
    run, reference = profiled.finish(), plain.finish()
    assert curve(run) == curve(reference)
    assert len(curve(run)) == 6
    assert not reference.profiles.exists()
    for rank in (0, 1):
        with gzip.open(run.profile(0, rank).trace) as stream:
            names = {event.get("name") for event in json.load(stream)["traceEvents"]}
        parts = ("step 3", "step 4", "data", "forward", "backward", "optimizer")
        assert {"aten::mm", "[memory]", *(f"slurmllm.{part}" for part in parts)} <= names
        assert not {"slurmllm.step 2", "slurmllm.step 5"} & names


def test_ranks_that_do_not_exist_are_refused_before_submission(tmp_path: Path) -> None:
    verb = f"submit tiny_neox --nodes 2 --dry-run --runs-dir {tmp_path}".split()
    result = CliRunner().invoke(cli, [*verb, "profile.steps=[3, 4]", "profile.ranks=[1, 2]"])
    assert "profile.ranks: 2: the run has 2 workers; choose ranks from 0 to 1" in result.output
