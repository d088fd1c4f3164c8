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


def row(
    reason: str, nodes: dict[str, NodeRecord], *failures: FailureRecord, **more: object
) -> tuple[Evidence, str]:
    """Return what was seen, and a part of the evidence that is given."""
    return seen(nodes, *failures, **more), reason


DATA_WORKER_ENDED = failure(
    0, "RuntimeError", "DataLoader worker (pid 4) is killed by signal: Terminated."
)
DATA_WORKER_KILLED = failure(
    0, "RuntimeError", "DataLoader worker (pid 4) is killed by signal: Killed."
)
BY_ENDING: dict[EndingClass, dict[str, tuple[Evidence, str]]] = {
    "done": {
        "finished": row("2 workers finished", both(0, 0)),
        "finished just as the signal came": row("2", both(0, 0), stop_signal="SIGUSR1"),
        "hung, and finished after all": row("2", both(0, 0), hang=HANG),
    },
    "advance_signal": {
        "a preemption's SIGTERM ends a data worker first": row(
            "ended a data worker first", both(1, 1), DATA_WORKER_ENDED, slurm_state="PREEMPTED"
        ),
        "signal sent to the step alone": row("a stop signal", both(75, 75)),
        "saved and left": row("SIGUSR1", both(75, 75), stop_signal="SIGUSR1"),
        "ended at the deadline": row(
            "not saved within 30 s", both(-9, -9), stop_signal="SIGUSR1", overran_s=30.0
        ),
        "preempted": row(
            "Slurm: the job is PREEMPTED",
            both(75, 75),
            stop_signal="SIGTERM",
            slurm_state="PREEMPTED",
        ),
        "preempted, and killed at our deadline": row(
            "Slurm: the job is PREEMPTED",
            both(-9, -9),
            stop_signal="SIGUSR1",
            overran_s=30.0,
            slurm_state="PREEMPTED",
        ),
        "preempted without the time to report": row(
            "SIGTERM", {"n1": NodeRecord(node="n1", pids={0: 7})}, stop_signal="SIGTERM"
        ),
    },
    "compile_failure": {
        "a graph did not compile": row(
            "MODULE_1 failed: too large; graphs/failed/MODULE_1.log",
            both(0, 0),
            uncompiled=["MODULE_1 failed: too large; graphs/failed/MODULE_1.log"],
        ),
        "the time limit came while compiling": row(
            "SIGTERM came before the compiler was done",
            both(0, 0),
            stop_signal="SIGTERM",
            uncompiled=["MODULE_1 missing"],
        ),
        "a failed graph whose log speaks of a device": row(
            "NCC_EOOM001",
            both(70, 70),
            failure(0, "RuntimeError", "neuronx-cc failed: NCC_EOOM001 HBM limit"),
        ),
    },
    "cancelled": {
        "cancelled while compiling": row(
            "cancelled", both(0, 0), slurm_state="CANCELLED", uncompiled=["MODULE_1 missing"]
        ),
        "cancelled": row("cancelled", both(75, 75), slurm_state="CANCELLED"),
    },
    "out_of_memory": {
        "the compiler ran out of host memory": row(
            "MODULE_1", both(0, 0), step_out_of_memory=True, uncompiled=["MODULE_1 missing"]
        ),
        "its launcher saw a rank killed for want of memory": row(
            "oom_kill there: 2",
            {**both(1, 0), "n2": node("n2", {1: 1}, oom_kills=2)},
            failure(1, "killed", "", exit_code=-9, process="rank 3"),
        ),
        "a process that reads data was killed": row(
            "usual cause: too little host memory",
            {**both(1, 1), "n1": node("n1", {0: 1}, oom_kills=1)},
            failure(0, "BrokenProcessPool", "A process was terminated abruptly"),
        ),
        "device memory": row(
            "CUDA", both(70, 70), failure(1, "OutOfMemoryError", "CUDA out of memory")
        ),
        "device memory, without a record": row("exit code 72", both(72, -9)),
        "host memory, by the kernel's count": row(
            "rank 1 on n2 was ended by SIGKILL: out of host memory",
            {"n1": node("n1", {0: 1}, stopped_ranks=(0,)), "n2": node("n2", {1: -9}, oom_kills=2)},
            LOST,
        ),
        "host memory, of the node that is read last": row(
            "rank 1 on n2 was ended by SIGKILL: out of host memory",
            {"n1": node("n1", {0: -9}), "n2": node("n2", {1: -9}, oom_kills=1)},
        ),
        "host memory, of a process that reads data": row(
            "killed by signal 9",
            {"n1": node("n1", {0: 3}, oom_kills=1), "n2": node("n2", {1: 1}, stopped_ranks=(1,))},
            failure(0, "NodeError", "data worker (pid 7) was killed by signal 9; the kernel kills"),
        ),
        "host memory, by Slurm's word": row(
            "host memory", both(70, -9), LOST, step_out_of_memory=True
        ),
        "an exit without a record that the log explains": row(
            "F137", both(1, 3), log_tails={0: ["[F137] neuronx-cc was forcibly killed"]}
        ),
    },
    "node_failure": {
        "the workers finished and their launcher did not": row(
            "no space", {"n1": node("n1", {0: 0}, error="no space"), "n2": node("n2", {1: 0})}
        ),
        "killed from outside": row("rank 1 on n2", both(70, -9), LOST),
        "a process that reads data was killed, not for want of memory": row(
            "is killed by signal: Killed", both(1, 1), DATA_WORKER_KILLED
        ),
        "killed, no echo": row("SIGKILL", both(0, -9)),
        "a node stopped responding": row("n2 stopped responding", only(70), LOST),
        "a node stopped responding while its workers ran": row(
            "n2 stopped responding",
            {"n1": node("n1", {0: 70}), "n2": NodeRecord(node="n2", pids={1: 7})},
            LOST,
        ),
        "Slurm took the node down and ended the job": row(
            "Slurm: node failure on n2 (hw: PSU)",
            only(-9),
            stop_signal="SIGTERM",
            down_nodes={"n2": "hw: PSU"},
        ),
        "Slurm ended the job for a node, and all left": row(
            "Slurm: node failure on n2", both(75, 75), stop_signal="SIGTERM", launch=NODE_LOST
        ),
        "a launcher failed": row(
            "disk gone",
            {"n1": node("n1", {0: 70}), "n2": NodeRecord(node="n2", error="disk gone")},
            LOST,
        ),
        "a launcher failed, and srun stopped the others": row(
            "n2: no bash", {"n1": node("n1", {0: 75}), "n2": NodeRecord(node="n2", error="no bash")}
        ),
        "a launcher's port was taken": row(
            "cannot listen on port 41001 of n1",
            {"n1": NodeRecord(node="n1", error=PORT), "n2": node("n2", {1: 3})},
            LOST,
        ),
        "only echoes": row("communication", both(70, 70), LOST),
        "its launcher saw a rank killed, and ended another": row(
            "rank 3 on n2 was ended by SIGKILL",
            both(1, 1),
            failure(0, "killed", "", exit_code=-15, process="rank 0"),
            failure(1, "killed", "", exit_code=-9, process="rank 3"),
        ),
        "a rank left with 0": row(
            "rank 1 on n2 exited with 0 at step 8 while the others trained",
            {**both(70, 0), "n2": node("n2", {1: 0}, ended_first={1: 7.0})},
            LOST,
            trainer=TrainerExit(step="at step 8 "),
        ),
        "a rank of a command left first": row(
            "rank 3 on n2 ended while",
            {"n1": node("n1", {0: 1}), "n2": node("n2", {1: 1}, ended_first={3: 7.0})},
            LOST,
        ),
        "a connection to no peer, beside a signal": row(
            "rank 1 on n2 was ended by SIGKILL",
            both(70, -9),
            failure(0, "BrokenPipeError", "[Errno 32] Broken pipe"),
        ),
        "a connection to a peer": row(
            "communication: rank 0 on n1",
            both(70, 70),
            failure(0, "E", "to n2:2950: Connection refused"),
            peers=NODES,
        ),
        "the node names itself": row("gone", both(3, 70), GONE),
        "a Neuron device is broken": row("rank 1 on n2", both(3, 70), HUNG, BROKEN),
        "a collective hangs": row("communication", both(3, 3), HUNG),
        "memory that cannot be read": row("SIGBUS", both(70, -signal.SIGBUS), LOST),
        "aborted by Neuron's runtime": row(
            "rank 1 on n2 ended by SIGABRT: NRT_EXEC_HW_ERR_NC_UE",
            both(-6, -6),
            log_tails={0: ["NRT_TIMEOUT"], 1: ["x", "NRT_EXEC_HW_ERR_NC_UE"]},
        ),
        "aborted by NCCL's watchdog, the cause killed": row(
            "rank 1 on n2 was ended by SIGKILL",
            both(-6, -9),
            log_tails={0: ["Watchdog caught collective operation timeout"]},
        ),
        "aborted by NCCL's watchdog, no cause": row(
            "rank 0 on n1 ended by SIGABRT: NCCL communicator",
            both(-6, -6),
            log_tails={r: ["NCCL communicator was aborted"] for r in (0, 1)},
        ),
    },
    "code_error": {
        "a data worker's SIGTERM without a preemption": row(
            "killed by signal: Terminated", both(1, 1), DATA_WORKER_ENDED
        ),
        "crashed": row("SIGSEGV", both(70, -signal.SIGSEGV), LOST),
        "an exception": row("rank 1", both(70, 70), LOST, RAISED),
        "an exception, its peers ended by the launcher": row(
            "KeyError",
            {"n1": node("n1", {0: -9}, stopped_ranks=[0]), "n2": node("n2", {1: 70})},
            RAISED,
        ),
        "its launcher saw a rank crash": row(
            "rank 3 on n2 crashed with SIGSEGV",
            both(70, 1),
            LOST,
            failure(1, "killed", "", exit_code=-11, process="rank 3"),
        ),
        "a connection to no peer": row("mlflow:5000", both(70, 70), LOST, REFUSED),
        "a hook's error, with a device's text": row(
            "KeyError",
            both(70, 3),
            failure(0, "PluginError", "raised KeyError: HBM UE", exit_code=70),
        ),
        "hung, for one had failed and its launcher was late": row(
            "KeyError", both(70, -9), failure(0, "KeyError", "x", time=-5.0), hang=HANG
        ),
        "no reason given": row("exit code 5", both(0, 5)),
    },
    "hang": {
        "a rank left with 0, and the others waited": row(
            "rank 1 on n2 exited with 0",
            {"n1": node("n1", {0: -9}), "n2": node("n2", {1: 0}, ended_first={1: 7.0})},
            hang=HANG.model_copy(update={"found_at": 9.0}),
        ),
        "hung": row(
            "no progress for 61 s in phase stepping after step 7 (limit 60 s)",
            both(-9, -9),
            LOST,
            hang=HANG,
            stacks=["rank 1: no answer; state T (stopped)"],
        ),
    },
    "bad_configuration": {
        "no GPU was requested": row(
            "no GPU was",
            both(1, 1),
            failure(0, "E", "No CUDA GPUs are available"),
            no_gpu="no GPU was …",
        ),
        "a limit on processes": row(
            "can't start new thread",
            both(1, 1),
            failure(0, "RuntimeError", "can't start new thread"),
        ),
        "the user's fault": row(
            "no corpus", both(2, 2), failure(0, "DataError", "no corpus", blame="user", exit_code=2)
        ),
    },
    "storage_failure": {
        "disk full": row("full", both(4, 4), FULL),
        "hung, because one had failed and could not record it": row(
            "could not write why",
            {"n1": node("n1", {0: 4}), "n2": node("n2", {1: -9}, stopped_ranks=[1])},
            hang=HANG,
        ),
        "nothing can be written": row(
            "Read-only", {}, unwritable="cannot write /r: Read-only file system"
        ),
        "storage by the exit code alone": row(
            "rank 1 on n2 ended with exit code 4 and could not write why", both(3, 4)
        ),
        "storage by the exit code, a quota by the log": row(
            "could not write why; its log: cannot save step 4: Disk quota exceeded",
            both(0, 4),
            log_tails={1: ["step 4", "cannot save step 4: Disk quota exceeded", "bye"]},
        ),
        "storage by the exit code, the other node cannot even record that": row(
            "rank 0 on n1", only(4)
        ),
    },
    "divergence": {"not a number": row("nan", both(71, 71), nan("DivergenceError"))},
    "stale_graphs": {
        "not a number, by old graphs": row("nan", both(71, 71), nan("StaleGraphsError"))
    },
    "superseded": {
        "another supervisor has it": row("attempt 3", both(-9, -9), LOST, superseded_by=3)
    },
}


ROWS = {
    name: (ending, *seen_row)
    for ending, rows in BY_ENDING.items()
    for name, seen_row in rows.items()
}


@pytest.mark.parametrize("row", list(ROWS))
def test_row(row: str) -> None:
    ending, observed, reason = ROWS[row]
    outcome = classify(observed)
    assert outcome.ending == ending
    assert any(reason in line for line in outcome.evidence), outcome.evidence


def test_a_rank_that_ended_after_a_hang_is_no_cause() -> None:
    hung = seen({"n1": node("n1", {0: -9}, ended_first={0: 7.0})}, hang=HANG)
    assert "others trained" not in str(classify(hung).evidence)


def test_the_unresponsive_node_is_blamed_and_not_its_peers() -> None:
    blamed = {row for row, (_, observed, _) in ROWS.items() if classify(observed).blamed_nodes}
    for row in ("a node stopped responding", "killed from outside", "a Neuron device is broken"):
        assert classify(ROWS[row][1]).blamed_nodes == ("n2",)
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
        (only(75), launched("user", message="Cannot open x"), "node_failure", ("n2",), "n2 stop"),
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
