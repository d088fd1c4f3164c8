"""Every row of the table of error texts, by its own line."""

import re
import subprocess
import sys

import pytest

from slurmllm.core.run.error_patterns import ENDINGS, Row, cause_line, meaning_of, table
from slurmllm.core.run.records import FailureRecord, NodeRecord
from slurmllm.launch.supervise.classify import Evidence, classify
from slurmllm.train.exits import classify_error


@pytest.mark.parametrize("row", table(), ids=lambda row: row.example[:60])
def test_a_row_matches_its_example(row: Row) -> None:
    assert re.search(row.pattern, row.example)
    assert meaning_of(row.example) == row.meaning
    assert row.source
    ending, blamed = ENDINGS[row.meaning]
    nodes = {
        "n1": NodeRecord(node="n1", pids={0: 1}, exit_codes={0: -6}),
        "n2": NodeRecord(node="n2", pids={1: 1}, exit_codes={1: 70}, stopped_ranks=[1]),
    }
    # In the log of a worker that aborted without a record …
    verdict = classify(Evidence(("n1", "n2"), nodes, log_tails={0: ["step 7", row.example]}))
    assert (verdict.ending, verdict.blamed_nodes) == (ending, ("n1",) if blamed else ())
    assert row.meaning == "connection" or row.example.strip()[:400] in verdict.evidence[0]
    # … and in its exception.
    name, _, message = (
        row.example.partition(" ") if "Inductor" in row.example else ("Error", "", "")
    )
    verdict = classify_error(type(name, (RuntimeError,), {})(message or row.example))
    failure = FailureRecord(rank=0, node="n1", time=1.0, **verdict._asdict())
    assert classify(Evidence(("n1", "n2"), nodes, [failure])).ending == ending


def test_the_table_covers_the_stack() -> None:
    assert len(table()) >= 60
    assert len({row.pattern for row in table()}) == len(table())
    assert meaning_of("Failed to execute model file.neff with status 1203") == "device"
    assert meaning_of('nrt_execute status=1200 message="stuck"') == "lost_peer"
    assert meaning_of("nrt_execute status=1204 message=x") == "code"


@pytest.mark.parametrize(
    ("message", "meaning"),
    [
        ("HTTPSConnectionPool(host='h', port=44): url: / (Errno 101] Network is unreachable", None),
        ('Connect timeout on endpoint URL: "https://s3.amazonaws.com/b"', None),
        ("URLError <urlopen error [Errno 111] Connection refused>", None),
        ("BrokenPipeError [Errno 32] Broken pipe: '/fsx/fifo'", None),
        ("OSError Timed out waiting for the lock /tmp/x.lock", None),
        ("ConnectionResetError [Errno 104] Connection reset by peer", "connection"),
        ("psycopg2.Error connection to 10.0.0.9, port 5432: Connection refused", "connection"),
        ("RuntimeError [gloo/pair.cc:537] [10.0.0.1]:4: Connection reset by peer", "lost_peer"),
        ("sendBytes failed on SocketImpl(fd=3, remote=[n1]:29500): Broken pipe", "lost_peer"),
        ("Timed out waiting for rank 3 on n2: not connected after 60 s", "lost_peer"),
        ("failed to connect to tcp://10.0.0.1:29500: c10d: Connection refused", "lost_peer"),
    ],
)
def test_an_echo_names_a_peer(message: str, meaning: str | None) -> None:
    assert meaning_of(message) == meaning


def test_a_cause_in_a_log_goes_before_an_echo() -> None:
    lines = ["step 7", "Connection closed by peer", "DMA RX engine 3 is in an abort state", "bye"]
    assert cause_line(lines) == (lines[2], "device")
    assert cause_line(lines[:2]) == (lines[1], "lost_peer")
    assert cause_line(lines[:1]) is None


HOSTILE = r"""
import re, signal, time
from slurmllm.core.run.error_patterns import meaning_of, table
signal.alarm(60)  # ends this process

def seconds(row, length):
    begin = time.process_time()
    for part in re.finditer(r"\b(?!\w)", row.example):  # its beginnings, many times each
        beginning = f"{row.example[:part.start()]} "
        line = beginning * (length // len(beginning))
        for _ in re.finditer(row.pattern, f"{line}DGE notifications"):  # what a lookahead refuses
            pass
    return time.process_time() - begin

for row in table():
    print(row.pattern, flush=True)
    meaning_of(row.example[:-1] * (100_000 // len(row.example)))
    # Linear: four times as long, mostly below the 0.3 s. Quadratic: sixteen times.
    assert (long := seconds(row, 60_000)) < 0.3 or long < 9 * seconds(row, 15_000)
"""


def test_no_pattern_is_slow_on_long_lines() -> None:
    command = [sys.executable, "-c", HOSTILE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"slow: {done.stdout.splitlines()[-1:]}"
