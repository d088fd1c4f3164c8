"""`slurmllm plan` over profiles and node counts: tables as files, prices, what would fit."""

import csv
from pathlib import Path

import pytest
from cli.planning import plan, ranked
from command_line import refused

pytestmark = pytest.mark.usefixtures("layouts_searched_once")


def test_profiles_are_compared(tmp_path: Path) -> None:
    arguments = ("gpt3_1.3b", "--nodes", "2", "--nodes", "1,2", "--cluster", "p5", "--cluster")
    done = plan(*arguments, "p4d", "--csv", str(tmp_path / "a.csv"))
    starts = [["cluster", "nodes"], ["p5", "1"], ["p5", "2"], ["p4d", "1"], ["p4d", "2"]]
    assert [line.split()[:2] for line in done.stdout.splitlines()[:5]] == starts
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text("utf-8").splitlines()))
    result = ranked(*arguments, "p4d")["scaling"]
    assert [(row["cluster"], float(row["usd"])) for row in rows] == [
        (item["cluster"], item["usd"]) for item in result
    ]
    everything = ranked("tiny_neox", "--nodes", "1", "--cluster", "all")
    assert set(everything["prices"]) == set(everything["cluster"]) >= {"p4d", "p5"}
    assert "local" not in everything["prices"]


def test_tables_as_files(tmp_path: Path) -> None:
    done = plan("neox_20b", "--nodes", "4", "--top", "2", "--csv", "-")
    rows = list(csv.DictReader(done.stdout.splitlines()))
    first = ranked("neox_20b", "--nodes", "4", "--top", "1")["candidates"][0]
    assert rows[0]["rank"] == "1"
    assert float(rows[0]["parts_s.compute"]) == first["parts_s"]["compute"]
    assert "warning: the price of trn1" in done.stderr
    markdown = tmp_path / "plan.md"
    done = plan("neox_20b", "--nodes", "4", "--top", "2", "--markdown", str(markdown))
    # Several reasons are one cell.
    (cell, *_) = (row["evidence_reasons"] for row in rows if row["evidence_reasons"])
    assert cell == "; ".join(first["evidence_reasons"])
    lines = markdown.read_text("utf-8").splitlines()
    assert lines[0].startswith("| # | TP | PP | DP | micro |")
    assert lines[1] == "|" + " --- |" * (lines[0].count("|") - 1)
    assert lines[2].split(" | ")[1:4] == done.stdout.splitlines()[4].split()[1:4]
    assert lines[-1].startswith("price of trn1: $21.50 per node hour")
    many = plan("neox_20b", "--nodes", "4,8", "--top", "2").stdout.splitlines()
    assert many[0].split()[:2] == ["nodes", "#"]
    assert {line.split()[0] for line in many[1:5]} == {"4", "8"}


def test_what_to_do_when_nothing_fits_keeps_the_options_and_names_each_count() -> None:
    options = ("--tokens", "1B", "--price", "40", "--rank", "lower")
    done = plan("llama2_7b", "--nodes", "3", "--cluster", "p5", *options)
    assert done.exit_code == 2
    last = done.stderr.splitlines()[-1]
    assert last == (
        "  for instance: slurmllm plan llama2_7b --nodes 3 --cluster p5 --tokens 1B --price 40 "
        "--rank lower --set train.global_batch=1026"
    )
    assert plan(*last.split()[4:]).exit_code == 0
    many = plan("neox_20b", "--nodes", "3,5").stderr
    assert "  3 nodes: --nodes 4: 33 % more nodes" in many
    assert "  5 nodes: --nodes 4: 20 % fewer nodes" in many


def test_a_number_is_no_price_of_several_profiles() -> None:
    assert "--price 20 with several profiles: their nodes do not cost the same" in refused(
        plan("llama2_7b", "--nodes", "4", "--cluster", "p5", "--cluster", "p4d", "--price", "20")
    )


def test_waits_on_owned_nodes_are_paid() -> None:
    owned = ("gpt3_1.3b", "--cluster", "trn1", "--set", "cluster.instance_type=null", "--nodes")
    shown = plan(*owned, "4").stdout
    (best,) = ranked(*owned, "4", "--top", "1")["candidates"]
    assert f"${best['waiting_usd']:,.2f} of the cost is for owned nodes" in shown
    assert all(0 < row["waiting_usd"] < row["usd"] for row in ranked(*owned, "2,4")["scaling"])
    assert "waiting" not in plan("gpt3_1.3b", "--cluster", "p5", "--nodes", "2,4").stdout


def test_a_failed_plan_writes_nothing(tmp_path: Path) -> None:
    picture, markdown = tmp_path / "a.png", tmp_path / "a.md"
    files = ("--csv", "-", "--plot", str(picture), "--markdown", str(markdown))
    done = plan("llama2_7b", "--nodes", "3", "--cluster", "p5", *files)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith("\n  nothing is written: --plot, --csv, --markdown\n")
    assert not list(tmp_path.iterdir())
    done = plan("llama2_7b", "--nodes", "3", "--cluster", "p5", "--json")
    assert "nothing is written" not in done.stderr
