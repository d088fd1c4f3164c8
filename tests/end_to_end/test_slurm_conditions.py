"""Wrong requests and shells that leak accuse no node; broken nodes are still blamed."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.conditions import Condition, Observation, load, play

pytestmark = pytest.mark.slurm

ROWS = [pytest.param(row, id=row.name, marks=() if row.ci else pytest.mark.long) for row in load()]


@pytest.fixture(scope="module")
def observations(
    slurm_installed: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Observation]:
    """What became of the conditions that are not skipped, played together."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    left = [item for item in items if item.get_closest_marker("skip") is None]
    rows = [item.callspec.params["condition"] for item in left if isinstance(item, pytest.Function)]
    seen = play(rows, tmp_path_factory.mktemp("conditions"))
    return {observation.condition.name: observation for observation in seen}


@pytest.mark.parametrize("condition", ROWS)
def test_condition(condition: Condition, observations: dict[str, Observation]) -> None:
    assert not observations[condition.name].failures
