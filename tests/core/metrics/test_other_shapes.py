"""Logs in other people's shapes: steps on the line, splits, prefixes, headers, commas."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from slurmllm.cli.main import cli
from slurmllm.core.errors import RunError
from slurmllm.core.metrics.curves import Curve
from slurmllm.core.metrics.log_series import parse_number
from slurmllm.core.metrics.source import read_curve
from slurmllm.core.metrics.text_logs import split_prefix

STEPS = range(1, 41)
LOSSES = [round(3 + 7 / (step + 2), 4) for step in STEPS]
WriteLog = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteLog:
    def write_log(name: str, *lines: str) -> Path:
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return path

    return write_log


def check(curve: Curve, steps: Sequence[int] = STEPS, losses: Sequence[float] = LOSSES) -> Curve:
    assert curve.steps.tolist() == list(steps)
    assert curve.columns["loss"].tolist() == list(losses)
    return curve


def points() -> list[tuple[int, float]]:
    return list(zip(STEPS, LOSSES, strict=True))


@pytest.mark.parametrize(
    "line",
    [
        "{{'loss': '{loss}', 'lr': '3e-4', 'global_step/max_steps': '{step}/400'}}",
        "{{'loss': {loss}, 'step': '{step}/400'}}",
        "2026-01-01 10:00:00 INFO Step {step}/400: {{'loss': {loss}, 'epoch': 0.1}}",
        "[{step}/400] {{'loss': {loss}}}",
        "{{'loss': {loss}, 'epoch': 0.1}} iteration: {step}",
        "epoch [1/3] global_step={step} {{'loss': {loss}}}",
    ],
)
def test_the_step_of_a_row_stands_on_its_line(line: str, write: WriteLog) -> None:
    lines = [line.format(step=10 * step, loss=loss) for step, loss in points()]
    curve = check(read_curve(write("x.log", *lines)), range(10, 401, 10))
    assert (curve.invented_steps, curve.warnings) == ("", ())


def test_remedies_of_unclear_rows_and_marks_are_options_of_each_command(write: WriteLog) -> None:
    names = ("other", "train")
    rows = (
        json.dumps({"step": step, "corpus": name, "loss": loss + (name == "other")})
        for step, loss in points()
        for name in names
    )
    mixed, ours = write("b.jsonl", *rows), write("a.csv", "step,loss", "1,3.5", "2,3.25")
    for command in (["report", "--no-files"], ["spikes", "--no-plot", "--window", "1"]):
        fix = "--where corpus=other"
        result = CliRunner().invoke(cli, [*command, str(mixed)])
        assert (result.exit_code, fix in result.output) == (2, True)
        assert CliRunner().invoke(cli, [*command, str(mixed), *fix.split()]).exit_code == 0
    both = ["compare", str(ours), str(mixed), "--no-plot", "--where"]
    result = CliRunner().invoke(cli, [*both, "corpus=train"])
    assert "a.csv has no column 'corpus'" in result.output
    assert "--where B:corpus=train" in result.output
    assert CliRunner().invoke(cli, [*both, "B:corpus=train"]).exit_code == 1  # other losses


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "log"])
def test_a_git_lfs_pointer_in_place_of_a_log(ending: str, write: WriteLog) -> None:
    path = write(f"x.{ending}", "version https://git-lfs.github.com/spec/v1", "oid sha256:a")
    with pytest.raises(RunError, match="a Git LFS pointer, not the file"):
        read_curve(path)


@pytest.mark.parametrize(
    ("line", "metric"),
    [
        ("step {step} | loss: {loss} | lr: 7.50e-05", "lr"),
        ("step {step} | avg_loss: 9.1 | loss: {loss} | grad_norm: 0.3", "grad_norm"),
        ("step {step}: val_loss 3.2, train_loss {loss}", "val_loss"),
        ("Step: {step}\tLoss: {loss}\tLR: 1e-5", "lr"),
        ("step:{step}/500 [WARM 3%] train_loss:{loss} step_avg:1.1ms", "loss"),
        ("iter 9 step {step}: loss {loss}, iter time: 6.00ms (optimizer.step) left", "loss"),
    ],
)
def test_lines_of_plain_scripts(line: str, metric: str, write: WriteLog) -> None:
    """A head that other frameworks have too leaves the line to whom finds its values."""
    lines = [line.format(step=step, loss=loss) for step, loss in points()]
    curve = check(read_curve(write("x.log", *lines)))
    assert np.isfinite(curve.columns[metric]).all()


def test_steps_in_thousands_are_not_taken_for_units(write: WriteLog) -> None:
    lines = [f"Step {step}k | loss {loss}" for step, loss in points()]
    with pytest.raises(RunError, match="no line is of a known format"):
        read_curve(write("x.log", *lines))


@pytest.mark.parametrize("tag", ["train_loss_step", "train/loss_step", "loss_step"])
def test_a_bar_of_lightning_with_the_suffix_of_steps(tag: str, write: WriteLog) -> None:
    bar = "Epoch 0: 5%|#  | {}/40 [00:10<00:10, 5.00it/s, v_num=0, {}={}]"
    check(read_curve(write("x.log", *(bar.format(step, tag, loss) for step, loss in points()))))


def test_lines_with_bars_and_losses_of_other_data(write: WriteLog) -> None:
    lines = [f"step {step} | loss {loss}" for step, loss in points()]
    for name in ("eval", "heldout", "held-out"):
        check(read_curve(write("x.log", *lines, f"step 40 | {name} loss 9.5")))


@pytest.mark.parametrize(
    ("name", "train", "evaluation"),
    [
        ("x.jsonl", '{{"step": {step}, "split": "train", "loss": {loss}}}', '"split": "val"'),
        ("x.jsonl", '{{"step": {step}, "loss": {loss}}}', '"phase": "validation"'),
        ("x.jsonl", '{{"step": {step}, "loss": {loss}, "training": true}}', '"training": false'),
        ("x.json", '{{"iter": {step}, "mode": "train", "loss": {loss}}}', '"mode": "eval"'),
    ],
)
def test_rows_of_splits(name: str, train: str, evaluation: str, write: WriteLog) -> None:
    lines = []
    key = "iter" if "iter" in train else "step"
    for step, loss in points():
        lines.append(train.format(step=step, loss=loss))
        if step % 10 == 0:
            lines.append(f'{{"{key}": {step}, {evaluation}, "loss": 9.5}}')
    path = write(name, *lines) if name == "x.jsonl" else write(name, f"[{','.join(lines)}]")
    column, _, value = evaluation.replace('"', "").partition(": ")
    with pytest.raises(RunError, match=rf"column '{column}' separates .*; name one, .*--where"):
        read_curve(path)
    of_training = {"split": "train", "mode": "train", "training": "true"}.get(column, "")
    curve = check(read_curve(path, where={column: of_training}))
    assert (curve.overlap_rows, curve.restarts.tolist()) == (0, [])
    chosen = read_curve(path, where={column: value})
    assert chosen.columns["loss"].tolist() == [9.5] * 4
    for where, message in (({"spilt": "val"}, "no column 'spilt'"), ({column: "x"}, "no row with")):
        with pytest.raises(RunError, match=message):
            read_curve(path, where=where)


def test_a_table_of_splits_and_of_data_sets(write: WriteLog) -> None:
    lines = [f"{step},{loss + is_val},{is_val}" for step, loss in points() for is_val in (0, 1)]
    path = write("x.csv", "step,loss,is_val", *lines)
    with pytest.raises(RunError, match=r"column 'is_val' separates \(0 40, 1 40\)"):
        read_curve(path)
    check(read_curve(path, where={"is_val": "0"}))
    lines = [f"{step};{text};{loss}" for text in ("c4", "wiki") for step, loss in points()]
    path = write("y.csv", "step;set;loss", *lines)
    assert read_curve(path).warnings == ()  # the same values
    path = write("y.csv", "step;set;loss", *(line.replace(";wiki;3", ";wiki;4") for line in lines))
    with pytest.raises(RunError, match=r"column 'set' separates \(c4 40, wiki 40\).*--where set="):
        read_curve(path)
    check(read_curve(path, where={"set": "c4"}))


def test_a_column_of_numbers_is_no_split(write: WriteLog) -> None:
    times = [0.97 + 0.01 * (step % 5) for step in STEPS]  # seconds, some of them 1.0
    rows = zip(points(), times, strict=True)
    lines = [f"{step},{loss},{time_s:.2f}" for (step, loss), time_s in rows]
    assert check(read_curve(write("x.csv", "step,loss,train_time", *lines))).warnings == ()


def test_of_many_ranks_the_lowest_is_read(write: WriteLog) -> None:
    lines = [
        f"{rank}: step {step} | loss {loss + rank / 8:.4f}"
        for step, loss in points()
        for rank in range(210)
    ]
    check(read_curve(write("x.log", *lines)))


def test_files_of_steps_are_read_by_their_number(write: WriteLog, tmp_path: Path) -> None:
    for step, loss in points():
        write(f"metrics_step{step}.json", json.dumps({"train/CE loss": loss}))
    assert check(read_curve(tmp_path)).restarts.tolist() == []


@pytest.mark.parametrize(
    ("name", "text"),
    [("x.json", '{"lm loss": {"values": 5}}'), ("run-x-tag-loss.csv", "step,val\n1,2\n")],
)
def test_what_only_looks_like_a_log_is_refused(name: str, text: str, write: WriteLog) -> None:
    with pytest.raises(RunError):
        read_curve(write(name, text))


@pytest.mark.parametrize("column", ["host", "eta"])
def test_a_column_that_changes_at_a_restart_or_with_the_time(column: str, write: WriteLog) -> None:
    rows = [*points()[:25], *((step, loss + 1e-5) for step, loss in points()[19:])]
    texts = {
        "host": ["n1"] * 25 + ["n2"] * 21,
        "eta": [f"{left // 4} h" for left in range(46, 0, -1)],
    }
    lines = (
        json.dumps({"step": step, column: text, "loss": loss})
        for (step, loss), text in zip(rows, texts[column], strict=True)
    )
    curve = read_curve(write("x.jsonl", *lines))
    assert (curve.restarts.tolist(), curve.overlap_rows) == ([20], 6)


BAR = "Epoch {epoch}:  10%|#  | {count}/10 [00:10<00:10,  5.00it/s{more}, train_loss={loss}]"


@pytest.mark.parametrize(
    ("bar", "first"),
    [
        (BAR, 0),
        (BAR, 1),
        (BAR.replace("{epoch}", "{epoch}/5"), 1),
        (BAR.replace("/10 [", "/? [").replace(" 10%|#  |", "|"), 0),
    ],
)
def test_bars_that_begin_anew_each_epoch(bar: str, first: int, write: WriteLog) -> None:
    lines = []
    for step, loss in points():
        epoch, count = divmod(step - 1, 10)
        lines.append(bar.format(epoch=epoch + first, count=count + 1, more="", loss=loss))
    if "?" not in bar:
        check(read_curve(write("x.log", "\r".join(lines))))
    resumed = [line.replace("it/s,", "it/s, v_num=0,") for line in lines[20:]]
    if first == 0 and "?" not in bar:
        check(read_curve(write("y.log", *resumed)), STEPS[20:], LOSSES[20:])


@pytest.mark.parametrize("counter", ["", "tokens", "consumed_samples", "epoch"])
@pytest.mark.parametrize("suffix", [".log", ".csv", ".jsonl"])
def test_counters_that_restart_are_counted_on(suffix: str, counter: str, write: WriteLog) -> None:
    rows = [(step if step <= 20 else step - 20, step, loss) for step, loss in points()]
    match suffix:
        case ".log":
            lines = [f"{{'step': {s}, 'loss': {x}, '{counter}': {64 * t}}}" for s, t, x in rows]
            if not counter:
                lines = [f"iter {s}: loss {x}, time 1ms" for s, _, x in rows]
        case ".csv":
            lines = [f"step,loss,{counter}", *(f"{s},{x},{64 * t}" for s, t, x in rows)]
            lines = lines if counter else [line.rpartition(",")[0] for line in lines]
        case _:
            lines = [json.dumps({"step": s, "loss": x, counter: 64 * t}) for s, t, x in rows]
    curve = check(read_curve(write(f"x{suffix}", *lines)))
    exact = counter in ("tokens", "consumed_samples")
    assert bool(curve.invented_steps) is not exact
    assert "steps begin again at 1" in curve.warnings[0]
    assert (curve.overlap_rows, "two runs" in str(curve.warnings)) == (0, False)


def test_two_runs_in_one_log_are_not_counted_on(write: WriteLog) -> None:
    lines = [f"iter {step}: loss {loss * factor}" for factor in (1, 1.1) for step, loss in points()]
    curve = read_curve(write("x.log", *lines))
    assert curve.steps.tolist() == list(STEPS)
    assert "as if the log held two runs" in curve.warnings[0]
    assert (curve.overlap_rows, curve.invented_steps) == (0, "")


def test_a_header_within_a_table(write: WriteLog) -> None:
    first = [f"{step},{loss},0.5" for step, loss in points()[:20]]
    for header, cells in (
        ("step,grad_norm,loss", "{step},0.5,{loss}"),
        ("step, loss", "{step},{loss}"),
        ("wall,step,loss,grad_norm,lr", "9,{step},{loss},0.5,1e-4"),
    ):
        second = [cells.format(step=step, loss=loss) for step, loss in points()[20:]]
        path = write("x.csv", "step,loss,grad_norm", *first, header, *second)
        assert check(read_curve(path)).warnings == ()


@pytest.mark.parametrize("number", ["2,35", "2,345"])
def test_decimal_commas_are_refused(number: str, write: WriteLog) -> None:
    for name, lines in (
        ("x.csv", ["step;loss", f"1;{number}", "2;2"]),
        ("x.jsonl", [json.dumps({"step": 1, "loss": number})]),
        ("x.log", [f"iter 1: loss {number}, time 1ms", "iter 2: loss 2, time 1ms"]),
    ):
        with pytest.raises(RunError, match="'loss' has a decimal comma; write decimal points"):
            read_curve(write(name, *lines))


def test_commas_between_thousands(write: WriteLog) -> None:
    rows = [f'"{step},000","1,234,567.5","{step},500"' for step in (1, 2, 10)]
    curve = read_curve(write("y.csv", "step,loss,tokens", *rows))
    assert curve.steps.tolist() == [1000, 2000, 10000]
    assert curve.columns["loss"].tolist() == [1234567.5] * 3
    assert curve.columns["tokens"].tolist() == [1500, 2500, 10500]


PREFIXES = {
    "{rank}: ": "{rank}",
    " {rank}: ": "{rank}",
    "[default{rank}]:": "{rank}",
    "[rank{rank}]: ": "{rank}",
    "[Rank {rank}] ": "{rank}",
    "[1,{rank}]<stdout>:": "{rank}",
    "(RayTrainWorker pid=10{rank}, ip=10.0.0.1) ": "10{rank}",
    "node{rank}.cluster: ": "node{rank}.cluster",
    "0: [default{rank}]:": None,
    "2026-11-27T12:00:00.123456789Z ": "",
    "2026-11-27T12:00:00.1Z stdout F ": "",
}
BODIES = {
    "trainer": "{{'loss': {loss}, 'step': {step}, 'epoch': 0.1}}",
    "olmo": "2025-02-01 12:00:00.000\tn0:0\tolmo_core.train:105\tINFO\t[step={step}/99,epoch=1]"
    "\n    train/CE loss={loss}\n    optim/total grad norm=1.5",
    "titan": "[titan] 2026-01-01 12:00:00,123 - root - INFO - step:  {step}  loss:  {loss}  tps: 9",
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("body", BODIES)
def test_lines_behind_prefixes(prefix: str, body: str, write: WriteLog) -> None:
    def lines(step: int, loss: float, rank: int) -> list[str]:
        text = BODIES[body].format(step=step, loss=loss)
        return [prefix.format(rank=rank) + line for line in text.split("\n")]

    path = write("x.log", *(line for step, loss in points() for line in lines(step, loss, 0)))
    check(read_curve(path))
    name = PREFIXES[prefix]
    assert name is None or split_prefix(prefix.format(rank=0))[0] == name.format(rank=0)
    if not name:
        return
    both = []
    for step, loss in points():  # the lines of two ranks alternate
        pairs = zip(lines(step, loss, 0), lines(step, loss + 0.5, 1), strict=True)
        both += [line for pair in pairs for line in pair]
    path = write("y.log", *both)
    curve = check(read_curve(path))
    assert "several write the same steps, by 'rank'" in curve.warnings[0]
    second = read_curve(path, where={"rank": name.format(rank=1)})
    np.testing.assert_allclose(second.columns["loss"], np.array(LOSSES) + 0.5)


def test_what_is_no_prefix(write: WriteLog) -> None:
    time = "2026-01-01 10:00:00"
    for prefix in (f"{time} ", f"[{time},123] ", f"{time},1 - "):
        lines = [f"{prefix}iter {step}: loss {loss}, time 1ms" for step, loss in points()]
        curve = check(read_curve(write("x.log", *lines)))
        assert curve.columns["time"][0] > 1.7e9
    assert split_prefix("2026-01-01 10:00:00 INFO loss: 2.5") == ("", "INFO loss: 2.5")
    assert split_prefix("step1: 2.5") == ("", "step1: 2.5")


def test_ranks_whose_counter_begins_again_each_epoch(write: WriteLog) -> None:
    lines = [
        f"Epoch: {(step - 1) // 10}, Step: {(step - 1) % 10}, Rank: {rank}, loss = {loss + rank}"
        for step, loss in points()
        for rank in (1, 0)
    ]
    curve = check(read_curve(write("x.log", *lines)), range(40))
    assert "Epoch goes on" in curve.invented_steps


def test_test_sets_and_golden_values_of_megatron(write: WriteLog) -> None:
    line = " iteration {0:8d}/ 40 | elapsed time per iteration (ms): 5.0 | lm loss: {1:E} |"
    rows = [line.format(step, loss) for step, loss in points()]
    rows += [
        " validation loss at iteration 40 on validation set | lm loss value: 3.5E+00 | lm loss PPL",
        " validation loss at iteration 40 on test set | lm loss value: 9.9E+00 | lm loss PPL: 9 |",
    ]
    curve = read_curve(write("x.log", *rows))
    assert curve.series("val_loss")[1].tolist() == [3.5]
    values = {str(step): loss for step, loss in points()}
    new = {"lm loss": {"start_step": 1, "end_step": 40, "step_interval": 1, "values": values}}
    check(read_curve(write("a.json", json.dumps(new))))
    old = {"lm loss": {"start_step": 5, "step_interval": 5, "values": LOSSES}}
    check(read_curve(write("b.json", json.dumps(old))), range(5, 201, 5))


def test_rows_of_json_tensors_and_scalars_of_numpy(write: WriteLog) -> None:
    rows = [{"step": step, "loss": loss, "grad_norm": None} for step, loss in points()]
    quoted = [{"step": f"{s}", "loss": f"{x}"} for s, x in points()]
    for name, text in (
        ("a.jsonl", json.dumps(rows)),
        ("b.jsonl", json.dumps(rows, indent=2)),
        ("c.json", json.dumps(rows)),
        ("d.jsonl", "\n".join(map(json.dumps, rows))),
        ("e.jsonl", "\n".join(map(json.dumps, quoted))),
    ):
        assert "grad_norm" not in check(read_curve(write(name, text))).columns, "null is absent"
    for text in (
        "{{'loss': tensor({loss}, device='cuda:0'), 'grad_norm': np.float64(0.5), 'step': {step}}}",
        "{{'loss': tensor({loss},\n  device='cuda:0', grad_fn=<NllLossBackward0>),\n"
        " 'grad_norm': np.float32(0.5), 'step': {step}}}",
        "{{'loss': tensor([{loss}]), 'grad_norm': array(0.5), 'step': {step}}}",
    ):
        lines = [text.format(step=step, loss=loss) for step, loss in points()]
        curve = check(read_curve(write("x.log", *lines)))
        assert curve.columns["grad_norm"].tolist() == [0.5] * 40


def test_a_log_with_a_validation_loss_only(write: WriteLog) -> None:
    lines = [f"step:{step}/40 val_loss:{loss} train_time:1ms" for step, loss in points()]
    path = write("x.log", *lines)
    with pytest.raises(RunError, match=r"only that of a validation.*--tag loss=val_loss"):
        read_curve(path)
    check(read_curve(path, {"loss": "val_loss"}))


def test_numbers() -> None:
    for text, number in (
        ("1.2K", 1200.0),
        ("1,234.5", 1234.5),
        (".5", 0.5),
        ("np.float64(1.5)", 1.5),
        ("tensor([2.5], device='cuda:0')", 2.5),
        ("NaN,", np.nan),
    ):
        np.testing.assert_equal(parse_number(text), number)
    for text in ("1,2,3", "2,5", "", "K", "12,34.5", "x", "1" * 41, "tensor(x)", "1.2.3"):
        assert parse_number(text) is None
