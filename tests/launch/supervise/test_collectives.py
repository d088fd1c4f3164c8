"""What ranks of a hang wait for, by dumps of torch's own recorder and by NCCL's reports."""

from __future__ import annotations

import os
import pickle
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from slurmllm.core.run.flight_recorder import (
    Recording,
    dump_prefixes,
    read_dump,
    recorder_variables,
)
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise import collectives
from slurmllm.launch.supervise.collectives import (
    blocked,
    collect_dumps,
    query_ras,
    read_blocked,
    read_recordings,
    torch_analysis,
)

Edit = Callable[[dict[int, list[dict[str, Any]]]], object]


def entry(
    number: int, state: str, group: str = "0", name: str = "nccl:all_reduce", **fields: object
) -> dict[str, Any]:
    """An operation as torch 2.13 records it."""
    return {
        "record_id": number,
        "process_group": (group, "default_pg" if group == "0" else "undefined"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": name,
        "state": state,
        "retired": state == "completed",
        "input_sizes": [[4]],
        "frames": [
            {"name": "wrapper", "filename": "/lib/torch/distributed/c10d_logger.py", "line": 83},
            {"name": "step", "filename": "/home/me/train.py", "line": 31},
        ],
        **fields,
    }


def waiting(ranks: int = 8, number: int = 412) -> dict[int, list[dict[str, Any]]]:
    return {
        rank: [entry(number - 1, "completed"), entry(number, "started")] for rank in range(ranks)
    }


def recordings(entries: Mapping[int, list[dict[str, Any]]], **groups: str) -> dict[int, Recording]:
    config = {name: {"ranks": ranks} for name, ranks in {"0": str([*range(8)]), **groups}.items()}
    return {
        rank: Recording.model_validate(
            {"version": "2.10", "entries": rows, "pg_config": config, "from_start": True}
        )
        for rank, rows in entries.items()
    }


IN = "all_reduce 412 of group default_pg"


def late(*ranks: int) -> Edit:
    return lambda entries: [entries[rank].pop() for rank in ranks]


def in_pairs(entries: dict[int, list[dict[str, Any]]]) -> None:
    """Rank 3 is late in a pair with 2, for which the others wait."""
    for rank in (2, 3):
        entries[rank].pop()
    entries[2].append(entry(7, "started", "pair"))


def receives(entries: dict[int, list[dict[str, Any]]]) -> None:
    for rows in entries.values():
        rows.pop()
    entries[1].append(entry(411, "started", name="nccl:recv 1<-0", is_p2p=True))


def different(entries: dict[int, list[dict[str, Any]]]) -> None:
    entries[5][1]["profiling_name"] = "nccl:broadcast"


@pytest.mark.parametrize(
    ("edit", "line", "ranks"),
    [
        (
            late(3, 7),
            f"ranks 3, 7 have not joined {IN}; ranks 0, 1, 2, 4, 5, 6 wait in it (train.py:31)",
            (3, 7),
        ),
        (late(3), f"rank 3 has not joined {IN}; ranks 0, 1, 2, 4, 5, 6, 7 wait in it", (3,)),
        (late(*range(1, 8)), f"ranks 1, 2, 3, 4, 5, 6, 7 have not joined {IN}; rank 0 waits", None),
        (lambda e: e.pop(5), f"{IN} (train.py:31); rank 5 recorded nothing", ()),
        (
            lambda e: e[5][1].update(state="scheduled"),
            f"rank 5 waits in {IN} (train.py:31), scheduled",
            (),
        ),
        (lambda e: None, f"ranks 0, 1, 2, 3, 4, 5, 6, 7 wait in {IN} (train.py:31)", ()),
        (in_pairs, "rank 3 has not joined all_reduce 7 of group pair; rank 2 waits in it", (3,)),
        (receives, "rank 0 has not joined recv 1<-0 of group default_pg; rank 1 waits", (0,)),
        (different, "; rank 5 waits in broadcast 412 of group default_pg (train.py:31)", ()),
        (lambda e: [rows.pop() for rows in e.values()], "", ()),
    ],
)
def test_the_operation_and_the_ranks_that_have_not_joined_it(
    edit: Edit, line: str, ranks: tuple[int, ...] | None
) -> None:
    entries = waiting()
    edit(entries)
    result = blocked(recordings(entries, pair="[2, 3]"), world_size=8)
    assert line in result.lines[0] if line else result.lines == ()
    assert result.missing_ranks == (tuple(range(1, 8)) if ranks is None else ranks)


def test_an_incomplete_recording_blames_no_rank() -> None:
    entries = recordings(waiting(2))
    entries[1] = entries[1].model_copy(update={"entries": [], "from_start": False})
    assert blocked(entries, 2).missing_ranks == ()


def test_a_dump_runs_no_code_and_is_shortened(tmp_path: Path) -> None:
    rows = [entry(number, "completed") for number in range(500)] + [entry(500, "started")]
    rows.insert(0, entry(1, "completed", "rare"))
    rows.insert(1, entry(2, "started", "stuck"))
    path = tmp_path / "0"
    path.write_bytes(pickle.dumps({"version": "2.10", "pg_config": {}, "entries": rows}))
    kept = read_dump(path)
    assert [e.collective_seq_id for e in kept.entries] == [1, 2, *range(481, 501)]
    assert (kept.last_numbers["rare", "undefined"], kept.from_start) == (1, False)
    assert Recording.model_validate_json(kept.model_dump_json()) == kept
    damaged = {"version": "2.10", "pg_config": {}, "entries": [{}]}
    contents = (os.getcwd, [1], damaged, {**damaged, "entries": [b"\xff"]})
    for content in (*map(pickle.dumps, contents), b"", b"\x80", b"x" * 100):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a dump"):
            read_dump(path)


def test_dumps_are_read_once_beside_a_rank_that_writes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = list[str]()

    def read(path: Path) -> Recording:
        reads.append(path.name)
        return read_dump(path)

    monkeypatch.setattr(collectives, "read_dump", read)
    monkeypatch.setattr(collectives, "_POLLS", 3)
    for rank in (0, 1):
        os.mkfifo(tmp_path / f"rank_{rank}.pipe")
    readers = [os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in tmp_path.glob("*.pipe")]
    dump = {"version": "2.10", "pg_config": {}, "entries": []}
    (tmp_path / "rank_0").write_bytes(pickle.dumps(dump))
    attempt = RunDir(tmp_path / "run").attempt("train", 0)
    collect_dumps(attempt, recorder_variables(tmp_path, {}), since=0.0)
    assert ([*read_recordings(attempt)], reads) == ([0], ["rank_0"])
    for reader in readers:
        os.close(reader)


def test_variables_of_the_user_are_not_replaced() -> None:
    folder = Path("/dev/shm/x")
    variables = recorder_variables(folder, {}, nccl=True)
    assert variables["TORCH_NCCL_TRACE_BUFFER_SIZE"] == variables["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert dump_prefixes(variables) == ("/dev/shm/x/rank_", "/dev/shm/x/rank_")
    own = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/mine"}
    variables = recorder_variables(folder, own, nccl=True)
    assert not variables.keys() & {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", *own}
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in recorder_variables(folder, {})


# Rank 1 comes late to the third collective.
WORKER = """
import os, sys, time
import torch, torch.distributed as dist
from slurmllm.train.backends.process_group import answer_requests
rank = int(os.environ["RANK"])
answer_requests(rank)
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=3)
for _ in range(2):
    dist.all_reduce(torch.ones(4))
print(flush=True)
if rank == 1:
    time.sleep(600)
dist.all_reduce(torch.ones(4))
"""


LATE = "rank 1 has not joined all_reduce 3 of group default_pg; ranks 0, 2 wait in it"


@contextmanager
def hanging(code: str, folder: Path, ranks: int, nccl: bool = False) -> Iterator[dict[str, str]]:
    """Processes that have printed a line, with their common environment."""
    environment = {**os.environ, **recorder_variables(folder, os.environ, nccl)}
    command = [sys.executable, "-c", code, f"file://{folder}/store"]
    workers = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(ranks)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline()
        yield environment
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_a_hang_of_gloo_is_read_and_torch_s_own_analyzer_agrees(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt("train", 0)
    with hanging(WORKER, tmp_path, ranks=3) as environment:
        while blocked(read_recordings(attempt), 3).lines != (LATE,):
            collect_dumps(attempt, environment, since=0.0)
            assert [*read_recordings(attempt)] == [0, 1, 2]
    (line,) = blocked(read_recordings(attempt), 3).lines
    assert line == LATE
    analysis = torch_analysis(attempt, 3)
    assert "sequence number: 3" in analysis
    assert "missing ranks: {1}" in analysis
    attempt.collectives(2).unlink()
    assert "missed FR dumps from ranks ({2})" in torch_analysis(attempt, 3)


@pytest.mark.gpu
def test_a_rank_of_nccl_that_waits_for_its_device(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt("train", 0)
    code = """
import sys, torch, torch.distributed as dist
dist.init_process_group("nccl", init_method=sys.argv[1], rank=0, world_size=1)
x = torch.ones(4, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
torch.cuda._sleep(10**12)
dist.all_reduce(x)
print(flush=True)
torch.cuda.synchronize()
"""
    with hanging(code, tmp_path, ranks=1, nccl=True) as environment:
        collect_dumps(attempt, environment, since=time.time())
        query_ras(attempt)
        (line,) = blocked(read_recordings(attempt), 1).lines
        assert line.startswith("rank 0 waits in all_reduce 2 of group default_pg")


# NCCL 2.24's documentation, "RAS", and src/ras/client_support.cc of 2.28
HEAD = "Job summary\n===========\n\nErrors\n======\n\n{}\nWarnings\n========\n\n{}\n"
BEHIND = """#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 1650386 on node node1
"""
DEAD = "DEAD\n  1 job process is considered dead\n  Process 34 on node n3 managing GPU 5\n"


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (HEAD.format("", BEHIND), "Rank 7 has launched up to operation 60 -- GPU 3 managed by"),
        (HEAD.format(DEAD, ""), "NCCL RAS: DEAD; 1 job process is considered dead; Process 34 on"),
        (HEAD.format("", ""), ""),
        ("\x1b[2J\x00", ""),
    ],
)
def test_nccl_reports_the_ranks_behind(
    tmp_path: Path, report: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = []

    class Server(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            received.append(self.rfile.readline())
            self.wfile.write(report.encode())

    attempt = RunDir(tmp_path).attempt("train", 0)
    with socketserver.TCPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{server.server_address[1]}")
        query_ras(attempt)
    assert received == [b"VERBOSE STATUS\n"]
    lines = read_blocked(attempt, 1).lines
    assert line in lines[0] if line else lines == ()
    monkeypatch.setenv("NCCL_RAS_ADDR", "127.0.0.1:1")
    query_ras(attempt)  # nobody answers
    assert not torch_analysis(attempt, 3)


def test_another_service_that_never_ends_is_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.02)

    monkeypatch.setattr(collectives, "_RAS_S", 0.2)
    with socketserver.TCPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{server.server_address[1]}")
        query = threading.Thread(
            target=query_ras, args=(RunDir(tmp_path).attempt("train", 0),), daemon=True
        )
        query.start()
        query.join(30)
        assert not query.is_alive()
