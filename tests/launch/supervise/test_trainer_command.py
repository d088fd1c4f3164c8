"""Command lines, variables and endings of trainers of other projects."""

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from launch.supervise.starts import attempt_record
from made_records import save_attempt, save_submission

from slurmllm.cli.commands import with_command
from slurmllm.core.config.command import CommandConfig, fill, join_arguments, name_of_command
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import ConfigError
from slurmllm.core.run.records import AttemptRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise.trainer_command import (
    OutputLine,
    command_line,
    command_values,
    exit_code_of,
    failure_of,
    peer_variables,
    slurm_variables,
)
from slurmllm.train.checkpoint import foreign
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints, newest_complete, remove_old

PLAIN, NEMO = ("trainers/plain", "local"), "trainers/nemo"


@pytest.mark.parametrize(
    ("words", "text", "name"),
    [
        (["python", "a b.py", "--out={run}/o"], "python 'a b.py' --out={run}/o", "a-b"),
        (["torchrun $N && date"], "torchrun $N && date", "torchrun-N-date"),
        (["echo", "$X", "{other}", ""], "echo '$X' '{other}' ''", "echo"),
        (["python", "-m", "titan.train", "--x"], "python -m titan.train --x", "titan.train"),
        (["torchrun", "--nnodes", "8", "/a/g.py"], "torchrun --nnodes 8 /a/g.py", "g"),
        (["$X"], "$X", "X"),
    ],
)
def test_words_stay_and_name_the_run(words: list[str], text: str, name: str) -> None:
    assert (join_arguments(words), name_of_command(words)) == (text, name)


def test_only_known_placeholders_are_filled() -> None:
    values = {"run": Path("/a b"), "step": 7}
    text = "x --out {run}/o --at {step} --json '{\"a\": 1}' {unknown}"
    expected = "x --out '/a b'/o --at 7 --json '{\"a\": 1}' {unknown}"
    assert fill(text, values, quote=True) == expected


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("echo {checkpoint}", "echo 'a$(id)'"),
        ("echo \\'{checkpoint}\\'", "echo \\''a$(id)'\\'"),
        ("echo '{step}' \"{step}\" $'{step}'", "echo '7' \"7\" $'7'"),
        ("echo 'a' {checkpoint} 'b'", "echo 'a' 'a$(id)' 'b'"),
        ("x # don't {checkpoint}\ny {checkpoint}", "x # don't {checkpoint}\ny 'a$(id)'"),
        *((form.format("{checkpoint}"), None) for form in ("'{}'", "echo '{}", "bash -c 'x {}'")),
        *(
            (form.format("{checkpoint}"), None)
            for form in ('"{}"', '"\\"{}"', "`x {}`", "$'\\'{}'")
        ),
        ("cat <<E\n{checkpoint}\nE", None),
        ("x # don't\n'{checkpoint}'", None),
    ],
)
def test_no_value_leaves_the_quotes_of_a_command(template: str, filled: str | None) -> None:
    values = {"checkpoint": "a$(id)", "step": 7}
    if filled is not None:
        assert fill(template, values, quote=True) == filled
        return
    with pytest.raises(ConfigError, match="checkpoint} is in quotes in the command"):
        fill(template, values, quote=True)
    assert "step-5" in fill(template, {"checkpoint": "step-5"}, quote=True)


@pytest.mark.parametrize(
    ("recipes", "after", "expected"),
    [
        ([], ["python", "x"], ["trainers/plain", '--set=name="python"', "--command=python x"]),
        (["tiny_neox"], ["--partition", "gpu"], ["tiny_neox", "--", "--partition", "gpu"]),
        ([NEMO], ["-p=1", "x", "--y"], [NEMO, "--command=x --y", "--", "-p=1"]),
        ([], ["--mem=1G"], ["--", "--mem=1G"]),
    ],
)
def test_options_of_sbatch_and_commands_are_told_apart(
    recipes: list[str], after: list[str], expected: list[str]
) -> None:
    assert with_command(recipes, recipes, after) == expected


def test_the_arguments_for_resuming() -> None:
    command = CommandConfig(run="t --a", resume="--from {checkpoint}")
    values: dict[str, object] = {"attempt": 0, "checkpoint": "", "step": 0, "run": "/r"}
    assert command_line(command, values) == "t --a"
    assert command_line(command, {**values, "attempt": 1}) == "t --a"  # there is none
    assert command_line(command, {**values, "attempt": 1, "checkpoint": "/c"}) == "t --a --from /c"
    always = command.model_copy(update={"resume": "--resume"})
    assert command_line(always, {**values, "attempt": 1}) == "t --a --resume"


def test_one_process_on_a_node_for_programs_that_start_the_others() -> None:
    for text in (
        *("torchrun x.py", "A=1 accelerate launch x", "python -u -m torch.distributed.run x"),
        *("uv run torchrun x.py", "tune run --nproc_per_node 2 r", "swift sft --model m"),
        *("FORCE_TORCHRUN=1 llamafactory-cli train x.yaml", "axolotl train x.yaml"),
        *("fabric run --devices=2 x.py", "prterun -n 2 python x.py"),
        *("trl sft --config x.yaml", "megatron sft --model m", "accelerate-launch x.py"),
        *("composer -n 8 x.py", "deepspeed --no_ssh x.py", "python -m composer.cli x.py"),
    ):
        assert CommandConfig(run=text).one_per_node
    for text in (
        "python x.py",
        "python torchrun.py",
        "bash -c 'torchrun x'",
        "python x.py tune run",
        "automodel x.yaml --nproc-per-node 8",  # in one of torchrun's processes it starts none
        "python -m trl.scripts.sft",
    ):
        assert not CommandConfig(run=text).one_per_node
    assert CommandConfig(run="./mine", start="node").one_per_node


def test_variables_of_torchrun_and_of_slurm() -> None:
    record = attempt_record(world_size=8, master_port=1234)
    config = resolve(*PLAIN, ["command.run=torchrun x", "cluster.devices_per_node=4"])
    variables = peer_variables(config, record, 1)
    names = ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_PORT", "NNODES")
    assert [variables[name] for name in names] == ["2", "1", "4", "1234", "2"]
    assert variables["PET_RDZV_ENDPOINT"] == f"{record.master_addr}:1234"
    alone = record.model_copy(update={"nodes": ("n1",)})  # torchrun then needs no port of ours
    assert "PET_RDZV_ENDPOINT" not in peer_variables(config, alone, 0)
    assert config.workers_per_node == 1
    task = slurm_variables(record, 6, 2)
    names = ("PROCID", "NODEID", "LOCALID", "TASKS_PER_NODE", "NTASKS", "NNODES", "JOB_NODELIST")
    values = [task[f"SLURM_{name}"] for name in names]
    assert values == ["6", "1", "2", "4(x2)", "8", "2", "n1,n2"]
    assert slurm_variables(record.model_copy(update={"job_id": None}), 6, 2) == {}


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, 0), (3, 3), (137, -9), (143, -15), (255, 255), (4, 260), (75, 331), (247, -9)],
)
def test_a_shell_s_code_of_a_signal(code: int, expected: int) -> None:
    assert exit_code_of(code) == expected


_TRACE = ["Traceback (most recent call last):", '  File "t.py", line 1, in <module>', "    f()"]
_LOST = "Connection closed by peer [::1]:9"
_DURING = [*_TRACE, "KeyError: 1", "", "During handling of the above exception, another", ""]
_TORCHRUN = [
    *_TRACE,
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "  exitcode  : -9 (pid: 71)",
    "  traceback : Signal 9 (SIGKILL) received by PID 71",
]


_CHAIN = "The above exception was the direct cause of the following exception:"
_KILLED_READER = "RuntimeError: DataLoader worker (pid 4) is killed by signal: Killed. "
_NO_SHM = "ERROR: bus error in worker: insufficient shared memory (shm)."
_NPROC = "OpenBLAS blas_thread_init: RLIMIT_NPROC 4096 current, 4096 max"


@pytest.mark.parametrize(
    ("code", "lines", "error", "message", "blame"),
    [
        (1, [*_TRACE, "ValueError: no"], "ValueError", "no", "code"),
        (1, [*_TRACE, "a.b.MyError: x", *_TORCHRUN], "MyError", "x", "code"),
        (1, [f"[rank3]: {line}" for line in [*_TRACE, "KeyError: 'a'"]], "KeyError", "'a'", "code"),
        (1, [*_TRACE, f"RuntimeError: {_LOST}", *_TRACE, "OSError: y"], "OSError", "y", "code"),
        (1, [*_DURING, *_TRACE, "ValueError: 2"], "ValueError", "2", "code"),
        (1, _TORCHRUN, "killed", "ended by SIGKILL", "infrastructure"),
        (127, ["bash: line 1: nope: command not found"], "command not found", "nope", "user"),
        (127, ["bash: line 1: D: unbound variable"], "exit code 127", "D: unbound", "user"),
        (1, [line.replace("9", "11") for line in _TORCHRUN], "killed", "ended by SIGSEGV", "code"),
        (260, ["hello", ""], "exit code 4", "its last line: hello", "code"),
        (5, ["hello", "====", ""], "exit code 5", "its last line: hello", "code"),
        (1, ["python: No module named x", "see y", "=="], "exit code 1", "python: No mod", "code"),
        (1, ["no apex: No module named x", "a.BError: c", ""], "exit code 1", "a.BError", "code"),
        (1, ["AnError: caught", "t: error: no --x"], "exit code 1", "t: error: no --x", "code"),
        (1, [_NPROC, *_TRACE, "KeyboardInterrupt"], "exit code 1", _NPROC, "code"),
        (1, [*_TRACE, "KeyboardInterrupt"], "KeyboardInterrupt", "", "code"),
        (1, [_LOST, *_TRACE, "E: it abruptly died"], "E", "it abruptly died", "code"),
        (
            1,
            [_NO_SHM, *_TRACE, "E: worker (pid(s) 4) exited unexpectedly"],
            "exit code 1",
            _NO_SHM,
            "code",
        ),
        (
            1,
            [*_TRACE, _KILLED_READER, "", _CHAIN, "", *_TRACE, "RuntimeError: ended"],
            "RuntimeError",
            "ended; raised after RuntimeError: DataLoader worker",
            "code",
        ),
        (
            1,
            [*_TRACE, "E: Error(s) in X:", '\tMissing key(s): "w"', "bye", " x"],
            "E",
            'Error(s) in X:; Missing key(s): "w"',
            "code",
        ),
        (5, [], "exit code 5", "its last line: it printed nothing", "code"),
    ],
)
def test_why_trainers_fail(
    code: int, lines: list[str], error: str, message: str, blame: str
) -> None:
    output = [OutputLine(100.0 + number, line) for number, line in enumerate(lines)]
    failure = failure_of(0, "n1", code, output, 4, 110.0)
    assert (failure.error, failure.blame) == (error, blame)
    assert failure.message.startswith(message)
    assert failure.time <= 120.0


def _summary(*ranks: tuple[int, int], root: tuple[int, int]) -> list[str]:
    """torchrun's, of (rank, exit code) on n2."""
    lines = ["train.py FAILED", "Failures:"]
    for rank, code in (*ranks, root):
        lines += ["Root Cause (first observed failure):"] if (rank, code) == root else []
        lines += ["  host      : n2.cluster", f"  rank      : {rank} (local_rank: 1)"]
        lines += [f"  exitcode  : {code} (pid: 7)  (SIG)"]
    return lines


def _of(rank: int, *lines: str) -> list[str]:
    return [f"[rank{rank}]: {line}" for line in (*_TRACE, *lines)]


_KILLED, _CRASHED = "ended by SIGKILL", "ended by SIGSEGV"
_ECHO = f"RuntimeError: {_LOST}"
_NOTICED = "mpirun noticed that process rank 1 with PID 0 on node n2 exited on signal 9 (Killed)."
_DIED = "subprocess.CalledProcessError: Command '['python']' died with <Signals.SIG{}>."


@pytest.mark.parametrize(
    ("code", "lines", "place", "what"),
    [
        (1, [*_of(2, _ECHO), *_summary((2, -15), root=(3, -11))], "rank 3 on n2", _CRASHED),
        (1, [*_of(0, _ECHO), *_summary((0, -15), root=(1, -9))], "rank 1 on n2", _KILLED),
        (1, _summary((1, -9), root=(0, -15)), "rank 1 on n2", _KILLED),
        (
            1,
            [*_of(3, _ECHO), *_of(2, "E: x"), *_summary((3, -15), root=(2, 1))],
            "rank 2 on n2",
            "x",
        ),
        (
            1,
            [*_of(3, "E: y"), *_of(2, "E: x"), *_summary((3, 1), root=(2, 1))],
            "rank 2 on n2",
            "x",
        ),
        (1, [*_of(1, _ECHO), *_summary(root=(1, 1))], "rank 1 on n2", _LOST),
        # It aborts itself after a time-out of NCCL.
        (
            1,
            ["[rank1]: Watchdog caught collective operation timeout", *_summary(root=(1, -6))],
            "rank 1 on n2",
            "[rank1]: Watchdog caught collective operation timeout",
        ),
        (1, [*_TRACE, "E: x", *_summary(root=(2, 1))], "rank 2 on n2", "x"),
        (1, [*_TRACE, "E: x"], "the command on n1", "x"),
        (-9, ["step 7"], "the command on n1", _KILLED),
        (1, [*_TRACE, _DIED.format("KILL: 9")], "the command on n1", _KILLED),
        (245, ["exits with return code = -11"], "the command on n1", _CRASHED),
        (1, ["n2: [ERROR] ['x'] exits with return code = -9"], "the command on n2", _KILLED),
        (1, ["ERROR: Rank 5 crashed with exit code -9."], "rank 5 on n1", _KILLED),
        (137, [_NOTICED], "rank 1 on n2", _KILLED),
        (137, _NOTICED.replace("on signal", "on\nsignal").split("\n"), "rank 1 on n2", _KILLED),
        (1, ["  Process name: [[1,1],3]", "  Exit code:    139"], "rank 3 on n1", _CRASHED),
        (
            9,
            ["=   PID 12 RUNNING AT n2", "=   EXIT CODE: 9", "EXIT STRING: Killed (signal 9)"],
            "the command on n2",
            _KILLED,
        ),
        (
            1,
            ["=   RANK 1 PID 12 RUNNING AT n2", "=   KILLED BY SIGNAL: 7 (Bus error)"],
            "rank 1 on n2",
            "ended by SIGBUS",
        ),
        (
            1,
            ["srun: error: n2: task 3: Segmentation fault (core dumped)"],
            "rank 3 on n2",
            _CRASHED,
        ),
        (1, ["a.sh: line 3:   42 Killed      python x.py"], "the command on n1", _KILLED),
        (1, ["Child process with PID 7 terminated with code -9."], "the command on n1", _KILLED),
    ],
)
def test_what_launchers_say_of_the_process_that_ended_first(
    code: int, lines: list[str], place: str, what: str
) -> None:
    output = [OutputLine(100.0 + number, line) for number, line in enumerate(lines)]
    nodes = ("n1", "n2")
    failure = failure_of(0, "n1", exit_code_of(code), output, 4, 110.0, nodes, one_per_node=True)
    assert (failure.origin, failure.message) == (place, what)


def test_a_signal_alone_says_nothing_and_old_tracebacks_neither() -> None:
    assert failure_of(0, "n1", -9, [OutputLine(100.0, "step 1")], 1, 101.0) is None
    lines = [OutputLine(1.0, line) for line in [*_TRACE, "ValueError: caught"]]
    failure = failure_of(0, "n1", 3, [*lines, OutputLine(999.0, "bye")], 1, 1000.0)
    assert failure.message == "its last line: bye"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    path = tmp_path / "a [1]"
    path.mkdir()
    return RunDir(path)


def write(path: Path, age_s: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    for changed in (path, path.parent):
        os.utime(changed, (time.time() - age_s,) * 2)


def attempt(run: RunDir, **fields: object) -> None:
    run.attempt("train", 0).path.mkdir(parents=True)
    attempt_record(**fields).save(run.attempt("train", 0).record)


def saving(checkpoints: str = "{run}/step-{step}", **fields: str) -> CommandConfig:
    return CommandConfig.model_validate({"run": "x", "checkpoints": checkpoints, **fields})


def test_checkpoints_with_a_completion_file(run: RunDir) -> None:
    command = saving("{run}/out*/step-{step}", completion_file=".metadata")
    write(run.path / "out1/step-5/.metadata", 0)
    write(run.path / "out1/step-12/data", 0)
    write(run.path / "out1/step-last/.metadata", 0)
    checkpoints = list_trainer_checkpoints(run, command)
    assert [(entry.step, entry.complete) for entry in checkpoints] == [(5, True), (12, False)]
    newest = newest_complete(checkpoints)
    assert newest.path == run.path / "out1/step-5"


@pytest.mark.parametrize(
    ("age_s", "ended_s", "ending", "complete"),
    [
        (2, None, None, False),  # it may still be written
        (60, None, None, True),
        (60, 58, "node_failure", False),  # killed meanwhile
        (60, 20, "node_failure", True),
        (60, 58, "done", True),
        (60, 58, "advance_signal", False),  # killed too
        (60, 58, "code_error", False),
    ],
)
def test_checkpoints_by_their_age(
    run: RunDir, age_s: float, ended_s: float | None, ending: str | None, complete: bool
) -> None:
    ended_at = None if ended_s is None else time.time() - ended_s
    attempt(run, ended_at=ended_at, ending=ending)
    write(run.path / "step-5/data", age_s)
    command = saving()
    assert [entry.complete for entry in list_trainer_checkpoints(run, command)] == [complete]


@pytest.mark.parametrize(
    ("later", "sizes", "complete"),
    [
        ({}, (9, 9), True),  # as large as the one before
        ({}, (9, 8), False),
        ({}, (8,), False),  # nothing to compare with
        ({"first_step": 21}, (8,), True),  # it was resumed from
        ({"first_step": 11}, (9, 8), False),
        ({"first_step": 11, "ending": "done"}, (9, 8), True),  # and would have been written again
    ],
)
def test_a_checkpoint_of_the_last_seconds_before_a_kill(
    run: RunDir, later: dict[str, Any], sizes: tuple[int, ...], complete: bool
) -> None:
    now = time.time()
    save_attempt(run, started_at=now - 99, ended_at=now - 58, ending="node_failure")
    if later:
        times = {"started_at": now - 50, "ended_at": now - 20}
        save_attempt(run, 1, **{"ending": "node_failure", **times, **later})
    for index, size in enumerate(sizes, 3 - len(sizes)):
        path = run.path / f"step-{10 * index}"
        path.write_bytes(bytes(size))
        os.utime(path, (now - 80 + 10 * index, now - 80 + 10 * index))
    newest = list_trainer_checkpoints(run, saving())[-1]
    assert (newest.step, newest.complete) == (20, complete)


@pytest.mark.parametrize(("size", "complete"), [(9, True), (8, False)])
def test_a_checkpoint_of_the_last_seconds_of_an_open_attempt(
    run: RunDir, size: int, complete: bool
) -> None:
    now = time.time()
    save_attempt(run, started_at=now - 99)
    for step, num_bytes, age_s in ((10, 9, 60), (20, size, 2)):
        path = run.path / f"step-{step}"
        path.write_bytes(bytes(num_bytes))
        os.utime(path, (now - age_s,) * 2)
    checkpoints = list_trainer_checkpoints(run, saving())
    assert [entry.complete for entry in checkpoints] == [True, complete]


def test_a_checkpoint_at_the_end_counts_when_its_attempt_is_closed(run: RunDir) -> None:
    attempt(run)
    write(run.path / "step-5/data", 1)
    command = saving(save_signal="USR1")
    ending = {"ended_at": time.time(), "ending": "advance_signal"}
    closing = AttemptRecord.load(run.attempt("train", 0).record).model_copy(update=ending)
    assert not list_trainer_checkpoints(run, command)[0].complete
    assert list_trainer_checkpoints(run, command, closing=closing)[0].complete


def test_a_checkpoint_without_a_step_has_the_last_one_before_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "_FEW_ROWS", 20)
    attempt(run)
    begun = time.time() - 5000
    rows = "".join(f'{{"step":{n},"time":{begun + n}}}\n' for n in range(1, 5000))
    run.metrics(0).parent.mkdir()
    run.metrics(0).write_text(rows)
    command = saving("{run}/*.pt")
    (run.path / "c.pt").touch()
    for step in (199, 4499, 4989):
        os.utime(run.path / "c.pt", (begun + step + 0.5,) * 2)
        assert [entry.step for entry in list_trainer_checkpoints(run, command)] == [step]


def test_all_nodes_resume_from_the_checkpoint_of_the_record(run: RunDir) -> None:
    write(run.path / "step-9/done", 0)  # that this node alone shows
    command = saving(completion_file="done")
    config = resolve(*PLAIN, ["command.run=x"]).with_settings("command", **dict(command))
    record = attempt_record(checkpoint_before=5, checkpoint_path="/a/step-5")
    values = command_values(run, config, 1, 2, record)
    assert (values["step"], values["checkpoint"]) == (5, "/a/step-5")
    assert command_values(run, config, 1, 2)["step"] == 9


def test_old_checkpoints_go_and_incomplete_ones_stay(run: RunDir) -> None:
    command = saving(completion_file="done")
    for step in (1, 2, 3, 5):
        write(run.path / f"step-{step}/done", 0)
    write(run.path / "step-4/data", 0)
    (run.path.parent / "step-0").mkdir()
    (run.path.parent / "step-0/done").touch()
    (run.path / "step-0").symlink_to(run.path.parent / "step-0")
    save_submission(run, submitted_at=time.time() - 100, local=True)
    write(run.path / "step-1/done", 500)  # it was there before the run
    assert [path.name for path in remove_old(run, command, 2)] == ["step-2"]
    assert (run.path.parent / "step-0/done").exists()
    names = {path.name for path in run.path.glob("step-*")}
    assert names == {"step-0", "step-1", "step-3", "step-4", "step-5"}


@pytest.mark.parametrize(
    ("pattern", "refused"),
    [
        ("{run}/outputs/step-{step}", False),
        ("{run}/*/ckpt-{step}.pt", False),
        ("/scratch/*-step_{step}", True),
        ("/**/{step}", True),
        ("{run}/../other/step-{step}", True),
        ("{run}-b/step-{step}", True),
        ("outputs/{run}/step-{step}", True),
        ("step-{step}", True),
    ],
)
def test_retention_is_of_the_runs_directory(pattern: str, refused: bool) -> None:
    settings = ["command.run=x", f"command.checkpoints={pattern}", "checkpoint.keep=1"]
    with pytest.raises(ConfigError, match="removes only what is in") if refused else nullcontext():
        resolve(*PLAIN, settings)
    resolve(*PLAIN, settings[:2])


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ("command.save_signal=nope", "must be none, or a signal"),
        ("command.checkpoints={run}/{step}/{step}", "must have {step} once"),
        ("command.start=both", "'auto', 'device' or 'node'"),
        ("command.run=' '", "must not be empty"),
        ("train.steps=5", "has no train .--set train.steps=5"),
    ],
)
def test_faults_of_the_section(setting: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule.replace("{", r"\{")):
        resolve(*PLAIN, ["command.run=x", setting])


def test_a_section_that_is_not_there_says_so() -> None:
    config = resolve(*PLAIN, ["command.run=x"])
    with pytest.raises(ConfigError, match=r"model\.num_layers is needed here"):
        _ = config.recipe.model.num_layers
    assert "train" not in config.values()
