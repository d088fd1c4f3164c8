"""Rows of published_gpu_2.csv: what they are, and the halves that they are in."""

import csv
import re
from collections import defaultdict

import planner
import planner_halves
import pytest
from published_rows import FOLDER, PRECISIONS, configuration, halves, precision, rows

from slurmllm.plan.parameters import model_flops, parameters

with (FOLDER / planner_halves.FILE).open(encoding="utf-8") as _lines:
    ROWS = list(csv.DictReader(_lines))


def test_rows_are_new_and_their_numbers_agree() -> None:
    with (FOLDER / "published_gpu.csv").open(encoding="utf-8") as lines:
        older = {row["id"] for row in csv.DictReader(lines)}
    assert len({row["id"] for row in ROWS} - older) == len(ROWS) >= 200
    for row in ROWS:
        data, shares = int(row["dp"]), int(row["dp"]) * int(row["microbatch"])
        devices = data * int(row["tp"]) * int(row["pp"]) * int(row["cp"])
        assert devices == 8 * int(row["nodes"]), row["id"]
        assert data % int(row["replicate"]) == 0, row["id"]
        assert int(row["global_batch"]) % shares == 0, row["id"]
        assert re.match(r"github [\w./-]+@|arXiv \d", row["source"]), row["id"]
        assert row["generation"] in {"2022", "2022-23", "2023-24", "2025-26"}, row["id"]


def test_a_figure_is_the_one_that_the_source_states() -> None:
    """`notes` repeat a figure per GPU or per step, from which the tokens/s are derived."""
    assert sum("published: " in row["notes"] for row in ROWS) > 100
    for row in ROWS:
        batch_tokens = int(row["global_batch"]) * int(row["seq_len"])
        if match := re.search(r"published: ([\d.]+) (\S+)$", row["notes"]):
            value, unit = float(match[1]), match[2]
            per_gpu = unit == "tokens/s/GPU"
            stated = value * 8 * int(row["nodes"]) if per_gpu else batch_tokens / value
            assert float(row["throughput_value"]) == pytest.approx(stated, rel=1e-5), row["id"]


def test_each_repository_and_model_is_in_both_halves() -> None:
    of_group = defaultdict(list)
    expected = halves(ROWS)
    for row in ROWS:
        assert row["half"] == expected[row["id"]], row["id"]
        of_group[row["group"]].append(row["half"])
    for group, names in of_group.items():
        assert abs(names.count("fit") - names.count("held_out")) <= 1, group
    in_bf16 = [row["half"] for row in ROWS if "fp8" not in row["precision"]]
    assert min(in_bf16.count(name) for name in ("fit", "held_out")) > 100


def test_a_row_has_the_mfu_that_its_source_states() -> None:
    checked = [row for row in ROWS if row["mfu"] and int(row["seq_len"]) <= 8192]
    assert len(checked) > 50
    for row in checked:
        model = configuration(row["model"], int(row["seq_len"]), "p5", []).recipe.model
        per_s = float(row["throughput_value"]) / int(row["seq_len"])
        peak = 312e12 if row["hardware"].startswith("A100") else 989.5e12
        mfu = 100 * model_flops(model, 1) * per_s / (8 * int(row["nodes"]) * peak)
        assert mfu == pytest.approx(float(row["mfu"]), rel=0.03), row["id"]


def test_every_row_that_a_recipe_expresses_is_predicted() -> None:
    expressible = [row["id"] for row in ROWS if precision(row["precision"]) in PRECISIONS]
    read = list(rows(planner_halves.FILE))
    assert [row.name for row in read] == expressible
    for row in read:
        assert 0.2 < planner_halves.prediction(row).ratio < 2.5, row.name
        if size := re.search(r"-(\d+)B$", row.model):  # InternLM-7B has 7.32 billion
            billions = parameters(row.config.recipe.model) / 1e9
            assert billions == pytest.approx(float(size[1]), rel=0.05), row.model


def test_halves_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["planner.py", "--halves", "--rows"])
    planner.main()
    printed = capsys.readouterr().out
    assert re.search(r"held_out .*\n(.*\n)+InternLM/InternEvo .*\n(.*\n)+intern-7b-8g-t", printed)


def test_one_half_is_printed_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["planner.py", "--halves", "fit"])
    planner.main()
    assert "held_out" not in capsys.readouterr().out
