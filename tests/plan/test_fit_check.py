"""Written meshes held against the planner's: what is refused, what is warned of, what would do."""

from __future__ import annotations

import json
import re

import pytest

from slurmllm.backends.environment import load_environment
from slurmllm.config.resolve import RunConfig, resolve
from slurmllm.plan.fit_check import SLOW, FitCheck, check_fit

WASTEFUL = ("parallel.pipeline=32", "cluster.hardware.memory_gib=4000", "train.micro_batch=1")


def looked(config: RunConfig, nodes: int, **how: bool) -> FitCheck:
    result = check_fit(config, nodes, load_environment(config.backend).unsupported, **how)
    assert result is not None
    return result


def configured(*overrides: str, recipe: str = "pythia_6.9b") -> RunConfig:
    return resolve(recipe, overrides=overrides)


def with_options(message: str, *overrides: str) -> RunConfig:
    """The configuration with the options that a message names."""
    options = re.findall(r"--set (\S+=\S+)", message)
    assert options
    return configured(*overrides, *options)


def test_a_good_mesh_is_passed() -> None:
    result = looked(configured(), 4)
    assert (result.refusals, result.warnings, result.chosen) == ((), (), False)
    shown = json.loads(json.dumps(result.to_json()))
    assert shown["best"]["seq_per_s"] * SLOW <= shown["seq_per_s"]
    assert sum(shown["memory"].values()) == shown["memory_bytes"] <= shown["memory_limit_bytes"]
    assert sum(shown["parts_s"].values()) == pytest.approx(shown["step_s"])
    text = r"tensor 8, pipeline 1, data 16, micro batch 2: [\d.,]+ seq/s predicted, MFU \d+ %, "
    assert re.match(text + r"[\d.]+ of [\d.]+ GiB a worker$", result.line())


def test_a_mesh_far_from_the_best_is_warned_of() -> None:
    result = looked(configured(*WASTEFUL), 8)
    assert result.refusals == ()
    (message,) = result.warnings
    assert result.best is not None
    assert result.candidate.seq_per_s < SLOW * result.best.seq_per_s
    assert re.search(r"[\d.]+ seq/s predicted, \d+ % of the best on these nodes: --set", message)
    better = looked(with_options(message, *WASTEFUL), 8)
    assert better.warnings == ()
    assert better.candidate.seq_per_s == pytest.approx(result.best.seq_per_s)
    # What training is like is not the planner's to change.
    assert "train." not in message


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    config = configured("parallel.tensor=1")
    result = looked(config, 4)
    why, instead = result.refusals
    assert re.search(r"predicted to need [\d.]+ of [\d.]+ GiB: .*; [\d.]+ GiB too much$", why)
    assert re.search(r"optimizer [\d.]+[,;]", why)
    mended = looked(with_options(instead, "parallel.tensor=1"), 4)
    assert mended.candidate.fits
    assert mended.refusals == ()
    forced = looked(config, 4, force=True)
    assert (forced.refusals, forced.warnings) == ((), (why,))


def test_more_nodes_are_named_where_nothing_fits_these() -> None:
    result = looked(configured("parallel.pipeline=1", recipe="llama2_70b"), 1)
    assert result.best is None
    assert re.search(r"^--nodes \d+: .*--set parallel=auto$", result.refusals[-1])


def test_rough_figures_refuse_nothing() -> None:
    for why, overrides in (
        ("cluster.hardware.rough=true", ("parallel.tensor=1", "train.micro_batch=1")),
        ("backend=rehearsal", WASTEFUL),
    ):
        result = looked(configured(why, *overrides), 8)
        assert (result.refusals, result.warnings, result.best) == ((), (), None)
        assert result.line().endswith("by rough figures") == result.rough == ("rough" in why)


def test_nothing_is_predicted_without_figures_or_backend() -> None:
    for fault in ("cluster.hardware=null", "parallel.zero=3"):
        config = configured(fault)
        assert check_fit(config, 4, load_environment(config.backend).unsupported) is None


def test_a_micro_batch_to_be_measured_is_the_fastest_that_fits() -> None:
    auto = ("parallel.tensor=8", "train.micro_batch=auto")
    config = resolve("pythia_6.9b", "p4d", auto)
    result = looked(config, 4)
    assert result.candidate.mesh.micro_batch > 1
    assert not any("train." in message for message in result.warnings)
    unsupported = load_environment(config.backend).unsupported
    measured = check_fit(config, 4, unsupported, measured=1)
    assert measured is not None
    assert measured.candidate.mesh.micro_batch == 1
