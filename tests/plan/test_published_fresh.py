"""Rows of published_gpu_3.csv: what they are. No constant is fitted to them."""

import csv
import re
from collections.abc import Callable

import pytest
from published_rows import FOLDER, configuration, rows

from slurmllm.plan.parameters import model_flops
from slurmllm.plan.search import predict

FILE = "published_gpu_3.csv"


def table(file: str) -> list[dict[str, str]]:
    with (FOLDER / file).open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


ROWS = table(FILE)


def test_rows_are_new_and_their_numbers_agree() -> None:
    older = [*table("published_gpu.csv"), *table("published_gpu_2.csv")]
    assert len({row["id"] for row in ROWS} - {row["id"] for row in older}) == len(ROWS) >= 100
    pages = {row["source"] for row in older}
    for row in ROWS:
        assert row["half"] == "fresh", row["id"]
        assert row["source"] not in pages, row["id"]
        assert re.match(r"github [\w./-]+@[0-9a-f.v]{7,} |techcommunity", row["source"]), row["id"]
        assert "published: " in row["notes"], row["id"]
        data = int(row["dp"])
        assert devices(row) % int(row["nodes"]) == 0, row["id"]
        assert data % int(row["replicate"]) == 0, row["id"]
        assert int(row["global_batch"]) % (data * int(row["microbatch"])) == 0, row["id"]


def devices(row: dict[str, str]) -> int:
    return int(row["tp"]) * int(row["pp"]) * int(row["dp"])


TOKENS_PER_S: dict[str, Callable[[dict[str, str], float], float]] = {
    "tokens/s/GPU": lambda row, value: value * devices(row),
    "tokens a second": lambda _, value: value,
    "s/step": lambda row, value: int(row["global_batch"]) * int(row["seq_len"]) / value,
    "sequences a second": lambda row, value: value * int(row["seq_len"]),
}


def test_a_figure_is_the_one_that_the_source_states() -> None:
    for row in ROWS:
        match = re.search(r"published: ([\d.]+) (.+)$", row["notes"])
        assert match, row["id"]
        if (unit := match[2]) in TOKENS_PER_S:
            stated = TOKENS_PER_S[unit](row, float(match[1]))
            assert float(row["throughput_value"]) == pytest.approx(stated, rel=1e-5), row["id"]
        elif row["mfu"]:
            model = configuration(row["model"], int(row["seq_len"]), "p5", []).recipe.model
            per_s = float(row["throughput_value"]) / int(row["seq_len"])
            mfu = 100 * model_flops(model, 1) * per_s / (devices(row) * 989.5e12)
            assert mfu == pytest.approx(float(row["mfu"]), rel=1e-3), row["id"]
        else:
            assert unit in {"% MFU, embedding counted", "TFLOP/s/GPU"}, row["id"]


def test_every_row_is_predicted() -> None:
    read = list(rows(FILE))
    assert [row.name for row in read] == [row["id"] for row in ROWS]
    for row in read:
        assert predict(row.config, row.mesh).seq_per_s > 0, row.name
