"""Which ranks are slow: by the others with the same work, in most windows of time."""

import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch.supervise.starts import attempt_record
from launch.supervise.test_restart_in_allocation import NODES, close, supervisor
from made_records import make_run

from slurmllm.core.config.operation import COMPARED_WINDOWS
from slurmllm.core.run import worker_files
from slurmllm.core.run.records import SlowRank, SlowRanksRecord, WorkerPhase
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.worker_files import PhaseWriter, read_phase
from slurmllm.launch.supervise.exclusion import excluded
from slurmllm.launch.supervise.slow_ranks import SlowRanks, find_slow
from slurmllm.plan.mesh import Mesh, save_mesh

Windows = list[dict[int, float]]


def windows(ranks: int = 16, spread: float = 0.03) -> Windows:
    noise = random.Random(ranks)
    return [
        {rank: 2.0 * noise.uniform(1 - spread, 1 + spread) for rank in range(ranks)}
        for _ in range(COMPARED_WINDOWS)
    ]


def slow_down(times: Windows, rank: int, factor: float, begin: int = 0) -> Windows:
    return [
        {**window, rank: window[rank] * (factor if number >= begin else 1)}
        for number, window in enumerate(times)
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4, 16, 300])
def test_a_slow_rank_is_found_among_any_number(ranks: int) -> None:
    assert find_slow(windows(ranks)) == {}
    slow = find_slow(slow_down(windows(ranks), 1, 1.4))
    assert slow == {1: pytest.approx(1.4, rel=0.06)}


def test_a_short_or_common_slow_phase_is_not_reported() -> None:
    assert find_slow(slow_down(windows(), 5, 9.0, begin=3)) == {}  # 7 of 10 windows
    assert [*find_slow(slow_down(windows(), 5, 9.0, begin=2))] == [5]
    common = [{rank: 3 * t for rank, t in window.items()} for window in windows()]
    assert find_slow([*windows()[:5], *common[:5]]) == {}
    # Where ranks differ widely for good, one of the slower ones is no outlier.
    mixed = [{r: t * (1 + r / 30) for r, t in window.items()} for window in windows()]
    assert find_slow(mixed) == {}


def test_a_rank_that_was_slow_is_so_until_most_windows_are_good() -> None:
    recovering = slow_down(windows(), 5, 1 / 1.4, begin=7)
    recovering = slow_down(recovering, 5, 1.4)
    assert find_slow(recovering) == {}
    assert [*find_slow(recovering, [5])] == [5]
    assert find_slow(slow_down(windows(), 5, 1.4, begin=8), [5]) == {}


def test_missing_windows_of_a_rank_are_tolerated_as_exceptions_are() -> None:
    times = slow_down(windows(), 5, 1.4)
    for window in times[:2]:
        del window[5]
    assert [*find_slow(times)] == [5]
    assert find_slow([times[0], *times[1:7]]) == {}  # too few
    assert find_slow([]) == {} == find_slow([{}])


def feed(run: RunDir, mesh: Mesh, slow: dict[int, float]) -> tuple[SlowRanks, list[SlowRank]]:
    save_mesh(mesh, run.plan)
    record = attempt_record(nodes=("n1", "n2"), world_size=mesh.world_size)
    compared, new = SlowRanks(run, record, 60.0), list[SlowRank]()
    for number in range(100, 100 + COMPARED_WINDOWS + 3):
        for node in range(2):  # whose heartbeats come one after the other
            half = range(4 * node, 4 * node + 4)
            own_s = {r: (1.0 + 2.0 * mesh.pipeline_rank(r)) * slow.get(r, 1.0) for r in half}
            phases = {
                r: WorkerPhase(phase="stepping", step=number, since=0.0, window=number, own_s=s)
                for r, s in own_s.items()
            }
            new += compared.update(phases)
    return compared, new


def test_ranks_are_compared_within_their_pipeline_stage(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    mesh = Mesh(2, 4, tensor=1, pipeline=2, data=4, global_batch=8, micro_batch=1)
    compared, new = feed(run, mesh, {})
    assert (compared.slow, new) == ({}, [])
    assert SlowRanksRecord.load(run.attempt("train", 0).slow_ranks).ranks == ()
    compared, new = feed(run, mesh, {5: 1.5})
    assert [(s.rank, s.node, s.ratio, s.peers) for s in new] == [(5, "n2", 1.5, 4)]
    assert new[0].since == 102 * 60  # two of the windows may be exceptions
    text = "rank 5 on n2 takes 1.50 × the median time of 4 ranks, for 0:10:00"
    assert new[0].text(102 * 60 + 600) == text
    (stored,) = SlowRanksRecord.load(run.attempt("train", 0).slow_ranks).ranks
    assert stored == compared.slow[5] == new[0]
    assert feed(run, replace(mesh, tensor=4, data=1), {5: 1.5})[1][0].rank == 5


def test_a_window_goes_with_the_phase_once_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [600.0]
    monkeypatch.setattr(worker_files, "time", SimpleNamespace(time=lambda: clock[0]))
    phases, seen = PhaseWriter(tmp_path / "0"), []
    for step, (clock[0], own_s) in enumerate([(601.0, 1.0), (640.0, 3.0), (661.0, 9.0)]):
        phases.add_step(own_s, 60.0)
        phases.begin("stepping", step)
        phase = read_phase(tmp_path / "0")
        assert phase is not None
        seen.append((phase.step, phase.window, phase.own_s))
    assert seen == [(0, 0, 0.0), (1, 0, 0.0), (2, 10, 2.0)]


@pytest.mark.parametrize(
    ("slow_for_s", "excludes", "failed", "nodes"),
    [
        (4000, True, (), ("n1", "n2", "n4", "n5")),
        (3000, True, (), NODES[:4]),
        (4000, False, (), NODES[:4]),
        # The one spare node replaces the failed one: a slow node is better than the queue.
        (4000, True, ("n2",), ("n1", "n3", "n4", "n5")),
    ],
)
def test_a_restart_leaves_out_a_node_that_was_slow_for_an_hour(
    tmp_path: Path, slow_for_s: float, excludes: bool, failed: tuple[str, ...], nodes: object
) -> None:
    made = supervisor(tmp_path, "slurm.no_progress_limit=9", f"slurm.exclude_slow={excludes}")
    slow = SlowRank(rank=2, node="n3", ratio=1.4, peers=4, since=time.time() - slow_for_s)
    SlowRanksRecord(ranks=(slow,)).save(made.run.attempt("train", 0).slow_ranks)
    assert close(made, 0, *failed).action == "restart"
    assert made.allocation.nodes == nodes
    kinds = [node.evidence for node in excluded(made.run) if node.node == "n3"]
    assert kinds == ["slow"] * (excludes and slow_for_s > 3600)


def test_a_node_whose_clock_is_ahead_is_slow_since_now() -> None:
    slow = SlowRank(rank=1, node="n1", ratio=1.3, peers=8, since=65.0)
    assert slow.text(now=0.0).endswith("for 0:00:00")
