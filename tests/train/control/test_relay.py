"""The operations of the control plane, on one node and on several."""

import random
import threading
import time
from pathlib import Path

import pytest
from train.control.gangs import Gang, count_traffic, failure, gang

from slurmllm.core.errors import ConfigError, StorageError
from slurmllm.train.control.plane import SOCKET, ControlPlane, open_control

SHAPES = [(1, 1), (1, 3), (4, 2)]  # nodes, workers a node


def all_operations(plane: ControlPlane) -> list[object]:
    rank, size = plane.rank, plane.world_size
    ranks = range(size)
    traffic = count_traffic(plane)
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
        pending = [plane.reduce([rank + number], "max") for number in range(4)]
        assert plane.broadcast(rank) == 0  # while four reductions are under way
        results = [reduction() for reduction in reversed(pending)]
        assert results == [[size + 2], [size + 1], [size], [size - 1]]
    return [rank, len(traffic)]


@pytest.mark.parametrize(("nodes", "per_node"), SHAPES)
def test_every_operation_on_every_gang(nodes: int, per_node: int) -> None:
    with gang(nodes, per_node) as workers:
        results = workers.run(all_operations)
        assert [rank for rank, _ in results] == list(range(nodes * per_node))
        # A message in each direction for each operation, whatever the number of workers.
        assert {messages for _, messages in results} == {2 * 3 * 14}  # `first` of a value takes two


def test_an_error_of_one_worker_is_raised_on_all() -> None:
    def work(plane: ControlPlane) -> list[object]:
        def fail_on_the_last() -> int:
            if plane.rank == 3:
                raise StorageError("No space left on device")
            return plane.rank

        with pytest.raises(StorageError, match="No space left on device"):
            plane.agree(fail_on_the_last)
        return [plane.agree(lambda: plane.rank), plane.from_first(lambda: ("of", plane.rank))]

    with gang(2, 2) as workers:
        assert workers.run(work) == [[rank, ("of", 0)] for rank in range(4)]


def test_a_single_worker_needs_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET, raising=False)
    plane = open_control(0, 1)
    all_operations(plane)
    plane.close()
    with pytest.raises(ConfigError, match=f"{SOCKET} is not set"):
        open_control(0, 2)


def test_sums_do_not_depend_on_who_comes_first() -> None:
    values = [random.Random(rank).uniform(-1, 1) * 10 ** (rank % 9) for rank in range(12)]

    def work(plane: ControlPlane) -> set[float]:
        sums = set()
        for number in range(10):
            time.sleep(random.Random(100 * plane.rank + number).uniform(0, 0.01))
            sums |= {*plane.all_reduce([values[plane.rank]], "sum")}
        return sums

    with gang(4, 3) as workers:
        assert len(set.union(*workers.run(work))) == 1


def test_long_values_and_a_slow_reader() -> None:
    block = bytes(range(256)) * (16 * 4096)  # 16 MB

    def work(plane: ControlPlane) -> bool:
        if plane.rank == 2:
            time.sleep(1.0)  # the others must not wait for it, nor the relay block
        assert plane.broadcast(block if plane.rank == 0 else None) == block
        gathered = plane.gather(block[: 8 << 20])
        return (gathered is None) == (plane.rank > 0)

    with gang(2, 2) as workers:
        assert workers.run(work) == [True] * 4


def test_nothing_is_left_after_the_end(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before, threads = descriptors(), threading.active_count()
    for _ in range(3):
        with gang(4, 2) as workers:
            workers.run(ControlPlane.barrier)
            folder = workers.relays[0].path.parent
        assert not folder.exists()
        # One whose root never appears: it still connects when it is closed.
        orphan = Gang(tmp_path, 3, 1, 1)
        orphan.relays[2].start()
        time.sleep(0.2)
        orphan.close()
        assert list(tmp_path.iterdir()) == []
    assert (descriptors(), threading.active_count()) == (before, threads)


def test_a_worker_may_leave_when_all_have_its_contributions() -> None:
    def work(plane: ControlPlane) -> list[object]:
        pending = plane.reduce([plane.rank], "max")
        if plane.rank % 2:
            plane.close()  # without its result
            return []
        time.sleep(0.3)
        return [*pending(), failure(plane.barrier)]

    with gang(3, 2) as workers:
        results = workers.run(work)
    for left in results[::2]:
        assert left[0] == 5
        assert "has ended" in str(left[1]) or "launcher of" in str(left[1])
