"""The table of endings, row by row."""

import signal

import pytest

from slurmllm.core.run.records import (
    EndingClass,
    FailureRecord,
    Fault,
    HangRecord,
    LaunchFailure,
    NodeRecord,
)
from slurmllm.launch.supervise.classify import Evidence, TrainerExit, classify
from slurmllm.launch.supervise.policy import ACTIONS

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


def both(first: int, two: int) -> dict[str, NodeRecord]:
    return {"n1": node("n1", {0: first}), "n2": node("n2", {1: two})}


def seen(nodes: dict[str, NodeRecord], *failures: FailureRecord, **more: object) -> Evidence:
    return Evidence(NODES, nodes, failures, **more)  # type: ignore[arg-type]


PORT = (
    "the control plane cannot listen on port 41001 of n1: Address already in use; end the program"
)
LOST = failure(0, "RuntimeError", "[gloo] Connection closed by peer [127.0.1.2]:1234")
HUNG = failure(0, "RuntimeError", 'nrt_execute status=5 message="Timeout"')
BROKEN = failure(1, "RuntimeError", 'nrt_execute status=1201 message="HBM UE"')
FULL = failure(0, "CheckpointError", "full", blame="infrastructure", exit_code=4)
GONE = failure(0, "NodeError", "gone", blame="infrastructure", exit_code=3)
RAISED = failure(1, "KeyError", "x")
REFUSED = failure(1, "ConnectionError", "mlflow:5000: Connection refused")


NODE_LOST = LaunchFailure(
    command="srun x",
    exit_code=1,
    seconds=9.0,
    message="srun: error: Node failure on n2",
    fault="node",
    nodes=("n2",),
)


def nan(error: str) -> FailureRecord:
    return failure(0, error, "loss is nan", exit_code=71)


def only(code: int) -> dict[str, NodeRecord]:
    """n2 has not reported."""
    return {"n1": node("n1", {0: code})}


HANG = HangRecord(
    found_at=0.0, phase="stepping", step=7, waited_s=61.0, limit_s=60.0, suspects=("n2",)
)
ROWS: dict[str, tuple[Evidence, EndingClass, str]] = {
    "finished": (seen(both(0, 0)), "done", "2 workers finished"),
    "finished just as the signal came": (seen(both(0, 0), stop_signal="SIGUSR1"), "done", "2"),
    "signal sent to the step alone": (seen(both(75, 75)), "advance_signal", "a stop signal"),
    "saved and left": (seen(both(75, 75), stop_signal="SIGUSR1"), "advance_signal", "SIGUSR1"),
    "ended at the deadline": (
        seen(both(-9, -9), stop_signal="SIGUSR1", overran_s=30.0),
        "advance_signal",
        "not saved within 30 s",
    ),
    "a graph did not compile": (
        seen(both(0, 0), uncompiled=["MODULE_1 failed: too large; graphs/failed/MODULE_1.log"]),
        "compile_failure",
        "MODULE_1 failed: too large; graphs/failed/MODULE_1.log",
    ),
    "the time limit came while compiling": (
        seen(both(0, 0), stop_signal="SIGTERM", uncompiled=["MODULE_1 missing"]),
        "compile_failure",
        "SIGTERM came before the compiler was done",
    ),
    "cancelled while compiling": (
        seen(both(0, 0), slurm_state="CANCELLED", uncompiled=["MODULE_1 missing"]),
        "cancelled",
        "cancelled",
    ),
    "the compiler ran out of host memory": (
        seen(both(0, 0), step_out_of_memory=True, uncompiled=["MODULE_1 missing"]),
        "out_of_memory",
        "MODULE_1",
    ),
    "the workers finished and their launcher did not": (
        seen({"n1": node("n1", {0: 0}, error="no space"), "n2": node("n2", {1: 0})}),
        "node_failure",
        "no space",
    ),
    "cancelled": (seen(both(75, 75), slurm_state="CANCELLED"), "cancelled", "cancelled"),
    "killed from outside": (seen(both(70, -9), LOST), "node_failure", "rank 1 on n2"),
    "killed, no echo": (seen(both(0, -9)), "node_failure", "SIGKILL"),
    "crashed": (seen(both(70, -signal.SIGSEGV), LOST), "code_error", "SIGSEGV"),
    "a node stopped responding": (seen(only(70), LOST), "node_failure", "n2 stopped responding"),
    "a node stopped responding while its workers ran": (
        seen({"n1": node("n1", {0: 70}), "n2": NodeRecord(node="n2", pids={1: 7})}, LOST),
        "node_failure",
        "n2 stopped responding",
    ),
    "Slurm took the node down and ended the job": (
        seen(only(-9), stop_signal="SIGTERM", down_nodes={"n2": "hw: PSU"}),
        "node_failure",
        "Slurm: node failure on n2 (hw: PSU)",
    ),
    "Slurm ended the job for a node, and all left": (
        seen(both(75, 75), stop_signal="SIGTERM", launch=NODE_LOST),
        "node_failure",
        "Slurm: node failure on n2",
    ),
    "preempted": (
        seen(both(75, 75), stop_signal="SIGTERM", slurm_state="PREEMPTED"),
        "advance_signal",
        "Slurm: the job is PREEMPTED",
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
    "a launcher failed, and srun stopped the others": (
        seen({"n1": node("n1", {0: 75}), "n2": NodeRecord(node="n2", error="no bash")}),
        "node_failure",
        "n2: no bash",
    ),
    "a launcher's port was taken": (
        seen({"n1": NodeRecord(node="n1", error=PORT), "n2": node("n2", {1: 3})}, LOST),
        "node_failure",
        "cannot listen on port 41001 of n1",
    ),
    "only echoes": (seen(both(70, 70), LOST), "node_failure", "communication"),
    "an exception": (seen(both(70, 70), LOST, RAISED), "code_error", "rank 1"),
    "an exception, its peers ended by the launcher": (
        seen({"n1": node("n1", {0: -9}, stopped_ranks=[0]), "n2": node("n2", {1: 70})}, RAISED),
        "code_error",
        "KeyError",
    ),
    "its launcher saw a rank crash": (
        seen(both(70, 1), LOST, failure(1, "killed", "", exit_code=-11, process="rank 3")),
        "code_error",
        "rank 3 on n2 crashed with SIGSEGV",
    ),
    "its launcher saw a rank killed, and ended another": (
        seen(
            both(1, 1),
            failure(0, "killed", "", exit_code=-15, process="rank 0"),
            failure(1, "killed", "", exit_code=-9, process="rank 3"),
        ),
        "node_failure",
        "rank 3 on n2 was ended by SIGKILL",
    ),
    "its launcher saw a rank killed for want of memory": (
        seen(
            {**both(1, 0), "n2": node("n2", {1: 1}, oom_kills=2)},
            failure(1, "killed", "", exit_code=-9, process="rank 3"),
        ),
        "out_of_memory",
        "oom_kill there: 2",
    ),
    "a rank left with 0": (
        seen(
            {**both(70, 0), "n2": node("n2", {1: 0}, ended_first={1: 7.0})},
            LOST,
            trainer=TrainerExit(step="at step 8 "),
        ),
        "node_failure",
        "rank 1 on n2 exited with 0 at step 8 while the others trained",
    ),
    "a rank of a command left first": (
        seen(
            {"n1": node("n1", {0: 1}), "n2": node("n2", {1: 1}, ended_first={3: 7.0})},
            LOST,
        ),
        "node_failure",
        "rank 3 on n2 ended while",
    ),
    "a rank left with 0, and the others waited": (
        seen(
            {"n1": node("n1", {0: -9}), "n2": node("n2", {1: 0}, ended_first={1: 7.0})},
            hang=HANG.model_copy(update={"found_at": 9.0}),
        ),
        "hang",
        "rank 1 on n2 exited with 0",
    ),
    "a connection to no peer": (seen(both(70, 70), LOST, REFUSED), "code_error", "mlflow:5000"),
    "a connection to no peer, beside a signal": (
        seen(both(70, -9), failure(0, "BrokenPipeError", "[Errno 32] Broken pipe")),
        "node_failure",
        "rank 1 on n2 was ended by SIGKILL",
    ),
    "a connection to a peer": (
        seen(both(70, 70), failure(0, "E", "to n2:2950: Connection refused"), peers=NODES),
        "node_failure",
        "communication: rank 0 on n1",
    ),
    "no GPU was requested": (
        seen(both(1, 1), failure(0, "E", "No CUDA GPUs are available"), no_gpu="no GPU was …"),
        "bad_configuration",
        "no GPU was",
    ),
    "a limit on processes": (
        seen(both(1, 1), failure(0, "RuntimeError", "can't start new thread")),
        "bad_configuration",
        "can't start new thread",
    ),
    "a process that reads data was killed": (
        seen(
            {**both(1, 1), "n1": node("n1", {0: 1}, oom_kills=1)},
            failure(0, "BrokenProcessPool", "A process was terminated abruptly"),
        ),
        "out_of_memory",
        "usual cause: too little host memory",
    ),
    "the user's fault": (
        seen(both(2, 2), failure(0, "DataError", "no corpus", blame="user", exit_code=2)),
        "bad_configuration",
        "no corpus",
    ),
    "disk full": (seen(both(4, 4), FULL), "storage_failure", "full"),
    "the node names itself": (seen(both(3, 70), GONE), "node_failure", "gone"),
    "not a number": (seen(both(71, 71), nan("DivergenceError")), "divergence", "nan"),
    "not a number, by old graphs": (
        seen(both(71, 71), nan("StaleGraphsError")),
        "stale_graphs",
        "nan",
    ),
    "device memory": (
        seen(both(70, 70), failure(1, "OutOfMemoryError", "CUDA out of memory")),
        "out_of_memory",
        "CUDA",
    ),
    "device memory, without a record": (seen(both(72, -9)), "out_of_memory", "exit code 72"),
    "host memory, by the kernel's count": (
        seen(
            {"n1": node("n1", {0: 1}, stopped_ranks=(0,)), "n2": node("n2", {1: -9}, oom_kills=2)},
            LOST,
        ),
        "out_of_memory",
        "rank 1 on n2 was ended by SIGKILL: out of host memory",
    ),
    "host memory, of the node that is read last": (
        seen({"n1": node("n1", {0: -9}), "n2": node("n2", {1: -9}, oom_kills=1)}),
        "out_of_memory",
        "rank 1 on n2 was ended by SIGKILL: out of host memory",
    ),
    "host memory, of a process that reads data": (
        seen(
            {"n1": node("n1", {0: 3}, oom_kills=1), "n2": node("n2", {1: 1}, stopped_ranks=(1,))},
            failure(0, "NodeError", "data worker (pid 7) was killed by signal 9; the kernel kills"),
        ),
        "out_of_memory",
        "killed by signal 9",
    ),
    "a hook's error, with a device's text": (
        seen(both(70, 3), failure(0, "PluginError", "raised KeyError: HBM UE", exit_code=70)),
        "code_error",
        "KeyError",
    ),
    "a Neuron device is broken": (seen(both(3, 70), HUNG, BROKEN), "node_failure", "rank 1 on n2"),
    "a collective hangs": (seen(both(3, 3), HUNG), "node_failure", "communication"),
    "a failed graph whose log speaks of a device": (
        seen(both(70, 70), failure(0, "RuntimeError", "neuronx-cc failed: NCC_EOOM001 HBM limit")),
        "compile_failure",
        "NCC_EOOM001",
    ),
    "host memory, by Slurm's word": (
        seen(both(70, -9), LOST, step_out_of_memory=True),
        "out_of_memory",
        "host memory",
    ),
    "hung": (
        seen(both(-9, -9), LOST, hang=HANG, stacks=["rank 1: no answer; state T (stopped)"]),
        "hang",
        "no progress for 61 s in phase stepping after step 7 (limit 60 s)",
    ),
    "hung, and finished after all": (seen(both(0, 0), hang=HANG), "done", "2"),
    "hung, because one had failed and could not record it": (
        seen({"n1": node("n1", {0: 4}), "n2": node("n2", {1: -9}, stopped_ranks=[1])}, hang=HANG),
        "storage_failure",
        "could not write why",
    ),
    "hung, for one had failed and its launcher was late": (
        seen(both(70, -9), failure(0, "KeyError", "x", time=-5.0), hang=HANG),
        "code_error",
        "KeyError",
    ),
    "another supervisor has it": (
        seen(both(-9, -9), LOST, superseded_by=3),
        "superseded",
        "attempt 3",
    ),
    "nothing can be written": (
        seen({}, unwritable="cannot write /r: Read-only file system"),
        "storage_failure",
        "Read-only",
    ),
    "storage by the exit code alone": (
        seen(both(3, 4)),
        "storage_failure",
        "rank 1 on n2 ended with exit code 4 and could not write why",
    ),
    "storage by the exit code, the other node cannot even record that": (
        seen(only(4)),
        "storage_failure",
        "rank 0 on n1",
    ),
    "memory that cannot be read": (seen(both(70, -signal.SIGBUS), LOST), "node_failure", "SIGBUS"),
    "aborted by Neuron's runtime": (
        seen(both(-6, -6), log_tails={0: ["NRT_TIMEOUT"], 1: ["x", "NRT_EXEC_HW_ERR_NC_UE"]}),
        "node_failure",
        "rank 1 on n2 ended by SIGABRT: NRT_EXEC_HW_ERR_NC_UE",
    ),
    "aborted by NCCL's watchdog, the cause killed": (
        seen(both(-6, -9), log_tails={0: ["Watchdog caught collective operation timeout"]}),
        "node_failure",
        "rank 1 on n2 was ended by SIGKILL",
    ),
    "aborted by NCCL's watchdog, no cause": (
        seen(both(-6, -6), log_tails={r: ["NCCL communicator was aborted"] for r in (0, 1)}),
        "node_failure",
        "rank 0 on n1 ended by SIGABRT: NCCL communicator",
    ),
    "an exit without a record that the log explains": (
        seen(both(1, 3), log_tails={0: ["[F137] neuronx-cc was forcibly killed"]}),
        "out_of_memory",
        "F137",
    ),
    "no reason given": (seen(both(0, 5)), "code_error", "exit code 5"),
}


@pytest.mark.parametrize("row", list(ROWS))
def test_row(row: str) -> None:
    observed, ending, reason = ROWS[row]
    outcome = classify(observed)
    assert outcome.ending == ending
    assert any(reason in line for line in outcome.evidence), outcome.evidence


def test_a_rank_that_ended_after_a_hang_is_no_cause() -> None:
    hung = seen({"n1": node("n1", {0: -9}, ended_first={0: 7.0})}, hang=HANG)
    assert "others trained" not in str(classify(hung).evidence)


def test_the_unresponsive_node_is_blamed_and_not_its_peers() -> None:
    blamed = {row for row, (observed, *_) in ROWS.items() if classify(observed).blamed_nodes}
    for row in ("a node stopped responding", "killed from outside", "a Neuron device is broken"):
        assert classify(ROWS[row][0]).blamed_nodes == ("n2",)
    assert {"hung", "aborted by Neuron's runtime", "a launcher failed"} <= blamed
    nobody = {"only echoes", "a collective hangs", "a launcher's port was taken", "no reason given"}
    assert not blamed & {*nobody, "aborted by NCCL's watchdog, no cause", "crashed", "cancelled"}


def test_unresponsive_nodes_are_blamed_unless_they_are_most() -> None:
    names = ("n1", "n2", "n3", "n4")
    for silent, blamed in ((1, 1), (2, 2), (3, 0), (4, 0)):
        nodes = {name: node(name, {rank: 70}) for rank, name in enumerate(names[silent:])}
        ending = classify(Evidence(names, nodes, (LOST,)))
        assert (ending.ending, ending.blamed_nodes) == ("node_failure", names[:blamed])


def launched(
    fault: Fault, *names: str, message: str = "srun: error: x", **more: object
) -> dict[str, object]:
    fields = {"exit_code": 1, "seconds": 0.2, "message": message, "fault": fault, "nodes": names}
    return {"launch": LaunchFailure.model_validate({"command": "srun", **fields, **more})}


STARTED = {"n1": NodeRecord(node="n1", pids={0: 7})}


@pytest.mark.parametrize(
    ("records", "more", "ending", "blamed", "evidence"),
    [
        ({}, launched("request", options=("--mem=9G",)), "bad_configuration", (), "--mem=9G"),
        # An administrator drains a node of the job: the request is wrong all the same.
        ({}, launched("request") | {"down_nodes": {"n2": ""}}, "bad_configuration", (), "srun"),
        ({}, launched("user"), "bad_configuration", (), "srun: error: x (srun: exit code 1 after"),
        ({}, launched("memory"), "out_of_memory", (), "srun"),
        ({}, launched("storage"), "storage_failure", (), "srun"),
        ({}, launched("limit"), "advance_signal", (), "srun"),
        ({}, launched("node", "n2"), "node_failure", ("n2",), "srun"),
        ({}, launched("node"), "node_failure", (), "srun"),
        ({}, launched("network", "n1", "n2"), "node_failure", (), "srun"),
        *(({}, launched(f), "node_failure", (), "srun") for f in ("controller", "site", "job")),
        ({}, launched("unknown"), "node_failure", (), "srun"),
        ({}, launched("result", "n1"), "node_failure", (), "srun"),
        ({}, launched("unknown", message=""), "node_failure", (), "ended without a report"),
        ({}, launched("unknown") | {"down_nodes": {"n2": ""}}, "node_failure", ("n2",), "n2 down"),
        ({}, launched("result", "n1") | {"unwritable": "full"}, "storage_failure", (), "full"),
        ({}, launched("request") | {"stop_signal": "SIGTERM"}, "advance_signal", (), "SIGTERM"),
        # Later: n2 is silent, or could not start with n1, or its launcher was killed.
        (both(75, 0) | STARTED, launched("request"), "node_failure", ("n1",), "n1 stopped"),
        (only(75), launched("node", "n2"), "node_failure", ("n2",), "srun"),
        (only(75), launched("unknown"), "node_failure", ("n2",), "n2 stopped"),
        (only(75), launched("result", "n2"), "node_failure", (), "srun"),
        *(
            (only(75), launched("user", *names, message=line), "bad_configuration", (), line)
            for names, line in (
                (["n2"], "n2: cluster.setup: line 1 failed with exit code 5: x"),
                ([], "slurmstepd: error: execve(): /x/python: No such file or directory"),
                ([], "/x/python: No module named slurmllm"),
            )
        ),
        (
            only(75),
            launched("user", message="Could not open x"),
            "node_failure",
            ("n2",),
            "n2 stop",
        ),
    ],
)
def test_a_launch_that_fails_by_itself(
    records: dict[str, NodeRecord],
    more: dict[str, object],
    ending: EndingClass,
    blamed: tuple[str, ...],
    evidence: str,
) -> None:
    verdict = classify(seen(records, **more))
    assert (verdict.ending, verdict.blamed_nodes) == (ending, blamed)
    assert evidence in " ".join(verdict.evidence)
    # Recorded as a launch that failed only if no workers had begun.
    explained = not records and "stop_signal" not in more and "unwritable" not in more
    assert (verdict.launch is not None) == explained


@pytest.mark.parametrize(
    "line",
    [
        # aws-neuron-sdk 81ce03a, neuron-runtime/nrt-troubleshoot.rst
        "execution timeout (30000 ms) on model x.neff, potentially caused by DGE notifications",
        "nrt_execute status=1204 message=x",
        "the job's status=5",
        "HTTP status 101",
    ],
)
def test_messages_of_faulty_code(line: str) -> None:
    assert classify(seen(both(70, 70), failure(1, "RuntimeError", line))).ending == "code_error"


def test_a_taken_port_is_no_node_s_fault() -> None:
    message = "The server socket has failed to listen. port: 38237, name: EADDRINUSE"
    for error in ("RuntimeError", "DistNetworkError"):  # the latter also means a lost peer
        taken = failure(0, error, message)
        ending = classify(seen(only(70), taken))
        assert (ending.ending, ending.blamed_nodes) == ("node_failure", ())
        assert "the rendezvous port was taken" in ending.evidence[0]


def test_every_class_has_an_action() -> None:
    assert set(ACTIONS) == set(EndingClass.__args__)  # type: ignore[attr-defined]
