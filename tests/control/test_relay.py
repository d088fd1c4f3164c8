"""The operations of the control plane, on trees of several depths."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from control.trees import Tree, failure, tree

from slurmllm.control import position
from slurmllm.control.operations import combine, encode_numbers, shares
from slurmllm.control.plane import SOCKET, ControlPlane, open_control
from slurmllm.control.relay import Position
from slurmllm.control.wire import Kind
from slurmllm.errors import ConfigError

# (nodes, workers a node, fan-out): one node, one level, uneven, and up to five levels.
SHAPES = [(1, 1, 16), (1, 5, 16), (2, 2, 16), (5, 1, 16), (7, 1, 2), (10, 2, 3), (6, 1, 1)]


def all_operations(plane: ControlPlane) -> list[object]:
    rank, size = plane.rank, plane.world_size
    ranks = range(size)
    for _ in range(3):
        assert plane.all_reduce([rank, 2**64, 1], "sum") == [sum(ranks), size * 2**64, size]
        assert plane.all_reduce([rank, -rank], "max") == [size - 1, 0]
        assert plane.all_reduce([rank + 0.5, 7], "min") == [0.5, 7]
        plane.barrier()
        assert plane.first(None) is None
        assert plane.first({"rank": rank} if rank >= size // 2 else None) == {"rank": size // 2}
        expected = [(other, "x" * other) for other in ranks] if rank == 0 else None
        assert plane.gather((rank, "x" * rank)) == expected
        assert plane.broadcast(("from", rank)) == ("from", 0)
        assert plane.scatter([other * 3 for other in ranks] if rank == 0 else None) == rank * 3
        pending = [plane.reduce([rank + number], "max") for number in range(4)]
        assert plane.broadcast(rank) == 0  # while four reductions are under way
        found = [one.result() for one in reversed(pending)]
        assert found == [[size + 2], [size + 1], [size], [size - 1]]
    return [rank, *plane.traffic]


@pytest.mark.parametrize(("nodes", "per_node", "fan_out"), SHAPES)
def test_every_operation_on_every_tree(
    nodes: int, per_node: int, fan_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(position, "FAN_OUT", fan_out)
    with tree(nodes, per_node) as found:
        results = found.run(all_operations)
        assert [rank for rank, *_ in results] == list(range(nodes * per_node))
        # A message in each direction for each operation, whatever the number of workers.
        assert {messages for _, messages, _ in results} == {2 * 3 * 14}


def test_a_single_worker_needs_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET, raising=False)
    plane = open_control(0, 1)
    all_operations(plane)
    plane.close()
    with pytest.raises(ConfigError, match=f"{SOCKET} is not set"):
        open_control(0, 2)


def test_positions_form_one_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    for fan_out, nodes in ((1, 5), (2, 12), (3, 40), (16, 257), (16, 1)):
        monkeypatch.setattr(position, "FAN_OUT", fan_out)
        names = tuple(map(str, range(nodes)))
        places = [Position(index, names, 3) for index in range(nodes)]
        assert sorted(child for place in places for child in place.below()) == [*range(1, nodes)]
        for place in places:
            assert all(places[child].parent == place.index for child in place.below())
            below = place.levels_below()
            assert below == max((places[c].levels_below() + 1 for c in place.below()), default=0)
        assert sorted(places[0].ranks_below(0)) == [*range(3 * nodes)]


def test_sums_do_not_depend_on_who_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position, "FAN_OUT", 2)
    values = [random.Random(rank).uniform(-1, 1) * 10 ** (rank % 9) for rank in range(12)]

    def work(plane: ControlPlane) -> set[float]:
        found = set()
        for number in range(10):
            time.sleep(random.Random(100 * plane.rank + number).uniform(0, 0.01))
            found |= {*plane.all_reduce([values[plane.rank]], "sum")}
        return found

    with tree(4, 3) as found:
        assert len(set.union(*found.run(work))) == 1


def test_long_values_and_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position, "FAN_OUT", 1)
    block = bytes(range(256)) * (64 * 4096)  # 64 MB

    def work(plane: ControlPlane) -> bool:
        if plane.rank == 2:
            time.sleep(1.0)  # the others must not wait for it, nor the relay block
        assert plane.broadcast(block if plane.rank == 0 else None) == block
        found = plane.gather(block[: 8 << 20])
        assert (found is None) == (plane.rank > 0)
        own = plane.scatter([bytes([rank]) * (4 << 20) for rank in range(4)])
        return own == bytes([plane.rank]) * (4 << 20)

    with tree(2, 2) as found:
        assert found.run(work) == [True] * 4


def test_those_that_do_not_take_part_in_a_part_get_none() -> None:
    owners = {0: "a", 1: "b"}
    assert shares(Kind.GATHER, b"all", owners) == {"a": b"all"}
    assert shares(Kind.GATHER, b"all", {1: "b"}) == {}
    assert shares(Kind.MAX, b"[1]", owners) is None
    with pytest.raises(ValueError, match="zip"):
        combine(Kind.SUM, [encode_numbers([1, 2]), encode_numbers([1])])


def test_nothing_is_left_after_the_end(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before, threads = descriptors(), threading.active_count()
    for _ in range(3):
        with tree(4, 2) as found:
            found.run(ControlPlane.barrier)
            folder = found.relays[0].path.parent
        assert not folder.exists()
        # One whose parent never appears: it still connects when it is closed.
        orphan = Tree(tmp_path, 3, 1, 1)
        orphan.relays[2].start()
        time.sleep(0.2)
        orphan.close()
        assert list(tmp_path.iterdir()) == []
    assert (descriptors(), threading.active_count()) == (before, threads)


def test_a_worker_may_leave_when_all_have_its_contributions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(position, "FAN_OUT", 1)

    def work(plane: ControlPlane) -> list[object]:
        pending = plane.reduce([plane.rank], "max")
        if plane.rank % 2:
            plane.close()  # without its result
            return []
        time.sleep(0.3)
        return [*pending.result(), failure(plane.barrier)]

    with tree(3, 2) as found:
        results = found.run(work)
    for left in results[::2]:
        assert left[0] == 5
        assert "has ended" in str(left[1]) or "launcher of" in str(left[1])
