"""`slurmllm plan`: the ranking, the tables, the JSON, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
import yaml
from cli.planning import plan, ranked
from command_line import answer, call, printed, refused
from made_records import save_attempt
from training_rows import make_row, write_rows

from slurmllm.core.config.resolve import clusters_dir, resolve
from slurmllm.core.run.rundir import RunDir
from slurmllm.plan.mesh import make_mesh, save_mesh

pytestmark = pytest.mark.usefixtures("layouts_searched_once")


def profile(folder: Path, name: str, **changes: object) -> str:
    """A shipped profile with other values; None takes a section away."""
    values = yaml.safe_load((clusters_dir() / f"{name}.yaml").read_text("utf-8"))
    for section, value in changes.items():
        if isinstance(value, dict):
            values[section].update(value)
        else:
            del values[section]
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def test_json_is_ranked_and_adds_up() -> None:
    result = ranked("neox_20b", "--nodes", "4", "--explain")
    assert (result["recipe"], result["cluster"], result["nodes"]) == ("neox_20b", "trn1", 4)
    fit = [item for item in result["candidates"] if item["fits"]]
    rest = result["candidates"][len(fit) :]
    rates = [item["seq_per_s"] * (0.97 if item["tight"] else 1) for item in fit]
    assert rates == sorted(rates, reverse=True)
    assert all(
        item["tight"] == (item["memory_bytes"] > 0.95 * item["memory_limit_bytes"]) for item in fit
    )
    assert rest
    assert not any(item["fits"] for item in rest)
    for item in result["candidates"]:
        assert item["tensor"] * item["pipeline"] * item["data"] == 4 * 32
        assert item["data"] * item["micro_batch"] * item["accumulation"] == 256
        assert sum(item["parts_s"].values()) == pytest.approx(item["step_s"])
        assert item["seq_per_s"] == pytest.approx(256 / item["step_s"])
        assert sum(item["memory"].values()) == item["memory_bytes"]
        assert item["fits"] == (item["memory_bytes"] <= item["memory_limit_bytes"])
        assert (item["reason"] is None) == item["fits"]
        assert item["tokens_per_usd"] * item["usd_per_hour"] == pytest.approx(
            3600 * item["tokens_per_s"]
        )
        trained_h = item["tokens"] / item["tokens_per_s"] / 3600
        assert item["usd"] == pytest.approx(trained_h * item["usd_per_hour"] / item["utilization"])
        assert item["hours"] >= trained_h / item["utilization"]
    (written,) = (item for item in result["candidates"] if item["recipe_layout"])
    assert (written["tensor"], written["pipeline"], written["data"]) == (8, 4, 4)
    assert result["recipe_layouts"][0]["rank"] == result["candidates"].index(written) + 1
    assert result["explanation"][0].startswith("best: TP ")
    assert result["prices"]["trn1"]["usd_per_node_hour"] == 21.50
    assert result["warnings"] == [w for w in result["warnings"] if "of 2023-12-12" in w]


def test_what_set_names_is_fixed_and_the_rest_is_free() -> None:
    overrides = ("parallel.tensor=8", "train.activation_checkpointing=full", "parallel.zero=0")
    names = ("tensor", "activation_checkpointing", "zero")
    fixed = ranked("neox_20b", "--nodes", "4", *overrides)["candidates"]
    assert {tuple(item[name] for name in names) for item in fixed} == {(8, "full", 0)}
    assert {item["pipeline"] for item in fixed} > {1, 4}
    # `parallel: auto` frees all degrees that are not set beside it, and has no layout of its own.
    auto = ranked("neox_20b", "--nodes", "4", "parallel=auto", "parallel.tensor=8")["candidates"]
    assert {item["tensor"] for item in auto} == {8}
    assert not any(item["recipe_layout"] for item in auto)


def test_the_answer_comes_first_then_the_best_of_each_mesh_and_the_recipes_own() -> None:
    done = plan("neox_20b", "--nodes", "4", "--top", "2")
    result = ranked("neox_20b", "--nodes", "4")
    best, *others = result["candidates"]
    days, low, high = (hours / 24 for hours in (best["hours"], *best["hours_interval"]))
    assert days / low == pytest.approx(best["seq_per_s_interval"][1] / best["seq_per_s"])
    answer = f"{days:.1f} days ({low:.1f}–{high:.1f}), {96 * days:.0f} node hours, "
    answer += f"${best['usd']:,.0f}; on TP 8 × PP 4 × DP 4, micro batch 2"
    answer += "; beyond all published runs"
    head, layouts, shares = done.stdout.split("\n\n")[:3]
    assert head.splitlines()[1] == answer
    second = next(c for c in others if (c["tensor"], c["pipeline"]) != (8, 4))
    starts = ["1 8 4", f"2 {second['tensor']} {second['pipeline']}", "3 * 8 4"]
    for row, start in zip(layouts.splitlines()[1:], starts, strict=True):
        assert " ".join(row.split()).startswith(start)
    assert [line[0] for line in shares.splitlines()[2:]] == ["1", "2", "3"]
    own = f"the recipe's own layout is {result['recipe_layouts'][0]['rank']} of"
    for text in (own, "does not fit: ", "price          $21.50 per node hour, 2023-12-12 ("):
        assert text in done.stdout


def test_the_last_line_submits_what_was_found(tmp_path: Path) -> None:
    done = plan("neox_20b", "--nodes", "4", "parallel.zero=0")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("submit "))
    assert "--set parallel.zero=0" in line
    assert line.endswith(" --fetch")  # the recipe's data are not there
    dry = (*line.split()[2:], "--dry-run", "--json", "--runs-dir", str(tmp_path))
    mesh, names = answer(call(*dry))["mesh"], ("tensor", "pipeline", "data", "micro_batch")
    best = ranked("neox_20b", "--nodes", "4", "parallel.zero=0")["candidates"][0]
    assert [mesh[name] for name in names] == [best[name] for name in names]


def test_what_is_asked_for_is_submitted_too() -> None:
    done = plan("gpt3_125m", "--nodes", "1", "train.micro_batch=auto", "--tokens", "20B")
    end = "auto --set train.steps=38147 --set optim.decay_steps=38147 --fetch"
    assert done.stdout.rstrip().endswith(end)
    # Of a run that ends within the warm-up, `submit` would refuse a decay that ends there.
    assert "decay_steps" not in plan("gpt3_125m", "--nodes", "1", "--tokens", "100M").stdout
    options = ("train.micro_batch=null", "train.global_batch=512", "env.HF_TOKEN=abc")
    texts = "--set train.micro_batch=null --set train.global_batch=512 --set env.HF_TOKEN "
    assert texts in plan("neox_20b", "--nodes", "4", *options).stdout


def test_several_node_counts_are_a_scaling_table() -> None:
    result = ranked("neox_20b", "--nodes", "16,4,8,4", "--price", "7.59")
    rows = result["scaling"]
    assert [row["nodes"] for row in rows] == result["nodes"] == [4, 8, 16]
    assert rows[0]["scaling_efficiency"] == 1
    for row in rows:
        best = next(item for item in result["candidates"] if item["nodes"] == row["nodes"])
        assert row["seq_per_s"] == best["seq_per_s"]
        per_node = row["seq_per_s"] / row["nodes"]
        assert row["scaling_efficiency"] == pytest.approx(per_node * 4 / rows[0]["seq_per_s"])
        assert row["usd_per_hour"] == pytest.approx(7.59 * row["nodes"])
    table = plan("neox_20b", "--nodes", "16,4,8,4", "--price", "7.59").stdout.splitlines()
    assert [line.split()[0] for line in table[:4]] == ["nodes", "4", "8", "16"]
    # Below it, for each count: the layout, the recipe's own, and how the layout is submitted.
    below = "\n".join(table[4:])
    assert "\nprice of trn1: $7.59 per node hour (--price)" in below
    for nodes in (4, 8, 16):
        assert re.search(rf"\n{nodes} nodes: .* node hours, \$.*; on TP 8 × PP ", f"\n{below}")
        assert f"slurmllm submit neox_20b --nodes {nodes} --set " in below
    assert below.count("; the recipe's own layout is") == 3


def test_ranking_by_the_lower_end_of_the_interval() -> None:
    result = ranked("llama2_70b", "--nodes", "32", "--rank", "lower")
    fit = [item for item in result["candidates"] if item["fits"]]
    lower = [item["seq_per_s_interval"][0] for item in fit]
    assert lower == sorted(lower, reverse=True)
    assert all(item["evidence_reasons"] for item in fit if item["evidence"] != "interpolated")
    low, high = fit[0]["seq_per_s_by_network"]
    assert low < fit[0]["seq_per_s"] < high


def test_days_and_dollars_by_model_and_node_count() -> None:
    result = ranked("gpt3_125m", "gpt3_1.3b", "--nodes", "1,4", "--tokens", "20B", "--top", "1")
    rows = {(row["recipe"], row["nodes"]): row for row in result["scaling"]}
    assert [*rows] == [(name, nodes) for name in ("gpt3_125m", "gpt3_1.3b") for nodes in (1, 4)]
    assert len(result["candidates"]) == 4
    for row in rows.values():
        assert 20e9 <= row["tokens"] < 20.01e9
        assert row["days"] >= row["tokens"] / row["tokens_per_s"] / 86400
        assert row["usd"] <= row["days"] * 24 * row["usd_per_hour"] * 1.001


def test_where_nothing_fits_the_fewest_nodes_that_would_are_named() -> None:
    done = plan("llama2_70b", "--nodes", "1", "--json")
    assert done.exit_code == 2
    assert not any(item["fits"] for item in json.loads(done.stdout)["candidates"])
    assert "too much" in done.stderr
    result = re.search(r"--nodes (\d+): .* nodes; [\d.]+ seq/s predicted", done.stderr)
    assert result
    enough = int(result[1])
    assert f"for instance: slurmllm plan llama2_70b --nodes {enough}\n" in done.stderr
    (row,) = json.loads(done.stdout)["nearest"]
    assert (row["nodes"], row["would_fit"][0]["nodes"]) == (1, enough)
    assert plan("llama2_70b", "--nodes", str(enough)).exit_code == 0
    assert plan("llama2_70b", "--nodes", str(enough - 1)).exit_code == 2
    # Among other counts, it is a row of its own.
    rows = ranked("llama2_70b", "--nodes", f"1,{enough}")["scaling"]
    assert [row["fits"] for row in rows] == [False, True]
    assert rows[1]["scaling_efficiency"] == 1
    assert "nothing fits" in plan("llama2_70b", "--nodes", f"1,{enough}").stdout
    impossible = "3 nodes: 88 layouts: train.global_batch: 256 sequences are not a multiple of"
    assert impossible in plan("neox_20b", "--nodes", "3,4").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--nodes 4", "no RECIPE"),
        ("neox_20b", "--nodes is missing"),
        ("neox_20b --nodes 0", "--nodes '0': whole numbers from 1"),
        ("neox_20b --nodes ²", "--nodes '²'"),
        ("neox_20c --nodes 4", "did you mean 'neox_20b'"),
        (
            "llama2_70b --nodes 3 --set parallel.tensor=32 --set parallel.pipeline=8",
            "does not divide the 96 workers of 3 nodes × 32; choose 8 nodes, or",
        ),
        ("neox_20b --nodes 4 --tokens many", "--tokens 'many'"),
        ("gpt3_125m --nodes 1 --price 3y", "--price 3y: must be dollars for an hour of one node"),
        ("neox_20b --nodes 4 --plot plan.pdf", "use plan.png"),
        ("neox_20b --nodes 4 --plot no/where/plan.png", "`mkdir -p no/where` first"),
        ("neox_20b --nodes 4 --csv no/plan.csv", "--csv no/plan.csv: the folder no does not"),
        ("neox_20b --nodes 4 --csv /tmp", "--csv /tmp: a folder; give the name of a file"),
        ("neox_20b --nodes 4 --markdown=", "--markdown '': no name; give the name of a file"),
        ("neox_20b --nodes 4 --csv - --json", "standard output has room for one"),
        ("neox_20b --nodes 4 --csv - --explain", "--explain prints text; leave out --csv -"),
        ("tiny_neox --nodes 1 --set cluster.node_mtbf_hours=1e308", "cluster.node_mtbf_hours"),
        ("neox_20b --nodes 4 --price 1e308", "--price 1e308: must be dollars for an hour"),
        ("neox_20b --nodes 4 --cluster nowhere", "unknown cluster profile 'nowhere'"),
    ],
)
def test_what_cannot_serve_is_refused(arguments: str, message: str) -> None:
    done = plan(*arguments.split())
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output


def test_a_profile_without_figures_or_price_or_with_rough_figures(tmp_path: Path) -> None:
    for name, message in (("p4d", "slurmllm calibrate"), ("trn1", "a shipped profile, trn1")):
        path = profile(tmp_path, name, hardware=None)
        done = plan("neox_20b", "--nodes", "4", "--cluster", path)
        assert (done.exit_code, message in done.output) == (2, True)
    path = profile(tmp_path, "trn1", price=None, instance_type=None)
    (best,) = ranked("neox_20b", "--nodes", "4", "--cluster", path, "--top", "1")["candidates"]
    assert best["tokens_per_usd"] is best["usd_per_hour"] is best["usd"] is None
    assert best["hours"] > 0
    picture = tmp_path / "plan.png"
    for counts in ("4", "4,8"):
        done = plan("neox_20b", "--nodes", counts, "--cluster", path, "--plot", str(picture))
        assert (done.exit_code, "cost unknown: give --price" in done.stdout) == (0, True)
        assert not re.search(r"\$( |$)|  -( |$)", done.stdout, re.MULTILINE)  # an empty column
        assert picture.read_bytes().startswith(b"\x89PNG")
    path = profile(tmp_path, "trn1", hardware={"rough": True})
    warning = ranked("neox_20b", "--nodes", "4", "--cluster", path)["warnings"][0]
    assert "slurmllm calibrate" in warning
    assert f"warning: {warning}" in plan("neox_20b", "--nodes", "4", "--cluster", path).stdout


def test_a_run_that_never_gets_on_has_no_end() -> None:
    short = ("neox_20b", "slurm.time=16", "--nodes")
    for counts in ("4", "4,8"):
        done = plan(*short, counts)
        assert (done.exit_code, "does not finish" in done.stdout) == (0, True)
        assert "choose a longer slurm.time" in done.stdout
    (best,) = ranked(*short, "4", "--top", "1")["candidates"]
    assert (best["hours"], best["usd"], best["utilization"]) == (None, None, 0)


def test_assumed_constants_are_named() -> None:
    constants = "network_efficiency 0.3, matrix_efficiency 0.628"
    done = plan("neox_20b", "--nodes", "4", "--cluster", "trn2", "--top", "1")
    assert f"assumed, not measured: {constants}" in done.stdout
    assert "submit         refused: neuronx-distributed" in done.stdout
    assert ranked("neox_20b", "--nodes", "4")["assumed"] == {"trn1": {"network_efficiency": 0.3}}
    assert "assumed, not measured: " in plan("neox_20b", "--nodes", "4,8").stdout


def test_explanation_and_picture(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    shown = printed(plan("gpt3_125m", "--nodes", "1,2", "--explain", "--plot", str(picture)))
    lines = shown.splitlines()
    for line in ranked("gpt3_125m", "--nodes", "1,2", "--explain")["explanation"]:
        assert line in lines
    assert f"picture: {picture}" in lines
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_is_compared_with_the_prediction(tmp_path: Path) -> None:
    layout = ["parallel={zero: 1}", "train.micro_batch=32"]
    config = resolve("pythia_160m", None, layout)
    run = RunDir(tmp_path / "measured")
    run.metrics(0).parent.mkdir(parents=True)
    run.config.write_text(config.to_yaml(), encoding="utf-8")
    save_mesh(make_mesh(config, 1), run.plan)
    rows = (make_row(step, step_time_s=0.5, data_wait_s=0.001) for step in range(1, 30))
    write_rows(run.metrics(0), rows)
    save_attempt(run, world_size=8, started_at=1.7e9, ended_at=1.7e9 + 15, ending="done")
    command = ["report", "measured", "--prediction", "--runs-dir", str(tmp_path)]

    def report(*options: str) -> str:
        return printed(call(*command, *options))

    result = {row["name"]: row for row in json.loads(report("--json"))["rows"]}
    settings = [f"--set={setting}" for setting in layout]
    candidates = ranked("pythia_160m", "--nodes", "1", *settings)["candidates"]
    (recipe_layout,) = (item for item in candidates if item["recipe_layout"])
    assert result["step"]["predicted"] == pytest.approx(recipe_layout["step_s"])
    assert result["step"]["measured"] == 0.5
    table = report()
    assert table.startswith("measured: ")
    assert f"{0.5 / recipe_layout['step_s']:.3f}" in table
    # A time limit that the assumed start-ups would not keep: the run had shorter ones.
    short = resolve("pythia_160m", None, [*layout, "slurm.time=7"])
    run.config.write_text(short.to_yaml(), encoding="utf-8")
    result = {row["name"]: row for row in json.loads(report("--json"))["rows"]}
    assert result["effective utilization"]["predicted"] is None
    for options in (["--price", "3"], ["another"], ["--out", "x.html"]):
        assert "--prediction is of one run" in refused(call(*command, *options))


def test_epochs_of_the_published_corpus(tmp_path: Path) -> None:
    command = ("llama3_8b", "--cluster", "h100_ib", "--tokens", "100B")
    sentence = "100B tokens are about 125 epochs of wikicorpus; after four, more add little"
    for num, nodes in ((1, "8"), (2, "4,8")):
        assert plan(*command, "--nodes", nodes).stdout.count(sentence) == num
    planned = ranked(*command, "--nodes", "4,8", "--top", "1")
    assert [row["epochs"] for row in planned["scaling"]] == pytest.approx([125, 125], rel=1e-3)
    own = ("--nodes", "8", "--set", f"data.corpus={tmp_path}/own.arrow")
    assert "epochs of" not in plan(*command, *own).stdout  # it may hold token ids
    (tmp_path / "own.arrow.json").write_text('{"text_bytes": 200000000000}')
    text = "about 2.0 epochs of own.arrow, if a token is 4 bytes of text\n"
    assert text in plan(*command, *own).stdout
