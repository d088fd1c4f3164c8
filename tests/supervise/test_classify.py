"""The table of endings, row by row."""

from __future__ import annotations

import signal

import pytest

from slurmllm.errors import LOST_PEER
from slurmllm.records import EndingClass, FailureRecord, NodeRecord
from slurmllm.supervise.classify import ACTIONS, Observed, classify

NODES = ("n1", "n2")


def node(name: str, codes: dict[int, int], **more: object) -> NodeRecord:
    return NodeRecord.model_validate(
        {"node": name, "pids": dict.fromkeys(codes, 1), "exit_codes": codes, **more}
    )


def failure(rank: int, error: str, message: str, **more: object) -> FailureRecord:
    fields = {"node": NODES[rank], "blame": "code", "exit_code": 70, "time": float(rank), **more}
    return FailureRecord.model_validate(
        {"rank": rank, "error": error, "message": message, **fields}
    )


def both(one: int, two: int) -> dict[str, NodeRecord]:
    return {"n1": node("n1", {0: one}), "n2": node("n2", {1: two})}


def seen(nodes: dict[str, NodeRecord], *failures: FailureRecord, **more: object) -> Observed:
    return Observed(NODES, nodes, failures, **more)  # type: ignore[arg-type]


LOST = failure(0, "RuntimeError", "[gloo] Connection closed by peer [127.0.1.2]:1234")
ROWS: dict[str, tuple[Observed, EndingClass, str]] = {
    "finished": (seen(both(0, 0)), "done", "2 workers finished"),
    "finished just as the signal came": (seen(both(0, 0), stop_signal="SIGUSR1"), "done", "2"),
    "saved and left": (seen(both(75, 75), stop_signal="SIGUSR1"), "advance_signal", "SIGUSR1"),
    "signal sent to the step alone": (seen(both(75, 75)), "advance_signal", "a stop signal"),
    "ended at the deadline": (
        seen(both(-9, -9), stop_signal="SIGUSR1", overran_s=30.0),
        "advance_signal",
        "after 30 s",
    ),
    "cancelled": (seen(both(75, 75), slurm_state="CANCELLED"), "cancelled", "cancelled"),
    "killed from outside": (seen(both(70, -9), LOST), "node_failure", "rank 1 on n2"),
    "killed, no echo": (seen(both(0, -9)), "node_failure", "SIGKILL"),
    "crashed": (seen(both(70, -signal.SIGSEGV), LOST), "code_error", "SIGSEGV"),
    "a node fell silent": (seen({"n1": node("n1", {0: 70})}, LOST), "node_failure", "no word"),
    "a node fell silent while its workers ran": (
        seen({"n1": node("n1", {0: 70}), "n2": NodeRecord(node="n2", pids={1: 7})}, LOST),
        "node_failure",
        "from n2",
    ),
    "Slurm took the node down and ended the job": (
        seen({"n1": node("n1", {0: -9})}, stop_signal="SIGTERM", down_nodes=["n2"]),
        "node_failure",
        "n2 down",
    ),
    "preempted without the time to report": (
        seen({"n1": NodeRecord(node="n1", pids={0: 7})}, stop_signal="SIGTERM"),
        "advance_signal",
        "SIGTERM",
    ),
    "a launcher failed": (
        seen({"n1": node("n1", {0: 70}), "n2": NodeRecord(node="n2", error="disk gone")}, LOST),
        "node_failure",
        "disk gone",
    ),
    "only echoes": (seen(both(70, 70), LOST), "node_failure", "communication"),
    "an exception": (seen(both(70, 70), LOST, failure(1, "KeyError", "x")), "code_error", "rank 1"),
    "an exception, its peers ended by the launcher": (
        seen(
            {"n1": node("n1", {0: -9}, stopped_ranks=[0]), "n2": node("n2", {1: 70})},
            failure(1, "KeyError", "x"),
        ),
        "code_error",
        "KeyError",
    ),
    "the user's fault": (
        seen(both(2, 2), failure(0, "DataError", "no corpus", blame="user", exit_code=2)),
        "bad_configuration",
        "no corpus",
    ),
    "disk full": (
        seen(
            both(4, 4), failure(0, "CheckpointError", "full", blame="infrastructure", exit_code=4)
        ),
        "storage_failure",
        "full",
    ),
    "the node's fault by its own word": (
        seen(both(3, 70), failure(0, "NodeError", "gone", blame="infrastructure", exit_code=3)),
        "node_failure",
        "gone",
    ),
    "not a number": (
        seen(both(71, 71), failure(0, "DivergenceError", "loss is nan", exit_code=71)),
        "divergence",
        "nan",
    ),
    "device memory": (
        seen(both(70, 70), failure(1, "OutOfMemoryError", "CUDA out of memory")),
        "out_of_memory",
        "CUDA",
    ),
    "host memory, by Slurm's word": (
        seen(both(70, -9), LOST, step_out_of_memory=True),
        "out_of_memory",
        "host memory",
    ),
    "no reason given": (seen(both(0, 5)), "code_error", "exit code 5"),
}


@pytest.mark.parametrize("row", list(ROWS))
def test_row(row: str) -> None:
    observed, ending, words = ROWS[row]
    found = classify(observed)
    assert found.ending == ending
    assert any(words in line for line in found.evidence), found.evidence


def test_the_silent_node_is_blamed_and_not_its_peers() -> None:
    assert classify(ROWS["a node fell silent"][0]).blamed_nodes == ("n2",)
    assert classify(ROWS["killed from outside"][0]).blamed_nodes == ("n2",)
    assert classify(ROWS["only echoes"][0]).blamed_nodes == ()


def test_every_class_has_an_action() -> None:
    assert set(ACTIONS) == set(EndingClass.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "line",
    [
        # gloo, transport/tcp/pair.cc
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:5",
        "readBoundBuffer: Connection reset by peer",
        # torch, distributed/c10d/TCPStore and socket.cpp
        "recvValue failed on SocketImpl(fd=3)",
        "DistNetworkError: The client socket has timed out after 60000ms: Connection refused",
        "Timed out waiting 1800000ms for recv operation to complete",
        # NCCL
        "ncclRemoteError: A call failed possibly due to a network",
    ],
)
def test_what_a_lost_peer_says(line: str) -> None:
    assert LOST_PEER.search(line)
