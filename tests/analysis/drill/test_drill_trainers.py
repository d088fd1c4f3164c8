"""Drills of other projects' trainers: their plan, how they resumed, and whole drills here."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_slurm import FakeSlurm
from made_records import make_attempt, save_attempt

from slurmllm.analysis.compare.result import Tolerances
from slurmllm.analysis.drill import injector
from slurmllm.analysis.drill.checks import Resumption, Unbroken, judge_resume
from slurmllm.analysis.drill.drill import Drill, SlurmRunner
from slurmllm.analysis.drill.injector import FAULT_KINDS, FaultKind, FaultSpec, Injection
from slurmllm.analysis.drill.plan import DrillPlan, make_plan, parse_kinds
from slurmllm.core.config.command import CommandConfig
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import NodeError, RunError
from slurmllm.core.metrics.source import read_curve
from slurmllm.core.run.records import AttemptRecord, NodeRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise.started_processes import started_by

TRAINERS = Path(__file__).parents[2] / "trainers"
STEPS, SAVED, BROKEN = 40, 10, 13
COMMAND = CommandConfig(run="train --out {run}/out", checkpoints="{run}/out/step-{step}")
STEP_LINE = r"command.progress=step (?P<step>\d+) loss (?P<loss>\S+)"
Loss = Callable[[int], float]


def plan_of(
    folder: Path,
    *overrides: str,
    steps: int | None = None,
    kinds: tuple[FaultKind, ...] = FAULT_KINDS,
) -> DrillPlan:
    values = ["command.run=train {run}/out", *overrides]
    config = resolve("trainers/plain", "local", values)
    run = RunDir(folder / "r")
    return make_plan(run, config, 1, True, kinds, steps=steps, seed=0)


def write_rows(
    run: RunDir, attempt: int, steps: Iterable[int], loss: Loss = lambda s: 1 / s
) -> None:
    run.metrics(attempt).parent.mkdir(parents=True, exist_ok=True)
    rows = ({"step": s, "attempt": attempt, "time": 1e9 + s, "loss": loss(s)} for s in steps)
    run.metrics(attempt).write_text("".join(json.dumps(row) + "\n" for row in rows))


def judged(
    folder: Path,
    second: Iterable[int],
    loss: Loss = lambda s: 1 / s,
    noise: float = 0.0,
    every: int = 1,
    first: Iterable[int] = range(1, BROKEN + 1),
    **ending: Any,
) -> Resumption:
    """The verdict on a run that broke after step 13, with the steps of its second attempt."""
    reference, repeat, run = (RunDir(folder / name) for name in ("reference", "repeat", "broken"))
    write_rows(reference, 0, range(every, STEPS + 1, every))
    write_rows(repeat, 0, range(every, STEPS + 1, every), lambda s: (1 + noise * math.sin(s)) / s)
    write_rows(run, 0, first)
    if steps := list(second):
        write_rows(run, 1, steps, loss)
    (run.path / "out" / f"step-{SAVED}").mkdir(parents=True)
    curves = read_curve(reference.path), read_curve(repeat.path)
    unbroken = Unbroken(*curves, COMMAND, STEPS, Tolerances(exact=True))
    hit = make_attempt(0, **{"ending": "node_failure", **ending})
    return judge_resume(run, read_curve(run.path), unbroken, hit)


AFTER = range(SAVED + 1, STEPS + 1)


def test_an_exact_resume(tmp_path: Path) -> None:
    resume = judged(tmp_path, AFTER)
    assert (resume.verdict, resume.from_step, resume.confidence) == ("exact", SAVED, "certain")
    assert resume.checkpoint.endswith(f"out/step-{SAVED}")
    assert "identical; 30 steps of up to 1" in resume.confidence_reason
    # With other batches it differs.
    resume = judged(tmp_path / "other", AFTER, lambda s: 1 / s * (1.1 if s > 15 else 1))
    assert (resume.verdict, resume.differs_from_step) == ("differs", 16)
    assert resume.max_rel_diff == pytest.approx(1 - 1 / 1.1)
    assert (resume.noise, resume.confidence) == (0.0, "certain")


@pytest.mark.parametrize(
    ("factor", "verdict", "confidence"),
    [(1.0, "within_noise", "likely"), (8.0, "differs", "likely"), (1e3, "differs", "certain")],
)
def test_the_noise_of_two_unbroken_runs_is_no_difference(
    tmp_path: Path, factor: float, verdict: str, confidence: str
) -> None:
    resume = judged(tmp_path, AFTER, lambda s: (1 + factor * 1e-5 * math.cos(s)) / s, noise=1e-5)
    assert (resume.verdict, resume.confidence) == (verdict, confidence), resume
    assert resume.noise == pytest.approx(1e-5, rel=0.01)
    assert ("would have shown" in resume.confidence_reason) == (verdict == "within_noise")


def test_who_begins_at_step_1_does_not_resume(tmp_path: Path) -> None:
    resume = judged(tmp_path, range(1, STEPS + 1))
    assert (resume.verdict, resume.from_step) == ("began_again", 0)
    assert resume.text == "did not resume: began again at step 1"
    # A sparse log resumes from its checkpoint.
    resume = judged(tmp_path / "sparse", (16, 24, 32, 40), every=8, first=(8,))
    assert (resume.verdict, resume.from_step) == ("exact", SAVED)
    # Without a checkpoint, too, its first row does not show where it began.
    (tmp_path / "sparse" / "broken" / "out" / f"step-{SAVED}").rmdir()
    curves = [read_curve(tmp_path / "sparse" / name) for name in ("reference", "broken")]
    unbroken = Unbroken(curves[0], curves[0], COMMAND, STEPS, Tolerances(exact=True))
    run = RunDir(tmp_path / "sparse" / "broken")
    resume = judge_resume(run, curves[1], unbroken, make_attempt(0, ending="node_failure"))
    assert (resume.verdict, resume.from_step) == ("exact", 8)


@pytest.mark.parametrize(
    ("every", "loss", "confidence", "text"),
    [
        (1, lambda s: 1 / s, "certain", "exact"),
        (1, lambda s: round(1 / s, 6), "likely", "exact in the 5 digits printed"),
        (5, lambda s: 1 / s, "likely", "exact in the 16 digits printed"),
        (1, lambda s: 1 / 3, "likely", "exact in the 16 digits printed"),
        (1, lambda s: round(1 / s, 3), "weak", "exact in the 2 digits printed"),
    ],
)
def test_exact_is_certain_of_many_digits_over_many_steps(
    tmp_path: Path, every: int, loss: Loss, confidence: str, text: str
) -> None:
    steps = range(every, STEPS + 1, every)
    reference, run = RunDir(tmp_path / "reference"), RunDir(tmp_path / "broken")
    write_rows(reference, 0, steps, loss)
    write_rows(run, 0, (s for s in steps if s <= SAVED), loss)
    write_rows(run, 1, (s for s in steps if s > SAVED), loss)
    curve = read_curve(reference.path)
    unbroken = Unbroken(curve, curve, COMMAND, STEPS, Tolerances(exact=True))
    hit = make_attempt(0, ending="node_failure")
    resume = judge_resume(run, read_curve(run.path), unbroken, hit)
    assert (resume.confidence, resume.text) == (confidence, text)


def test_without_a_later_step(tmp_path: Path) -> None:
    assert judged(tmp_path / "a", ()).text == "did not resume: no step after the fault"
    assert judged(tmp_path / "d", range(37, STEPS + 1), first=range(1, 40)).confidence == "weak"
    assert judged(tmp_path / "e", AFTER, ending="storage_failure", action="stop").by_hand
    done = judged(tmp_path / "b", (), ending="done")
    assert (done.verdict, done.from_step) == ("not_resumed", None)
    assert "exited with 0 at step 13" in done.text
    resume = judged(tmp_path / "c", (), first=range(1, STEPS + 1), ending="done")
    assert (resume.verdict, resume.text) == ("exact", "continued without a restart: exact")


@pytest.mark.parametrize("override", ["command.run=train /out", "command.progress=out/a.jsonl"])
def test_copies_do_not_share_a_folder(tmp_path: Path, override: str) -> None:
    with pytest.raises(RunError, match=r"has no \{run\}.*write the folder of its output as \{run"):
        plan_of(tmp_path, override)


def test_steps_are_limited_by_the_commands(tmp_path: Path) -> None:
    assert plan_of(tmp_path, "command.steps=40", steps=20).is_limited
    assert not plan_of(tmp_path, "command.steps=40").is_limited
    assert plan_of(tmp_path).steps == 0  # as many as the reference makes
    with pytest.raises(RunError, match=r"no more than command\.steps, 40"):
        plan_of(tmp_path, "command.steps=40", steps=41)


class EndlessTrainer(SlurmRunner):
    """Makes five steps whenever it is looked at, until it is cancelled."""

    def __init__(self) -> None:
        super().__init__(FakeSlurm())
        self.steps = 0
        self.cancelled_at: list[int] = []

    def start(self, run: RunDir, nodes: int) -> None:
        pass

    def active(self, run: RunDir) -> bool:
        if not self.cancelled_at:
            self.steps += 5
            write_rows(run, 0, range(1, self.steps + 1))
        return not self.cancelled_at

    def cancel(self, run: RunDir) -> None:
        self.cancelled_at.append(self.steps)


def test_a_limited_copy_is_cancelled_after_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmllm.analysis.drill.drill.POLL_S", 0.0)
    plan, runner = plan_of(tmp_path, "command.steps=40", steps=20), EndlessTrainer()
    drill = Drill(plan, runner, FakeSlurm(), Tolerances(exact=True), False, lambda message: None)
    drill._run_unbroken("reference")
    assert runner.cancelled_at == [20]


@pytest.mark.parametrize(
    ("saved", "first", "last"), [((0, 10, 20), 11, 19), ((30, 40), 31, 39), ((), 21, 39)]
)
def test_faults_come_after_the_first_checkpoint_of_the_reference(
    tmp_path: Path, saved: tuple[int, ...], first: int, last: int
) -> None:
    reference = RunDir(tmp_path / "reference")
    write_rows(reference, 0, range(1, STEPS + 1))
    for step in saved:
        (reference.path / "out" / f"step-{step}").mkdir(parents=True)
    plan = plan_of(tmp_path, "command.checkpoints={run}/out/step-{step}")
    plan = plan.with_reference(reference)
    steps = {plan.fault(kind, ["n0"]).at_step for kind in FAULT_KINDS if kind != "node"}
    assert plan.steps == STEPS
    assert first <= min(steps) < max(steps) <= last
    assert plan.fault("save", ["n0"]).rank == 0


def test_the_first_save_of_an_overwritten_file_is_unknown(tmp_path: Path) -> None:
    reference = RunDir(tmp_path / "reference")
    write_rows(reference, 0, range(1, STEPS + 1))
    (reference.path / "ckpt.pt").write_bytes(b"x")
    os.utime(reference.path / "ckpt.pt", (1e9 + STEPS - 0.5,) * 2)  # after step 39
    plan = plan_of(tmp_path, "command.checkpoints={run}/ckpt.pt").with_reference(reference)
    assert STEPS // 2 < plan.fault("worker", ["n0"]).at_step < STEPS


def test_a_reference_without_steps_says_what_is_missing(tmp_path: Path) -> None:
    reference = RunDir(tmp_path / "reference")
    save_attempt(reference, nodes=("n0",))
    record = NodeRecord(node="n0", progress_missing="no steps: no line of a known format")
    record.save(reference.attempt("train", 0).node("n0"))
    with pytest.raises(RunError, match=r"no line of a known format; set command\.progress"):
        plan_of(tmp_path).with_reference(reference)


def test_some_kinds_are_of_other_trainers(tmp_path: Path) -> None:
    assert parse_kinds("terminate,full_disk", 1, of_command=True) == ("terminate", "full_disk")
    with pytest.raises(RunError, match="must be all, or some of worker, node"):
        parse_kinds("terminate", 1)
    assert "save" not in plan_of(tmp_path).kinds  # its checkpoints are not watched
    with pytest.raises(RunError, match=r"--kinds save: takes command\.checkpoints"):
        plan_of(tmp_path, kinds=("save",))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """A run whose launcher has started a shell, and that `sleep`, as rank 0."""
    run = RunDir(tmp_path / "r")
    save_attempt(run, nodes=("local0",))
    code = "import subprocess, sys; subprocess.run(['bash', '-c', 'sleep 60; true'])"
    launcher = subprocess.Popen([sys.executable, "-c", code, "slurmllm", "launch", str(run.path)])
    while len(below := injector.descendants([launcher.pid])) < 2:
        time.sleep(0.01)
    NodeRecord(node="local0", pids={0: below[0]}).save(run.attempt("train", 0).node("local0"))
    yield run
    injector.kill([*injector.descendants([launcher.pid]), launcher.pid], signal.SIGKILL)
    launcher.wait()


def fault(kind: FaultKind, **fields: Any) -> FaultSpec:
    values = {"attempt": 0, "node": "local0", "rank": 0, "at_step": 3, "local": True}
    return FaultSpec.model_validate({"kind": kind, "trainer": COMMAND, **values, **fields})


def test_the_rank_below_two_launchers_is_hit(run: RunDir) -> None:
    # As deepspeed's: runner, launch, rank. The runner exits with 0 if its launch is killed.
    rank = "import subprocess; subprocess.run(['env', 'CROSS_RANK=0', 'sleep', '60'])"
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"
    command = [sys.executable, "-c", code.format(code.format(rank)), "slurmllm", "launch"]
    launcher = subprocess.Popen([*command, str(run.path)])
    try:
        while len(below := injector.descendants([launcher.pid])) < 3:
            time.sleep(0.01)
        while not (pids := list(started_by(psutil.Process(below[0])))):
            time.sleep(0.01)
        NodeRecord(node="local0", pids={0: below[0]}).save(run.attempt("train", 0).node("local0"))
        torchrun = COMMAND.model_copy(update={"start": "node"})
        spec = fault("worker").model_copy(update={"trainer": torchrun})
        assert injector.trainer_pids(run, spec) == [below[2]] == [pids[0].pid]
    finally:
        injector.kill([*injector.descendants([launcher.pid]), launcher.pid], signal.SIGKILL)
        launcher.wait()


def test_the_trainer_below_its_shell_is_hit(run: RunDir) -> None:
    (launcher,) = injector.find_processes(run)
    _, sleep = injector.descendants([launcher.pid])
    assert injector.trainer_pids(run, fault("worker")) == [sleep]
    record = run.attempt("train", 0).node("local0")
    NodeRecord(node="local0", pids={0: os.getpid()}).save(record)
    with pytest.raises(NodeError, match="does not run on local0"):
        injector.trainer_pids(run, fault("worker"))
    assert injector.trainer_pids(run, fault("terminate")) == [sleep]


def test_files_can_no_longer_grow(run: RunDir) -> None:
    write_rows(run, 0, (3,))
    injection = injector.inject(run, fault("full_disk"))
    (pid,) = injection.pids
    assert (injection.step, resource.prlimit(pid, resource.RLIMIT_FSIZE)[0]) == (3, 0)
    # Without a complete checkpoint a fault waits.
    record = run.attempt("train", 0).record
    ended = AttemptRecord.load(record).model_copy(update={"ended_at": 1e9})
    ended.save(record)
    command = COMMAND.model_copy(update={"resume": "--from {checkpoint}"})
    missed = injector.inject(run, fault("worker", trainer=command)).missed
    assert missed == "attempt 0 ended before step 3 with a complete checkpoint"


def test_a_save_is_hit_at_its_first_file(run: RunDir) -> None:
    write_rows(run, 0, (3,))
    (run.path / "out" / "step-2").mkdir(parents=True)
    injections: list[Injection] = []
    agent = threading.Thread(target=lambda: injections.append(injector.inject(run, fault("save"))))
    agent.start()
    time.sleep(0.3)
    assert agent.is_alive()  # the first one is let pass
    write_rows(run, 0, (3, 4))
    (run.path / "out" / "half.tmp").touch()
    agent.join(20)
    assert (injections[0].step, injections[0].missed) == (4, "")
    assert len(injections[0].pids) == 1


def drill(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "slurmllm", "drill", "--local", "--json"]
    command += [f"--runs-dir={folder}", "slurm.backoff_s=1", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.timeout(600)
def test_a_trainer_that_resumes_after_a_kill_and_not_after_a_signal(tmp_path: Path) -> None:
    saving = ("command.checkpoints={run}/out/step-{step}", "command.completion_file=done")
    trainer = (sys.executable, str(TRAINERS / "steps.py"), "--out", "{run}/out", "--steps=30")
    options = ("--kinds=worker,terminate", STEP_LINE, *saving)
    code, report = drill(tmp_path, *options, "--", *trainer, "--step-s=0.3", "--save-on=TERM")
    killed, asked = report["drills"]
    assert (code, report["steps"], report["noise"]) == (1, 30, {"loss": 0.0})
    assert (killed["ending"], killed["passed"]) == ("node_failure", True), killed
    assert killed["resume"]["verdict"] == "exact"
    assert killed["steps_lost"] == killed["steps_recomputed"]
    assert killed["recovery"]["total_s"] > 0
    assert (asked["resume"]["verdict"], asked["ending"]) == ("not_resumed", "done"), asked
    names = {entry.name for entry in tmp_path.iterdir() if entry.is_dir()}
    assert names == {f"steps-drill-1-{part}" for part in ("reference", "repeat", "terminate")}
    assert len((tmp_path / "steps-drill-1.jsonl").read_text().splitlines()) == 2


DDP = ("trainers/plain", STEP_LINE, "command.checkpoints={run}/out/step_{step}.pt")
DDP_SCRIPT = ("ddp_script.py", "--out={run}/out", "--step-s=0.2", "--steps=1000")
HF_SCRIPT = ("hf_trainer.py", "--output_dir={run}/outputs", "--step_s=0.2")
LIGHTNING = ("lightning_script.py", "--root={run}/outputs", "--step_s=0.2")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("module", "recipe", "script", "verdict"),
    [
        ("torch", DDP, (*DDP_SCRIPT, "--first-batches"), "differs"),
        ("transformers", ("trainers/hf_trainer",), HF_SCRIPT, "exact"),
        ("transformers", ("trainers/hf_trainer",), (*HF_SCRIPT, "--ignore_data_skip"), "differs"),
        ("pytorch_lightning", ("trainers/lightning",), LIGHTNING, "differs"),
    ],
)
def test_real_trainers(
    tmp_path: Path, module: str, recipe: tuple[str, ...], script: tuple[str, ...], verdict: str
) -> None:
    pytest.importorskip(module)
    arguments = [*recipe, "--kinds=worker", "--steps=30", "--", sys.executable]
    _, report = drill(tmp_path, *arguments, str(TRAINERS / script[0]), *script[1:])
    (result,) = report["drills"]
    assert result["resume"]["verdict"] == verdict, result
    assert result["resume"]["from_step"] == 10
