"""What a run's files say steers no terminal; closed and ASCII outputs are no error of ours."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from amounts import amount
from forked_verbs import run_verb
from made_records import save_attempt
from training_rows import make_row, write_rows

from slurmllm.core.config.resolve import resolve
from slurmllm.core.format import printable
from slurmllm.core.run import records
from slurmllm.core.run.artifact_records import CheckpointFile, CheckpointManifest
from slurmllm.core.run.rundir import RunDir

BAD = (
    "\x1b]0;owned\x07\x1b[2J\x1b[8mhidden\x1b[0m\x9b31m\x90q\x9c\u202edesrever\u2066\u200b\x07\x08"
)
# Styles of ours, and what a progress bar draws with
ALLOWED = re.compile(
    r"\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A|\x1b\[(?:[0-2]|22|3[0-79]|9[0-7])?(?:;(?:[0-2]|3[0-79]|9[0-7]))*m"
)
STEERS = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
VERBS = [
    *(["status"], ["status", "r"], ["status", "--json"], ["status", "r", "--json"], ["logs", "r"]),
    *(["logs", "r", "--all-ranks"], ["logs", "r", "--failed"], ["logs", "r", "--stacks"]),
    *(["checkpoint", "list", "r"], ["checkpoint", "verify", "r"], ["compare", "r", "log.csv"]),
    *(["spikes", "log.csv"], ["report", "r", "log.csv", "--no-files"], ["report", "r", "--json"]),
    *(["resume", BAD], ["cancel", BAD], ["plan", "r"], ["recipes", BAD], ["status", BAD]),
    *(["submit", "recipe.yaml", "--dry-run"], ["data", "inspect", "bad.jsonl"]),
    *(["evaluate", "r", "--tasks", BAD], ["drill", BAD], ["doctor", "--cluster", BAD]),
    *(["compare", "r", "bad.log"], ["export", BAD]),
]


@pytest.fixture
def _hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of which every text that it may choose steers a terminal."""
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "runs" / "r")
    run.path.mkdir(parents=True)
    config = resolve("tiny_neox").to_yaml()
    run.config.write_text(config)
    records.JobsRecord().save(run.jobs)
    end = {"ended_at": 1.7e9 + 10, "ending": "code_error", "action": "stop"}
    texts = {"evidence": (BAD,), "new_graphs": (BAD,), "blamed_nodes": ("n1",)}
    save_attempt(run, world_size=2, started_at=1.7e9, **texts, **end)
    texts = {"error": BAD, "message": BAD, "traceback": BAD}
    failure = {"rank": 0, "node": "n1", "blame": "code", "exit_code": 70, "time": 1.7e9}
    records.FailureRecord(**failure, **texts).save(run.attempt("train", 0).failure(0))
    hang = records.HangRecord(found_at=1.7e9, phase="stepping", step=1, waited_s=1.0, limit_s=1.0)
    hang.save(run.attempt("train", 0).hang)
    stacks = run.attempt("train", 0).stacks(0)
    stacks.parent.mkdir()
    stacks.write_text(f'Thread 1\n  File "{BAD}", line 1 in {BAD}\n')
    excluded = records.ExcludedNode(node="n1", reason=BAD, since=0.0, until=4e9)
    records.ExcludedNodes(nodes=(excluded,)).save(run.excluded)
    skip = {"first": 1, "last": 2, "roll_back_to": None, "onset": 1, "attempt": 0, "reason": BAD}
    records.SkipsRecord(skips=(records.SkippedBatches(**skip),)).save(run.skips)
    write_rows(run.metrics(0), [make_row(step) for step in range(1, 30)])
    with run.metrics(0).open("a") as stream:
        stream.write(f'{{"step": "{BAD}"}}\n')
    counts = {"step": 8, "tokens": 0, "world_size": 1, "attempt": 0, "saved_at": 1.7e9}
    files = (CheckpointFile.model_construct(path=BAD, bytes=1, sha256=BAD),)
    texts = {"recipe": BAD, "fingerprint": BAD, "files": files}
    manifest = CheckpointManifest.model_construct(save_s=1.0, **counts, **texts)
    manifest.save(run.checkpoint(8) / "manifest.json")
    run.logs.mkdir()
    run.stage_log("train").write_text(
        f"2026-11-23T08:31:05.123+00:00 INFO n1 rank 0 c: {BAD}\n{BAD}\n"
    )
    run.worker_log("train", 0, 1).parent.mkdir()
    run.worker_log("train", 0, 1).write_text(f"{BAD}\n")
    Path("log.csv").write_text(
        f"step,loss,{BAD}\n" + "".join(f"{i},{5 - i / 10},1\n" for i in range(1, 30))
    )
    Path("bad.log").write_text(f"{BAD}\n")
    Path("bad.jsonl").write_text(json.dumps({"text": BAD}) + "\n" + json.dumps({BAD: BAD}) + "\n")
    Path("recipe.yaml").write_text(
        f"{config.partition('origin:')[0]}\ndescription: {json.dumps(BAD)}\n"
    )
    RunDir(tmp_path / "runs" / "b\x1b[2Jad").path.mkdir()
    RunDir(tmp_path / "runs" / "b\x1b[2Jad").config.write_text(f"{json.dumps(BAD)}: 1\n")


@pytest.mark.usefixtures("_hostile")
@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_no_verb_prints_what_steers_a_terminal(terminal: bool) -> None:
    texts = []
    for verb in VERBS:
        code, text = run_verb(*verb, terminal=terminal)
        assert code != 70, (verb, text)
        assert "Traceback" not in text, verb
        rest = ALLOWED.sub("", text) if terminal else text
        assert not STEERS.search(rest), (verb, STEERS.findall(rest)[:5], rest[-2000:])
        texts.append(text)
    assert "hidden" in "".join(texts)  # the texts were shown at all


def test_printable_keeps_languages_and_removes_sequences() -> None:
    assert printable(f"a{BAD}b") == "ahiddendesreverb"
    same = "运行 é 🙂 مرحبا\tx\ny"
    assert printable(same) == same
    assert printable("\x1b]8;;http://x\x1b\\y\x1bPq\nz\udcff\ue000") == "y\nz\ufffd\ue000"
    assert printable("\x1b[1;31ma\x1b[0m\x1b[8mb\x1b[41m", styles=True) == "\x1b[1;31ma\x1b[0mb"


@pytest.mark.usefixtures("_hostile")
def test_no_color_is_obeyed_on_a_terminal() -> None:
    for verb in (["logs", "r", "--failed"], ["status"], ["status", "none"]):
        assert "\x1b" not in run_verb(*verb, terminal=True, NO_COLOR="1")[1], verb


@pytest.mark.usefixtures("_hostile")
@pytest.mark.parametrize("how", [">&-", ">&- 2>&-", "| head -c 0", "> /dev/full"])
def test_a_closed_or_full_output_is_no_internal_error(how: str) -> None:
    verbs = (
        *("status r", "recipes", "report r --no-files"),
        *("status", "logs r", "logs r --failed", "checkpoint list r", "status --json"),
        *("compare r log.csv --no-plot", "spikes log.csv --no-plot"),
        *("submit tiny_neox --dry-run", "plan tiny_neox"),
    )
    for verb in verbs[: amount(1, of=12)]:
        script = f"{sys.executable} -m slurmllm {verb} {how}; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
        assert done.returncode in (0, 1, 2, 4, 141), (verb, done.returncode, done.stderr)
        assert "Traceback" not in done.stderr, (verb, done.stderr)
        assert "Exception" not in done.stderr, (verb, done.stderr)


@pytest.mark.usefixtures("_hostile")
def test_a_terminal_without_unicode_is_no_error() -> None:
    verbs = ("status", "recipes", "logs r --all-ranks", "status r", "--help", "plan tiny_neox")
    for verb in map(str.split, verbs[: amount(1, of=6)]):
        done = subprocess.run(
            [sys.executable, "-m", "slurmllm", *verb],
            env=os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
            capture_output=True,
            timeout=120,
        )
        text = (done.stdout + done.stderr).decode()
        assert done.returncode in (0, 1, 2), (verb, text)
        assert text.isascii()
        assert "\\u2026" not in text, "an ellipsis is three points"
        assert "Traceback" not in text, (verb, text)


@pytest.mark.usefixtures("_hostile")
def test_arguments_that_are_no_utf8() -> None:
    bad, dry = os.fsdecode(b"\xff\xfe"), ["submit", "tiny_neox", "--dry-run"]
    for verb in (
        *(["status", bad], ["logs", bad], ["cancel", bad], ["resume", bad], ["recipes", bad]),
        *(["submit", bad], [*dry, "--name", bad], [*dry, f"train.steps={bad}"]),
        *([*dry, "--set", f"{bad}=1"], [*dry, "--cluster", bad], [*dry, "--runs-dir", bad]),
        *([*dry, f"data.sources=[{bad}]"], [*dry, f"description={bad}"]),
        *(["compare", bad, "r"], ["compare", "r", "log.csv", "--tag", f"loss={bad}"]),
        *(["compare", "r", "log.csv", "--pattern", bad], ["spikes", bad], ["report", bad]),
        *(["checkpoint", "list", bad], ["checkpoint", "verify", bad], ["data", "inspect", bad]),
        *(["data", "build", bad, "--out", bad], ["plan", bad], ["drill", bad]),
        *(["status", "--runs-dir", bad], ["evaluate", bad], [bad], ["status", f"--{bad}"]),
    ):
        code, text = run_verb(*verb)
        assert code in (0, 1, 2, 3, 4), (verb, text)
        assert "Traceback" not in text, (verb, text)
