"""Every row of the table of error texts, by its own line."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from slurmllm.run.error_patterns import ENDINGS, Row, cause_line, meaning_of, table
from slurmllm.run.records import FailureRecord, NodeRecord
from slurmllm.supervise.classify import Evidence, classify
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
    assert row.example.strip()[:400] in verdict.evidence[0]
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


def test_a_cause_in_a_log_goes_before_an_echo() -> None:
    lines = ["step 7", "Connection closed by peer", "DMA RX engine 3 is in an abort state", "bye"]
    assert cause_line(lines) == (lines[2], "device")
    assert cause_line(lines[:2]) == (lines[1], "lost_peer")
    assert cause_line(lines[:1]) is None


HOSTILE = """
import re, sys, time
from slurmllm.run.error_patterns import meaning_of, table
for row in table():
    print(row.pattern, flush=True)
    begin = time.process_time()
    for part in re.finditer(r"\\b(?!\\w)", row.example):  # its beginnings, many times each
        beginning = f"{row.example[:part.start()]} "
        line = beginning * (200_000 // len(beginning))
        for _ in re.finditer(row.pattern, f"{line}DGE notifications"):  # what a lookahead refuses
            pass
    meaning_of(row.example[:-1] * (1_000_000 // len(row.example)))
    if time.process_time() - begin > 4:
        sys.exit(1)
"""


def test_no_pattern_is_slow_on_long_lines() -> None:
    """A quadratic pattern takes a minute for its lines, the others of the table a second."""
    command = [sys.executable, "-c", HOSTILE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            code = child.wait(timeout=240)
        except subprocess.TimeoutExpired:
            child.kill()
            code = -9
        assert code == 0, f"slow: {child.stdout.read().splitlines()[-1:]}"
