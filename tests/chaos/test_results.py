"""A suite of tools/chaos in parts: it goes on where it stopped, and writes one table over all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chaos.test_plans import TOOLS


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The command line, with runs that take no time; `.runs` has the seeds that were run."""
    return Suite(monkeypatch, tmp_path)


class Suite:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.syspath_prepend(str(TOOLS))
        from _chaos import results

        self.main = load_main()
        self.monkeypatch, self.folder, self.runs = monkeypatch, folder, list[int]()
        self.broken = set[int]()
        self.set_commit("aaaa")
        monkeypatch.setitem(self.main, "run_all", self.run_all)
        monkeypatch.setitem(self.main, "inputs", lambda work: ())
        monkeypatch.setattr("os.geteuid", lambda: 0)
        self.results = results

    def set_commit(self, name: str) -> None:
        self.monkeypatch.setattr("_chaos.results.commit", lambda: name)

    def run_all(
        self, setup: Any, work: Path, seeds: Sequence[int], kinds: Any, parallel: int, end: float
    ) -> Iterator[Any]:
        from _chaos.suite import Outcome

        for seed in seeds:
            self.runs.append(seed)
            faults = {"run done": "lost" if seed in self.broken else ""}
            injected = {
                "failure": {"kind": "network_bad"},
                "victim": "no netem",
                "happened": False,
                "unsupported": True,
            }
            pairs = (("hang", "hang"),)
            yield Outcome(seed, "", faults, 7.0, ("done",), (injected,), pairs)

    def __call__(self, *options: str) -> int:
        command = ["chaos", f"--dir={self.folder}", *options]
        self.monkeypatch.setattr("sys.argv", command)
        self.runs.clear()
        return int(self.main["main"]())


def load_main() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "chaos"}
    exec(compile((TOOLS / "chaos").read_text(), "chaos", "exec"), names)  # it has no suffix
    return names


def test_a_second_call_runs_only_what_has_no_result(suite: Any, capsys: Any) -> None:
    assert suite("--runs=2", "--seed=3") == 0
    assert suite.runs == [3, 4]
    assert suite("--runs=4", "--seed=3") == 0
    assert suite.runs == [5, 6]
    assert "2 of 4 runs are done" in capsys.readouterr().out
    assert suite("--runs=4", "--seed=3", "--steps=61") == 0  # another setup, another file
    assert suite.runs == [3, 4, 5, 6]
    assert len(list((suite.folder / "results").glob("*.jsonl"))) == 2


def test_results_of_another_commit_do_not_count(suite: Any, capsys: Any) -> None:
    assert suite("--runs=2") == 0
    suite.set_commit("bbbb")
    assert suite("--runs=2") == 0
    assert suite.runs == [1, 2]
    assert "2 results of commit aaaa, not bbbb: run again" in capsys.readouterr().out


def test_parts_are_disjoint_and_whole(suite: Any) -> None:
    seen: list[int] = []
    for part in ("1/3", "2/3", "3/3"):
        suite("--runs=10", f"--part={part}", f"--results={suite.folder / part[0]}")
        seen += suite.runs
    assert sorted(seen) == list(range(1, 11))
    with pytest.raises(SystemExit):
        suite("--part=4/3")


def test_one_table_over_all_parts(suite: Any) -> None:
    suite.broken = {2}
    assert suite("--runs=2") == 1
    suite("--runs=1", "--nodes=128", "--backend=rehearsal")
    table = (suite.folder / "results" / "table.md").read_text()
    assert "| native, 4 nodes, 60 steps | 2 | 0 | seed 2 | 7.0 | aaaa |" in table
    assert "| rehearsal, 128 nodes, 60 steps | 1 | 0 | none | 7.0 | aaaa |" in table
    assert "| all | 3 | 0 | seed 2 |" in table
    assert "| `hang` | hang 3 |" in table
    assert "| `network_bad` | not possible here, 3 times: no netem |" in table
    whole = json.loads((suite.folder / "results" / "table.json").read_text())
    assert whole["all"]["checks"] == {"run done": 1}


def test_the_suites_are_what_the_documentation_says(suite: Any) -> None:
    suite("--suite=part")
    assert suite.runs == list(range(1001, 1013))
    suite("--suite=full")
    assert len(suite.runs) == 200 + 20 + 1
