"""The form of log lines, the level from the environment, and a log that cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

from slurmllm.core.log import message_of, parse_line

_SCRIPT = (
    "import logging; from slurmllm.core.log import setup_logging; setup_logging({rank});"
    "setup_logging();"
    "log = logging.getLogger('slurmllm.train.loop'); log.debug('quiet'); log.info('step %d', 3);"
    "logging.getLogger('torch').info('other'); log.warning('low disk')"
)


def run(rank: int | None = None, **env: str) -> list[str]:
    command = [sys.executable, "-c", _SCRIPT.format(rank=rank)]
    variables = {**os.environ, "SLURMLLM_NODE": "n3", "SLURMLLM_LOG": "", **env}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    return done.stderr.splitlines()


def test_records_have_time_level_node_rank_and_component() -> None:
    first, second = run(rank=5)
    line = parse_line(first)
    assert line.time > 1e9
    assert line[1:] == ("INFO", "n3", 5, "slurmllm.train.loop", "step 3")
    assert (first[10], first[23] in "+-") == ("T", True)  # ISO 8601, milliseconds, UTC offset
    assert message_of(second) == "low disk"
    assert [parse_line(text) and parse_line(text).rank for text in run()] == [None, None]  # type: ignore[union-attr]
    assert parse_line("step 3/40  loss 1.0") is None
    assert message_of("Traceback (most recent call last):") == "Traceback (most recent call last):"


def test_the_level_is_from_the_environment() -> None:
    assert (len(run(SLURMLLM_LOG="DEBUG")), len(run(SLURMLLM_LOG="warning"))) == (3, 1)
    warning, *rest = run(SLURMLLM_LOG="loud")
    assert message_of(warning) == (
        "SLURMLLM_LOG=loud is not a level; choose debug, info, warning; using info"
    )
    assert len(rest) == 2


def test_a_full_disk_changes_no_exit_code() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", _SCRIPT.format(rank=0)]
        assert subprocess.run(command, stderr=full, check=False).returncode == 0
