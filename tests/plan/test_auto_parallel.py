"""`parallel: auto`: every choice can be submitted, keeps what was set, and fits."""

import json
import re
from pathlib import Path

import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from present import present

from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import RunConfig, change, resolve
from slurmllm.core.errors import ConfigError
from slurmllm.plan.choose_layout import SLOW, FitCheck, check_fit, choose_parallel
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.search import predict
from slurmllm.train.backends.environment import load_environment

pytestmark = pytest.mark.usefixtures("layouts_searched_once")

AUTO = "parallel=auto"
OVERRIDES = (
    *("parallel.tensor=8", "parallel.pipeline=2", "parallel.sequence=true", "parallel.zero=1"),
    *("train.micro_batch=auto", "train.micro_batch=2", "cluster.hardware.memory_gib=4000"),
)
TIGHT = "cluster.hardware.memory_gib=1"


def settled(config: RunConfig, nodes: int) -> RunConfig:
    return choose_parallel(config, nodes, load_environment(config.backend).unsupported)


def refused(recipe: str, nodes: int, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        settled(resolve(recipe, overrides=[AUTO, *overrides]), nodes)
    return caught.value


@settings(max_examples=amount(6, of=60))
@given(
    recipe=st.sampled_from(["neox_20b", "pythia_6.9b", "llama2_7b", "llama2_70b", "gpt3_1.3b"]),
    cluster=st.sampled_from(["trn1", "trn1n", "p4d"]),
    nodes=st.sampled_from([1, 2, 3, 4, 8, 12, 64, 100]),
    overrides=st.sets(st.sampled_from(OVERRIDES)),
)
def test_what_is_chosen_fits_and_keeps_what_is_set(
    recipe: str, cluster: str, nodes: int, overrides: set[str]
) -> None:
    config = resolve(recipe, cluster, [AUTO, *sorted(overrides)])
    try:
        chosen = settled(config, nodes)
    except ConfigError:
        return
    assert not chosen.recipe.parallel.auto
    assert load_environment(chosen.backend).unsupported(chosen) == []
    mesh = make_mesh(chosen, nodes)
    assert predict(chosen, mesh).fits
    # Put together from scratch, it breaks no rule.
    assert change(chosen, None, []).recipe == chosen.recipe
    before, after = dict(flat(config)), dict(flat(chosen))
    different = {path for path in after if after[path] != before[path]}
    assert different <= {*config.open_settings(), "parallel.auto", "train.micro_batch"}
    micro_batch, is_set = config.recipe.train.micro_batch, config.is_set("train.micro_batch")
    if micro_batch != "auto" or (cluster == "p4d" and is_set):
        assert chosen.recipe.train.micro_batch == micro_batch
    else:
        assert isinstance(chosen.recipe.train.micro_batch, int)


def flat(config: RunConfig) -> list[tuple[str, object]]:
    return [(path, value) for path, value, _ in config.rows()]


def test_sources_tell_what_the_planner_chose(tmp_path: Path) -> None:
    config = resolve("llama2_7b", overrides=[AUTO, "parallel.tensor=8", "train.micro_batch=auto"])
    path = tmp_path / "config.yaml"
    path.write_text(settled(config, 4).to_yaml())
    result = load(path)
    for name in ("pipeline", "virtual_pipeline", "sequence", "zero"):
        assert re.match(
            r"planner: best of \d+ layouts .* 4 nodes", result.origins[f"parallel.{name}"]
        )
    assert result.origins["train.micro_batch"].startswith("planner: ")
    assert result.origins["parallel.tensor"] == "--set parallel.tensor=8"
    assert result.origins["parallel.auto"] == "planner: resolved; auto by --set parallel=auto"
    assert result.open_settings() == []
    anew = settled(change(result, None, [AUTO, TIGHT.replace("=1", "=16")]), 64)
    assert anew.recipe.parallel.tensor in (1, 2, 8, 32)
    assert isinstance(anew.recipe.train.micro_batch, int)


TRIED = (
    ("llama2_70b", 1),
    ("neox_20b", 1, "parallel.tensor=1", "parallel.zero=0"),
    ("neox_20b", 3, "parallel.pipeline=4", "parallel.tensor=8", "train.micro_batch=4"),
)


@pytest.mark.parametrize("asked", TRIED, ids=lambda asked: asked[0])
def test_every_way_out_that_is_named_is_one(asked: tuple[str, int, *tuple[str, ...]]) -> None:
    recipe, nodes, *overrides = asked
    error = refused(recipe, nodes, *overrides)
    ways = [fault for fault in error.faults if re.match("this would fit|--nodes", fault)]
    assert ways
    for way in ways:
        more = [int(count) for count in re.findall(r"--nodes (\d+): ", way)]
        options = re.findall(r"--set (\S+)", way)
        assert more or options
        changed = resolve(recipe, overrides=[AUTO, *overrides, *options])
        settled(changed, more[0] if more else nodes)


def test_where_nothing_would_do_it_says_so() -> None:
    error = refused("neox_20b", 4, TIGHT, "parallel.tensor=8", "parallel.zero=0")
    assert "leave out parallel.tensor, parallel.zero, or choose another" in error.faults[-1]


WASTEFUL = ("parallel.pipeline=32", "cluster.hardware.memory_gib=4000", "train.micro_batch=1")


def fit_of(config: RunConfig, nodes: int, **how: bool) -> FitCheck:
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
    result = fit_of(configured(), 4)
    assert (result.refusals, result.warnings, result.chosen) == ((), [], False)
    shown = json.loads(json.dumps(result.to_json()))
    assert shown["best"]["seq_per_s"] * SLOW <= shown["seq_per_s"]
    assert sum(shown["memory"].values()) == shown["memory_bytes"] <= shown["memory_limit_bytes"]
    assert sum(shown["parts_s"].values()) == pytest.approx(shown["step_s"])
    text = r"tensor 8, pipeline 1, data 16, micro batch 2: [\d.,]+ seq/s predicted, MFU \d+ %, "
    assert re.match(text + r"[\d.]+ of [\d.]+ GiB a worker$", result.line())


def test_a_mesh_far_from_the_best_is_warned_of() -> None:
    result = fit_of(configured(*WASTEFUL), 8)
    assert result.refusals == ()
    (message,) = result.warnings
    assert result.candidate.seq_per_s < SLOW * present(result.best).seq_per_s
    assert re.search(r"[\d.]+ seq/s predicted, \d+ % of the best on these nodes: --set", message)
    better = fit_of(with_options(message, *WASTEFUL), 8)
    assert better.warnings == []
    assert better.candidate.seq_per_s == pytest.approx(present(result.best).seq_per_s)
    # What training is like is not the planner's to change.
    assert "train." not in message


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    config = configured("parallel.tensor=1")
    result = fit_of(config, 4)
    why, remedy = result.refusals
    assert re.search(r"predicted to need [\d.]+ of [\d.]+ GiB: .*; [\d.]+ GiB too much$", why)
    assert re.search(r"optimizer [\d.]+[,;]", why)
    remedied = fit_of(with_options(remedy, "parallel.tensor=1"), 4)
    assert remedied.candidate.fits
    assert remedied.refusals == ()
    forced = fit_of(config, 4, force=True)
    assert (forced.refusals, forced.warnings) == ((), [why])


def test_more_nodes_are_named_where_nothing_fits_these() -> None:
    result = fit_of(configured("parallel.pipeline=1", recipe="llama2_70b"), 1)
    assert result.best is None
    assert re.search(r"^--nodes \d+: .*--set parallel=auto$", result.refusals[-1])


def test_rough_figures_refuse_nothing() -> None:
    for why, overrides in (
        ("cluster.hardware.rough=true", ("parallel.tensor=1", "train.micro_batch=1")),
        ("backend=rehearsal", WASTEFUL),
    ):
        result = fit_of(configured(why, *overrides), 8)
        assert (result.refusals, result.warnings, result.best) == ((), [], None)
        assert result.line().endswith("by rough figures") == result.rough == ("rough" in why)


def test_nothing_is_predicted_without_figures_or_backend() -> None:
    for fault in ("cluster.hardware=null", "parallel.zero=3"):
        config = configured(fault)
        assert check_fit(config, 4, load_environment(config.backend).unsupported) is None


def test_a_micro_batch_to_be_measured_is_the_fastest_that_fits() -> None:
    auto = ("parallel.tensor=8", "train.micro_batch=auto")
    config = resolve("pythia_6.9b", "p4d", auto)
    result = fit_of(config, 4)
    assert result.candidate.mesh.micro_batch > 1
    assert not any("train." in message for message in result.warnings)
    unsupported = load_environment(config.backend).unsupported
    assert present(check_fit(config, 4, unsupported, measured=1)).candidate.mesh.micro_batch == 1
