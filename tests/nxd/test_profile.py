"""Profiled steps on the real NxD: the same numbers, and the passes of a pipeline are found."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from train.gang import Gang, curve, make_data, make_run

from nxd.conftest import nxd_environment

pytestmark = pytest.mark.nxd

OPTIONS = (
    "backend=nxd",
    "cluster.devices_per_node=2",
    "train.steps=5",
    "checkpoint.every_steps=100",
    "parallel.pipeline=2",
)


def test_a_profile_changes_no_number(tmp_path: Path) -> None:
    data, env = make_data(tmp_path), nxd_environment()
    plain = Gang(make_run(tmp_path / "plain", data, *OPTIONS), world=2, env=env).finish()
    profile = ("profile.steps=[3, 4]", "profile.ranks=[0, 1]")
    run = Gang(make_run(tmp_path / "run", data, *OPTIONS, *profile), world=2, env=env).finish()
    assert curve(run) == curve(plain)
    for rank in (0, 1):
        with gzip.open(run.profile(0, rank).trace) as stream:
            names = {event.get("name") for event in json.load(stream)["traceEvents"]}
        expected = ("step 3", "step 4", "forward", "backward", "optimizer")
        assert {f"slurmllm.{name}" for name in expected} <= names
