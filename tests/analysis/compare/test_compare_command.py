import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner, Result
from command_line import call, printed, refused
from core.metrics.test_other_shapes import LOSSES, WriteLog, points, write
from core.metrics.test_tensorboard_logs import event, scalar, write_events
from training_rows import MakeFile, MakeRun, Row, make_row, make_rows

from slurmllm import compare_runs
from slurmllm.cli.compare import _parse_shifts, compare
from slurmllm.cli.main import cli
from slurmllm.cli.options import LogOptions
from slurmllm.core.errors import RunError, SlurmllmError, StorageError, UserError
from slurmllm.core.run.rundir import RunDir

Run = Callable[..., Result]
ThreeRuns = tuple[RunDir, RunDir, RunDir]
METRICS = ("loss", "grad_norm")
STRICT = (["--exact"], ["--require", "identical"], ["--require", "match"])
__all__ = ["write"]  # a fixture


@pytest.fixture
def run_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURMLLM_RUNS", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("_draw_curves", "_draw_difference"):  # see test_plot
        monkeypatch.setattr(f"slurmllm.analysis.compare.plot.{name}", lambda *_: None)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(compare, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def three_runs(make_run: MakeRun) -> ThreeRuns:
    other = [make_row(step, loss=9.0) if step >= 37 else make_row(step) for step in range(1, 51)]
    return (
        make_run("unbroken", make_rows(1, 50)),
        make_run("requeued", make_rows(1, 30), make_rows(21, 50, 1)),
        make_run("other", other),
    )


def refusal(result: Result, kind: type[SlurmllmError] = RunError) -> str:
    """The message of the error that the command line prints, whose exit code is 2."""
    assert isinstance(result.exception, kind), result.exception
    assert result.exception.exit_code == 2
    assert result.stdout == ""
    return str(result.exception)


def parsed(result: Result) -> dict[str, Any]:
    strict: dict[str, None] = {}  # what is no JSON, such as NaN, is no key of it
    answer: dict[str, Any] = json.loads(result.stdout, parse_constant=strict.__getitem__)
    return answer


@pytest.mark.usefixtures("three_runs")
def test_match_is_0_and_differ_is_1(run_command: Run) -> None:
    shown = printed(run_command("unbroken", "requeued"))
    assert "identical: loss and grad_norm are bit-identical at all 50 steps compared" in shown
    assert "10 steps recomputed after a restart, with the same values" in shown
    differ = run_command("unbroken", "other", "--no-plot")
    assert differ.exit_code == 1
    assert "differ: loss diverges at step 37: " in differ.stdout
    assert "picture" not in differ.stdout


def test_json_holds_everything_and_nothing_else_is_printed(
    run_command: Run, three_runs: ThreeRuns
) -> None:
    result = run_command("unbroken", "other", "--json")
    assert result.exit_code == 1
    answer = parsed(result)
    keys = (
        "verdict match reason causes data tolerance a b steps_compared first_step last_step "
        "only_in_a only_in_b metrics overlaps warnings alignment band basis diagnosis settings "
        "contrary_settings advice "
        "statistics power bit_identical_to_step plot html"
    )
    assert set(answer) == set(keys.split())
    assert (answer["verdict"], answer["match"]) == ("differ", False)
    assert answer["tolerance"] == {"loss": 1e-3, "grad_norm": 1e-2, "exact": False}
    for option, code in (("--to-step=36", 0), ("--from-step=36", 1), ("--tolerance=2", 0)):
        assert run_command("unbroken", "other", "--no-plot", option).exit_code == code
    assert (answer["a"]["name"], answer["b"]["name"]) == ("unbroken", "other")
    assert set(answer["metrics"]) == {"loss", "grad_norm"}
    assert answer["metrics"]["loss"]["first_departure_step"] == 37
    assert answer["overlaps"]["b"] == {"rows": 0, "identical": None, "max_rel_diff": None}
    assert answer["plot"] == str(three_runs[0].reports / "compare-unbroken-other.png")
    assert Path(answer["plot"]).is_file()


@pytest.mark.usefixtures("three_runs")
def test_a_required_verdict(run_command: Run, make_run: MakeRun) -> None:
    make_run("close", [row | {"loss": row["loss"] * 1.0001} for row in make_rows(1, 50)])
    for other, codes in (("requeued", [0, 0, 0]), ("close", [1, 0, 0]), ("other", [1, 1, 1])):
        for level, code in zip(("identical", "match", "equivalent"), codes, strict=True):
            result = run_command("unbroken", other, "--require", level, "--no-plot")
            assert result.exit_code == code
    rows = make_rows(1, 50)
    del rows[-1]["loss"]
    make_run("cut", rows)
    for third in ("close", "cut"):
        assert "--require identical is not met: C is match" in refused(
            run_command("unbroken", "requeued", third, "--require", "identical", "--no-plot"), 1
        )


def test_runs_by_directory_by_file_and_under_another_root(
    run_command: Run, three_runs: ThreeRuns
) -> None:
    unbroken, requeued, _ = three_runs
    for arguments in (
        (unbroken.path, requeued.path),
        ("runs/unbroken", "requeued"),
        (unbroken.metrics(0), requeued.path),
    ):
        assert run_command(*arguments, "--no-plot", "--exact").exit_code == 0
    unbroken.path.parent.rename("elsewhere")
    assert "no run 'unbroken'" in refusal(run_command("unbroken", "requeued"))
    assert run_command("unbroken", "requeued", "--runs-dir", "elsewhere").exit_code == 0
    Path("elsewhere/unbroken/config.yaml").unlink()
    copied = run_command("elsewhere/unbroken", "requeued", "--runs-dir", "elsewhere")
    assert copied.exit_code == 0


def test_a_picture_nobody_asked_for_is_no_failure(run_command: Run, three_runs: ThreeRuns) -> None:
    three_runs[0].reports.write_text("in the way")
    result = run_command("unbroken", "requeued", "--json")
    assert result.exit_code == 0
    answer = parsed(result)
    assert answer["plot"] is None
    assert "cannot write the picture" in answer["warnings"][0]
    asked = run_command("unbroken", "requeued", "--plot", three_runs[0].reports / "p.png")
    assert isinstance(asked.exception, StorageError)


@pytest.mark.usefixtures("three_runs")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--html", "p.pdf"), r"--html p\.pdf: the page is HTML; name it p\.html"),
        (("--plot", "p.pdf"), r"--plot p\.pdf: pictures are PNG files; use p\.png"),
        (("--plot", "p.png", "--no-plot"), "exclude each other"),
        (("--tolerance", "-1"), "--tolerance -1: a tolerance is 0 or more"),
        (("--grad-norm-tolerance", "nan"), "--grad-norm-tolerance nan: a tolerance is 0 or more"),
        (("--exact", "--tolerance", "1e-3"), "--tolerance 0.001 and --exact exclude each other"),
        (("--to-step", "5", "--from-step", "9"), "--to-step 5 is less than --from-step 9"),
        (("--exact", "--require", "match"), "leave out --require match"),
        (("--shift", "B=1", "--shift", "B=2"), "B has a shift already"),
    ],
)
def test_options_without_sense(run_command: Run, options: tuple[str, ...], expected: str) -> None:
    message = refusal(run_command("unbroken", "other", *options), UserError)
    assert re.search(expected, message)


def test_unusable_input_is_2(run_command: Run, make_run: MakeRun, make_file: MakeFile) -> None:
    make_run("good", make_rows(1, 9))
    make_run("silent")
    make_run("empty", [])
    make_run("later", make_rows(20, 29))
    broken = make_run("broken", make_rows(1, 9))
    broken.metrics(0).write_text('{"step": 1, "loss": 2.0}\n{"step"\n{"step": 3, "loss": 2.0}\n')
    binary = make_file("binary", [])
    binary.write_bytes(bytes(range(256)) * 8)
    assert "no run 'absent'" in refusal(run_command("good", "absent"))
    whole = call("compare", "good", "absent", "--no-plot", "--json")
    assert (whole.exit_code, whole.stdout) == (2, "")
    assert "error: no run 'absent'" in whole.stderr
    assert "an empty name is not a run" in refusal(run_command("good", ""))
    assert "no metrics file" in refusal(run_command("good", "absent.jsonl"))
    assert "holds no attempt_NNN.jsonl" in refusal(run_command("good", "silent"))
    assert "without one whole row" in refusal(run_command("good", "empty"))
    make_run("floats", [row | {"step": float(row["step"])} for row in make_rows(1, 3)])
    assert "attempt_000.jsonl:1: step is 1.0" in refusal(run_command("good", "floats"))
    assert "attempt_000.jsonl:2: " in refusal(run_command("good", "broken", "--exact"))
    assert "no step in common" in refusal(run_command("good", "later"))
    assert "binary.jsonl:1: not a JSON object" in refusal(run_command("good", binary))
    assert "binary.jsonl:1: " in refusal(run_command("good", binary, "--exact"))


def test_values_and_names_that_are_unusual(run_command: Run, make_run: MakeRun) -> None:
    rows = make_rows(1, 9)
    make_run("good", rows)
    rows[3]["param_norm"] = {"mean": 1.0, "of": "a newer version"}
    make_run("odd", rows)
    shown = printed(run_command("good", "odd", "--no-plot"))
    assert "attempt_000.jsonl:4: param_norm is {'mean'" in shown
    assert "a newer version of slurmllm may have written the file" in shown
    make_run("[red]a[/]", make_rows(1, 3))  # a name that looks like markup
    shown = printed(run_command("runs/[red]a[/]", "runs/[red]a[/]", "--no-plot"))
    assert "A and B are the same: " in shown
    assert "[red]a[/]" in shown


@pytest.mark.usefixtures("three_runs")
def test_several_runs_are_each_compared_with_the_first(run_command: Run, tmp_path: Path) -> None:
    result = run_command("unbroken", "requeued", "other", "--json", "--plot", "p.png")
    assert result.exit_code == 1
    answer = parsed(result)
    assert answer["match"] is False
    assert [comparison["match"] for comparison in answer["comparisons"]] == [True, False]
    alone = parsed(run_command("unbroken", "other", "--json", "--plot", "p.png"))
    assert answer["comparisons"][1] == alone
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    shown = run_command("unbroken", "requeued", "other", "--no-plot").stdout
    assert "A and B identical: " in shown
    assert "A and C differ: loss diverges at step 37: " in shown
    assert run_command("unbroken", "requeued", "unbroken", "--no-plot").exit_code == 0
    drawn = parsed(run_command("unbroken", "requeued", "other", "--json"))
    assert drawn["comparisons"][0]["plot"].endswith("compare-unbroken-requeued-other.png")


def seeded(number: int, factor: float = 1.0) -> list[dict[str, Any]]:
    random = Random(number)
    return [
        make_row(step, **{m: make_row(step)[m] * factor * random.gauss(1, 0.01) for m in METRICS})
        for step in range(1, 301)
    ]


def test_seeds_of_a_side_are_its_tolerance(
    run_command: Run, make_run: MakeRun, tmp_path: Path
) -> None:
    for number in range(5):
        make_run(f"s{number}", seeded(number))
    make_run("worse", seeded(9, 1.05))
    assert run_command("s0", "worse", "--no-plot").exit_code == 1
    alone = parsed(run_command("s0", "s4", "--no-plot", "--json"))
    assert alone["verdict"] == "differ"  # they share the noise of `make_row`
    assert alone["metrics"]["loss"]["scatter"]["size"] == pytest.approx(0.014, rel=0.15)
    seeds = [option for i in (1, 2, 3) for option in ("--seed", f"s{i}")]
    within = parsed(run_command("s0", "s4", *seeds, "--json", "--plot", "p.png"))
    assert within["match"], within["reason"]
    assert within["band"]["seeds"] == ["s0", "s1", "s2", "s3"]
    assert within["reason"].startswith("within the band of 4 seeds: loss (spread ")
    assert (tmp_path / "p.png").is_file()
    for twice in (("s0", "s1", "--seed", "s1"), ("s0", "s4", *seeds, "--seed", "s1")):
        assert "--seed s1 has exactly the losses of" in refusal(run_command(*twice, "--no-plot"))
    third = run_command("s0", "s4", "s1", *seeds, "--no-plot")
    assert "--seed s1 has exactly the losses of C, so" in refusal(third)
    outside = run_command("s0", "worse", *seeds, "--no-plot")
    assert outside.exit_code == 1
    assert "loss leaves the band of 4 seeds at step 1: means over " in outside.stdout
    assert "leave out --exact" in refusal(run_command("s0", "s4", *seeds, "--exact"), UserError)
    assert "is not another seed" in refusal(run_command("s0", "s4", "--seed", "s0"))


def test_a_recorded_setting_that_differs_is_no_silent_success(
    run_command: Run, make_run: MakeRun
) -> None:
    make_run("a", make_rows(1, 50))
    make_run("b", [row | {"lr": row["lr"] / 2} for row in make_rows(1, 50)])
    refused = run_command("a", "b", "--no-plot")
    assert refused.exit_code == 1
    assert "because recorded settings differ: learning rates differ from step 1" in refused.stderr
    assert parsed(run_command("a", "b", "--no-plot", "--json"))["contrary_settings"]
    assert run_command("a", "b", "--no-plot", "--ignore", "lr").exit_code == 0
    assert run_command("a", "b", "--no-plot", "--ignore", "data").exit_code == 1


def test_the_last_line_is_the_command_that_judges_by_the_noise(
    run_command: Run, tmp_path: Path
) -> None:
    random = Random(3)
    for name, size, seed in (("a", 0.0, 1), ("b", 1.5e-3, 1), ("c", 0.0, 2)):
        batches = Random(seed)
        rows = []
        for step in range(1, 121):
            loss = (2 + 6 / step) * batches.gauss(1, 0.03) * random.gauss(1, size)
            norm = batches.gauss(1, 0.1) * random.gauss(1, 5 * size)
            rows.append({"step": step, "loss": loss, "grad_norm": norm, "lr": 1e-3})
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    a, b, c = (str(tmp_path / f"{name}.jsonl") for name in "abc")
    noisy = run_command(a, b, "--no-plot").stdout.splitlines()[-1]
    assert noisy.endswith(
        f"slurmllm compare {a} {b} --no-plot --precision bf16_mixed,bf16_mixed"
    ), noisy
    other = run_command(a, c, "--no-plot")
    assert f"slurmllm compare {a} {c} --no-plot --seed RUN" in other.stdout.splitlines()[-1]
    assert "independent scatter" in other.stdout
    assert run_command(a, b, "--no-plot", "--as", "tolerance").stdout.count("--precision") == 0


def test_a_foreign_log_by_tokens(run_command: Run, make_run: MakeRun, tmp_path: Path) -> None:
    make_run("ours", make_rows(1, 50))
    rows = [
        f"{r['step']},{r['loss']},{r['grad_norm']},{r['tokens']}" for r in make_rows(1, 50)[::2]
    ]
    theirs = tmp_path / "theirs.csv"
    theirs.write_text("\n".join(["step,my_loss,gn,seen", *rows]) + "\n")
    tags = [o for tag in ("loss=my_loss", "grad_norm=gn", "tokens=seen") for o in ("--tag", tag)]
    answer = parsed(run_command("ours", theirs, *tags, "--by", "tokens", "--json", "--no-plot"))
    assert answer["match"], answer["reason"]
    assert answer["alignment"] == {"axis": "tokens", "method": "exact", "points": 25}
    assert answer["statistics"]["loss"]["area_between"] == 0
    refusal(run_command("ours", theirs, "--tag", "nonsense"), UserError)


def test_more_sources_than_letters() -> None:
    assert _parse_shifts(["#27=3", "Z=2"], 28)[25:] == [2, 3, None]
    values = ["#28:(?P<step>1)(?P<loss>2)", "A:(?P<step>3)(?P<loss>4)"]
    patterns = [source["pattern"] for source in LogOptions(patterns=tuple(values)).arguments(28)]
    assert patterns == ["(?P<step>3)(?P<loss>4)", *[None] * 26, "(?P<step>1)(?P<loss>2)"]
    with pytest.raises(UserError, match="there is no #29; the sources are A to #28"):
        LogOptions(patterns=("#29:x",)).arguments(28)


@pytest.fixture
def full_rows() -> list[Row]:
    random = Random(3)
    values = [(random.uniform(2, 3), random.uniform(1, 2)) for _ in range(40)]
    return [make_row(step, loss=a, grad_norm=b) for step, (a, b) in enumerate(values, start=1)]


def test_exact_cannot_be_decided_by_float32_or_printed_digits(
    run_command: Run, make_run: MakeRun, full_rows: list[Row], tmp_path: Path
) -> None:
    make_run("whole", full_rows)
    deleted = make_run("deleted", full_rows)
    deleted.metrics(0).unlink()
    values = [
        event(row["step"], *(scalar(name, row[name]) for name in METRICS)) for row in full_rows
    ]
    write_events(deleted.tensorboard / "events.out.tfevents.1.host", values)
    result = run_command("whole", "deleted", "--exact", "--no-plot", "--json")
    answer = parsed(result)
    assert (result.exit_code, answer["verdict"], answer["causes"]) == (1, "match", [])
    assert answer["bit_identical_to_step"] is None
    assert "are the same at all 40 steps compared, as far as both logs show it" in answer["reason"]
    assert any("B (deleted) is read from TensorBoard" in text for text in answer["warnings"])
    text = run_command("whole", "deleted", "--exact", "--no-plot")
    assert "stores float32" in text.stdout
    assert "cause" not in text.stdout
    assert "B is match" in text.stderr
    # Without --exact nothing changes.
    assert run_command("whole", "deleted", "--no-plot").exit_code == 0
    line = "step: {step} loss: {loss:.4f} grad_norm: {grad_norm:.3f}\n"
    (tmp_path / "printed.log").write_text("".join(line.format(**row) for row in full_rows))
    answer = parsed(run_command("whole", "printed.log", "--exact", "--no-plot", "--json"))
    assert (answer["verdict"], answer["causes"]) == ("match", [])
    assert any("whose numbers are rounded" in text for text in answer["warnings"])


def test_invented_steps_are_refused_where_points_must_match(write: WriteLog) -> None:
    numbered = write("b.log", *(f"{{'loss': {loss}, 'epoch': 0.1}}" for loss in LOSSES))
    rows = (json.dumps({"step": step, "loss": loss}) for step, loss in points())
    ours = write("a.jsonl", *rows)
    run = CliRunner().invoke
    for options in STRICT:
        for order in ([ours, numbered], [numbered, ours]):
            assert f"{' '.join(options)}: the steps of b are invented" in refused(
                run(cli, ["compare", *map(str, order), "--no-plot", *options])
            )
    result = run(cli, ["compare", str(ours), str(numbered), "--no-plot"])
    assert result.exit_code == 0
    text = "if the step numbers of B, which no log shows, are right"
    assert f"identical: {text}, loss is" in result.output
    answer = parsed(run(cli, ["compare", str(ours), str(numbered), "--no-plot", "--json"]))
    assert answer["reason"].startswith(text)
    with pytest.raises(UserError, match="exact=True: the steps of b are invented"):
        compare_runs(ours, numbered, exact=True)
    assert compare_runs(ours, numbered).verdict == "identical"


@pytest.mark.parametrize(
    ("name", "head", "row", "damage", "message"),
    [
        ("b.csv", "step,loss", "{},{}", "21", "b.csv:22: skipped 2 rows with fewer"),
        ("b.csv", "step,loss", "{},{}", "21,1,2", "b.csv:22: skipped 2 rows with more"),
        ("b.csv", "step,loss", "{},{}", "21,3.x1", "b.csv:22: '3.x1' in column 'loss' is not"),
        ("b.csv", "step,loss", "{},{}", "2x1,3.1", "b.csv:22: '2x1' in column 'step' is not"),
        ("b.csv", "step,loss", "{},{}", "-21,3.1", "skipped 2 of 41 rows: step is -21"),
        ("b.jsonl", "", '{{"step": {}, "loss": {}}}', '{"step": 21', "b.jsonl:22: not a JSON"),
        ("b.log", "", "upd {} nll={}", "upd 21 nll=3.x1", "b.log:22: '3.x1' in column 'loss' is"),
    ],
)
def test_lost_rows_are_refused_where_points_must_match(
    name: str, head: str, row: str, damage: str, message: str, write: WriteLog
) -> None:
    ours = write("a.csv", "step,loss", *(f"{step},{loss}" for step, loss in points()))
    rows = [row.format(*point) for point in points()]
    damaged = write(name, head, *rows[:20], damage, damage, *rows[21:])
    pattern = ["--pattern", r"B:upd (?P<step>\d+) nll=(?P<loss>\S+)"] if ".log" in name else []
    arguments = ["compare", str(ours), str(damaged), "--no-plot", *pattern]
    for options in STRICT:
        result = call(*arguments, *options)
        assert result.exit_code == 2
        assert f"{' '.join(options)}: not all of b can be read: " in result.output
        assert message in result.output
        assert "(lines 22, 23); restore the file, or leave out --" in result.output
    result = call(*arguments)
    assert (result.exit_code, message in result.output) == (0, True)


def test_a_cut_last_row_or_damage_elsewhere_is_not_refused(write: WriteLog) -> None:
    ours = write("a.csv", "step,loss", *(f"{step},{loss}" for step, loss in points()))
    rows = [f"{step},{loss},{note}" for (step, loss), note in zip(points(), "1?" * 20, strict=True)]
    cut = write("b.csv", "step,loss,note", *rows, "41")
    result = call("compare", ours, cut, "--no-plot", "--exact")
    assert result.exit_code == 0, result.output
    assert "b.csv:42: skipped the truncated last line" in result.output
    with pytest.raises(RunError, match="exact=True: not all of c can be read"):
        compare_runs(ours, write("c.csv", "step,loss", "1,3.0", "x,2.9", "3,2.8"), exact=True)
