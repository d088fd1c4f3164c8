"""Profiled steps on the real NxD: the same numbers, and the passes of a pipeline are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from train.gang import Gang, curve, make_data, make_run

from nxd.conftest import nxd_environment
from slurmllm.profile.trace import RankProfile

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
    for files in run.profiled()[0]:
        summary = RankProfile.load(files.summary)
        assert (summary.first_step, summary.last_step) == (3, 4)
        for part in ("forward", "backward", "communication", "optimizer"):
            assert summary.parts[part] > 0, part
