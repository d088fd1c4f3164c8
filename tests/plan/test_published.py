"""Rows of published_gpu_2.csv and of published_gpu_3.csv, and the halves that the first are in.

No constant is fitted to those of published_gpu_3.csv.
"""

import re
from collections import defaultdict
from collections.abc import Callable

import planner
import planner_halves
import pytest
from published_rows import PRECISIONS, configuration, halves, precision, rows, table

from slurmllm.plan.parameters import model_flops, parameters

FILES = planner_halves.FILE, planner_halves.FRESH_FILE


FITTED, FRESH = map(table, FILES)
OLDER = table("published_gpu.csv")
both_files = pytest.mark.parametrize("of_file", [FITTED, FRESH], ids=FILES)


def devices(row: dict[str, str]) -> int:
    return int(row["tp"]) * int(row["pp"]) * int(row["cp"]) * int(row["dp"])


@both_files
def test_rows_are_new_and_their_numbers_agree(of_file: list[dict[str, str]]) -> None:
    older = OLDER if of_file is FITTED else [*OLDER, *FITTED]
    assert len({row["id"] for row in of_file} - {row["id"] for row in older}) == len(of_file)
    assert len(of_file) >= (200 if of_file is FITTED else 100)
    for row in of_file:
        data = int(row["dp"])
        assert devices(row) % int(row["nodes"]) == 0, row["id"]
        assert data % int(row["replicate"]) == 0, row["id"]
        assert int(row["global_batch"]) % (data * int(row["microbatch"])) == 0, row["id"]


def test_where_rows_are_from() -> None:
    for row in FITTED:
        assert devices(row) == 8 * int(row["nodes"]), row["id"]
        assert re.match(r"github [\w./-]+@|arXiv \d", row["source"]), row["id"]
        assert row["generation"] in {"2022", "2022-23", "2023-24", "2025-26"}, row["id"]
    pages = {row["source"] for row in (*OLDER, *FITTED)}
    for row in FRESH:
        assert row["half"] == "fresh", row["id"]
        assert row["source"] not in pages, row["id"]
        assert re.match(r"github [\w./-]+@[0-9a-f.v]{7,} |techcommunity", row["source"]), row["id"]


TOKENS_PER_S: dict[str, Callable[[dict[str, str], float], float]] = {
    "tokens/s/GPU": lambda row, value: value * devices(row),
    "tokens a second": lambda _, value: value,
    "s/step": lambda row, value: int(row["global_batch"]) * int(row["seq_len"]) / value,
    "sequences a second": lambda row, value: value * int(row["seq_len"]),
}
NOT_CHECKED = {"% MFU, embedding counted", "TFLOP/s/GPU"}


@both_files
def test_a_figure_is_the_one_that_the_source_states(of_file: list[dict[str, str]]) -> None:
    """`notes` repeat a figure from which the tokens/s are derived."""
    assert sum("published: " in row["notes"] for row in of_file) > 100
    for row in of_file:
        match = re.search(r"published: ([\d.]+) (.+)$", row["notes"])
        if match and match[2] in TOKENS_PER_S:
            stated = TOKENS_PER_S[match[2]](row, float(match[1]))
            assert float(row["throughput_value"]) == pytest.approx(stated, rel=1e-5), row["id"]
        elif match:
            assert row["mfu"] or match[2] in NOT_CHECKED, row["id"]
        else:
            assert of_file is FITTED, row["id"]


@both_files
def test_a_row_has_the_mfu_that_its_source_states(of_file: list[dict[str, str]]) -> None:
    checked = [row for row in of_file if row["mfu"] and int(row["seq_len"]) <= 8192]
    assert len(checked) > 20
    for row in checked:
        model = configuration(row["model"], int(row["seq_len"]), "p5", []).recipe.model
        per_s = float(row["throughput_value"]) / int(row["seq_len"])
        peak = 312e12 if row["hardware"].startswith("A100") else 989.5e12
        mfu = 100 * model_flops(model, 1) * per_s / (devices(row) * peak)
        rounded = 0.03 if of_file is FITTED else 1e-3
        assert mfu == pytest.approx(float(row["mfu"]), rel=rounded), row["id"]


def test_each_repository_and_model_is_in_both_halves() -> None:
    of_group = defaultdict(list)
    expected = halves(FITTED)
    for row in FITTED:
        assert row["half"] == expected[row["id"]], row["id"]
        of_group[row["group"]].append(row["half"])
    for group, names in of_group.items():
        assert abs(names.count("fit") - names.count("held_out")) <= 1, group
    in_bf16 = [row["half"] for row in FITTED if "fp8" not in row["precision"]]
    assert min(in_bf16.count(name) for name in ("fit", "held_out")) > 100


@both_files
def test_every_row_that_a_recipe_expresses_is_predicted(of_file: list[dict[str, str]]) -> None:
    read = list(rows(FILES[of_file is FRESH]))
    expressible = [row["id"] for row in of_file if precision(row["precision"]) in PRECISIONS]
    assert [row.name for row in read] == expressible
    assert of_file is FITTED or len(read) == len(of_file)
    for row in read:
        ratio = planner_halves.prediction(row).ratio
        assert 0.2 < ratio < (5 if of_file is FRESH else 2.5), row.name
        size = re.search(r"-(\d+)B$", row.model)
        if size and of_file is FITTED:  # InternLM-7B has 7.32 billion
            billions = parameters(row.config.recipe.model) / 1e9
            assert billions == pytest.approx(float(size[1]), rel=0.05), row.model


def test_halves_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["planner.py", "--halves", "--rows"])
    planner.main()
    printed = capsys.readouterr().out
    assert re.search(r"held_out .*\n(.*\n)+InternLM/InternEvo .*\n(.*\n)+intern-7b-8g-t", printed)
    monkeypatch.setattr("sys.argv", ["planner.py", "--halves", "fit"])
    planner.main()
    assert "held_out" not in capsys.readouterr().out
