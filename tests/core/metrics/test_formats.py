"""Every format of formats.yaml, by an example of each.

The files in formats/ were written by the frameworks' own code (transformers 5.23, lightning 2.6,
torchtune 0.6); lines here follow the print statement that the format's `source` names.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurmllm.core.errors import RunError, UserError
from slurmllm.core.metrics.curves import Curve
from slurmllm.core.metrics.source import locate, read_curve
from slurmllm.core.metrics.tags import log_formats
from slurmllm.core.metrics.text_logs import TextReader, check_pattern

FOLDER = Path(__file__).parent / "formats"
ROOT = Path("no runs")
# Line(s) of one step of each format, the first step, and values of the first row
LINES = [json.loads(row) for row in (FOLDER / "lines.jsonl").read_text().splitlines()]
LOSSES = [3.0, 2.913, 2.8259999999999996, 2.7, 2.613, 2.526]  # of the files of one example


def first_row(curve: Curve) -> dict[str, float]:
    return {key: float(values[0]) for key, values in curve.columns.items()}


@pytest.mark.parametrize("example", LINES, ids=[example["format"] for example in LINES])
def test_a_frameworks_lines(example: dict[str, Any], tmp_path: Path) -> None:
    first = example["first"]
    path = tmp_path / "slurm-1.out"
    steps = range(first, first + 4)
    path.write_text(
        "loading\n" + "".join(f"{example['text'].format(step=step)}\n\n" for step in steps)
    )
    curve = read_curve(path)
    assert curve.steps.tolist() == list(steps)
    assert example["values"].items() <= first_row(curve).items()
    assert (curve.convention.name, curve.convention.steps_from) == (example["format"], first)
    assert not curve.invented_steps
    assert all("is the value of one device" in warning for warning in curve.warnings)


def test_every_format_has_an_example_and_is_documented() -> None:
    elsewhere = {"Hugging Face Trainer", "torchtune"}  # the files below
    text = {name for name, log_format in log_formats().items() if log_format.lines}
    assert text - elsewhere <= {example["format"] for example in LINES}
    docs = (Path(__file__).parents[3] / "docs" / "compare.md").read_text()
    assert f"Known are {', '.join(log_formats())}." in docs


def test_the_hugging_face_trainers_output_equals_its_trainer_state() -> None:
    state = json.loads((FOLDER / "trainer_state.json").read_text())["log_history"]
    text, document = (
        read_curve(FOLDER / name) for name in ("hugging_face.log", "trainer_state.json")
    )
    rows = [row for row in state if "loss" in row]
    for curve in (text, document):
        assert curve.steps.tolist() == [row["step"] for row in rows]
        assert curve.convention.loss_is_mean
    np.testing.assert_array_equal(document.columns["loss"], [row["loss"] for row in rows])
    for metric, key in (("loss", "loss"), ("grad_norm", "grad_norm"), ("lr", "learning_rate")):
        printed = [float(f"{row[key]:.4g}") for row in rows]
        np.testing.assert_array_equal(text.columns[metric], printed)
    assert text.series("val_loss")[0].tolist() == [20, 40]


@pytest.mark.parametrize(
    ("name", "steps", "convention"),
    [
        ("litgpt.csv", range(6), ("litgpt", 0, "micro-iterations")),
        ("metrics.csv", range(9, 60, 10), ("Lightning", 0, "steps")),
        ("torchtune.txt", range(1, 7), ("torchtune", 1, "steps")),
    ],
)
def test_loggers(name: str, steps: range, convention: tuple[str, int, str], tmp_path: Path) -> None:
    path = tmp_path / name
    shutil.copy(FOLDER / name.replace("metrics.csv", "lightning.csv"), path)
    curve = read_curve(locate(str(tmp_path if name.startswith("metr") else path), ROOT))
    assert curve.steps.tolist() == list(steps)
    assert curve.series("loss")[1].tolist() == LOSSES
    read = curve.convention
    assert (read.name, read.steps_from, read.counts) == convention


def test_a_block_goes_on_after_an_indented_line_without_a_number(tmp_path: Path) -> None:
    path = tmp_path / "slurm-1.out"
    lines = ("[batch={0}/9]:", "\tTrain time/batch: {0}", "\tTrain note: -")
    block = "\n".join((*lines, "\tTrain loss/train/total: 3.5\n"))
    path.write_text("".join(block.format(step) for step in range(1, 5)))
    assert read_curve(path).columns["loss"].tolist() == [3.5] * 4


def test_removed_formats_name_what_to_use(tmp_path: Path) -> None:
    (tmp_path / "offline-run-1").mkdir()
    (tmp_path / "offline-run-1" / "run-1.wandb").write_bytes(b":W&B")
    (tmp_path / "mlruns" / "metrics").mkdir(parents=True)
    (tmp_path / "mlruns" / "meta.yaml").touch()
    for name, way in (
        ("offline-run-1/run-1.wandb", "scan_history"),
        ("offline-run-1", "scan_history"),
        ("mlruns", "get_metric_history"),
    ):
        for read in (lambda path: locate(str(path), ROOT), read_curve):
            with pytest.raises(RunError, match=f"no longer reads .*; export .* to CSV: .*{way}"):
                read(tmp_path / name)


def test_tensorboards_tables_of_one_tag(tmp_path: Path) -> None:
    for tag, value in (("train_loss", 3.5), ("train_grad_norm", 0.5)):
        path = tmp_path / f"run-a-tag-{tag}.csv"
        path.write_text(f"Wall time,Step,Value\n1700000000.5,1,{value}\n1700000001.5,2,{value}\n")
    for source in (tmp_path, tmp_path / "run-a-tag-train_loss.csv"):
        curve = read_curve(locate(str(source), ROOT))
        assert curve.steps.tolist() == [1, 2]
        assert curve.columns["loss"].tolist() == [3.5, 3.5]
        assert curve.columns["time"][0] == 1700000000.5
        assert ("grad_norm" in curve.columns) == (source is tmp_path)
    path = path.rename(tmp_path / "any.csv")
    assert read_curve(path, {"loss": "Value"}).columns["loss"].tolist() == [0.5, 0.5]
    with pytest.raises(RunError, match="--tag loss=TAG"):
        read_curve(path)


def test_olmos_files_of_one_step(tmp_path: Path) -> None:
    for step in (10, 20):
        text = json.dumps({"train/CE loss": 3.0 + step, "optim/total grad norm": 1.5})
        (tmp_path / f"metrics_step{step}.json").write_text(text)
    curve = read_curve(locate(str(tmp_path), ROOT))
    assert curve.steps.tolist() == [10, 20]
    assert curve.columns["loss"].tolist() == [13.0, 23.0]
    assert curve.convention.name == "OLMo-core"


@pytest.mark.parametrize(
    ("key", "row", "name"),
    [
        ("global_step", {"loss/out": 2.5, "optim/grad_norm": 1.0, "optim/lr": 1e-4}, "lingua"),
        ("current_steps", {"total_steps": 9, "loss": 2.5, "percentage": 0.5}, "LLaMA-Factory"),
        ("step", {"learning/loss": 2.5, "learning/grad_norm": 1.0}, "MaxText"),
    ],
)
def test_json_lines(key: str, row: dict[str, float], name: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({key: step, **row}) + "\n" for step in (1, 2)))
    curve = read_curve(path)
    assert curve.columns["loss"].tolist() == [2.5, 2.5]
    assert curve.convention.name == name


def test_steps_of_deepspeeds_engine_give_way_to_a_scripts_losses(tmp_path: Path) -> None:
    line = "[2026-11-29 22:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step={}, skipped=0, "
    line += "lr=[1e-05, 1e-05], mom=[[0.9, 0.95]]\n"
    reader = TextReader(log_format=log_formats()["DeepSpeed"])
    reader.feed("".join(line.format(step) for step in (10, 20)).encode())
    reader.flush(last=True)
    assert [(row["step"], row["lr"]) for row in reader.take()] == [(10, 1e-5), (20, 1e-5)]
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {step} loss 2.5\n{line.format(step)}" for step in (10, 20)))
    assert read_curve(path).columns["loss"].tolist() == [2.5, 2.5]


def test_a_pattern_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "train.any"
    path.write_text("t=1 L 3.5 g 0.5\nt=2 L 2.5 g nan\nt=x L 2\nother\n")
    curve = read_curve(path, pattern=r"t=(?P<step>\S+) L (?P<loss>\S+)(?: g (?P<grad_norm>\S+))?")
    assert curve.steps.tolist() == [1, 2]
    assert curve.columns["loss"].tolist() == [3.5, 2.5]
    assert f"{path}:3: 'x' in column 'step' is not a number" in str(curve.warnings)
    np.testing.assert_array_equal(curve.columns["grad_norm"], [0.5, np.nan])
    for pattern in (r"z(?P<step>\d)(?P<loss>\d)", r"(?P<step>t)=\d L (?P<loss>\d)"):
        with pytest.raises(RunError, match=r"no line of .*train\.any matches --pattern"):
            read_curve(path, pattern=pattern)
    for wrong, message in (
        ("(?P<step>", "is not a regular expression"),
        (r"(?P<loss>\d)", r"has no group \(\?P<step>"),
        (r"(?P<step>\d)", r"has no group \(\?P<loss>"),
        (r"(?P<step>\d)(?P<los>\d)", "no metric 'los'; one of step, loss"),
    ):
        with pytest.raises(UserError, match=message):
            check_pattern(wrong)


def test_byte_order_marks(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes("step;loss;lr\n1;3.25;1e-4\n2;2.5;inf\n".encode("utf-8-sig"))
    curve = read_curve(path)
    assert curve.columns["loss"].tolist() == [3.25, 2.5]
    assert curve.columns["lr"].tolist() == [1e-4, np.inf]
    rows = tmp_path / "x.jsonl"
    rows.write_bytes('{"epoch": 0, "step": 1, "loss": 2.5}\n'.encode("utf-8-sig"))
    assert read_curve(rows).columns["loss"].tolist() == [2.5]
    text = tmp_path / "x.log"
    text.write_bytes("iter 1: loss 2.5\n".encode("utf-16"))
    with pytest.raises(RunError, match=r"is UTF-16 text.*iconv -f UTF-16"):
        read_curve(text)


def test_a_log_of_two_runs_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    runs = [[f"iter {step}: loss {scale / (step + 1)}" for step in range(50)] for scale in (3, 4)]
    path.write_text("\n".join(runs[0] + runs[1]))
    (warning,) = read_curve(path).warnings
    assert f"{path}:51: 50 steps of 50 occur a second time with other values, as if" in warning
    path.write_text("\n".join(runs[0] + runs[0]))  # a training that was started again
    assert read_curve(path).warnings == ()
    rows = [f"iter {step}: loss {loss}" for step, loss in ((1, 3.0), (2, 2.0), (2, 1.0))]
    path.write_bytes(f"\n\r 10%\r\n{rows[0]}\r\n\n{rows[1]}\n{rows[2]}".encode())
    assert read_curve(path).warnings[0].startswith(f"{path}:6: steps are not in order")


@pytest.mark.parametrize("suffix", [".log", ".csv", ".jsonl", ".json"])
def test_steps_out_of_order_are_reported_once(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"

    def warnings(*rows: tuple[int, float]) -> tuple[str, ...]:
        match suffix:
            case ".log":
                lines = ["start", *(f"iter {step}: loss {loss}" for step, loss in rows)]
            case ".csv":
                lines = ["step,loss", *(f"{step},{loss}" for step, loss in rows)]
            case _:
                lines = [json.dumps({"iteration": step, "loss": loss}) for step, loss in rows]
        path.write_text("\n".join([*lines, ""]) if suffix != ".json" else f"[{','.join(lines)}]")
        return read_curve(path).warnings

    head = 1 + (suffix in (".log", ".csv"))
    (repeated,) = warnings((1, 3.0), (2, 2.9), (2, 2.8), (3, 2.7), (3, 2.6))
    place = path if suffix == ".json" else f"{path}:{head + 2}"
    assert repeated.startswith(f"{place}: steps are not in order: 0 decrease and 2 occur again")
    assert read_curve(path).columns["loss"].tolist() == [3.0, 2.8, 2.6]
    (decreasing,) = warnings((5, 3.0), (4, 2.9), (3, 2.8), (2, 2.7), (1, 2.6))
    place = path if suffix == ".json" else f"{path}:{head + 1}"
    assert decreasing.startswith(f"{place}: steps are not in order: 4 decrease and 0 occur again")
    assert read_curve(path).steps.tolist() == [1, 2, 3, 4, 5]
    assert warnings((1, 3.0), (2, 2.9), (2, 2.9), (3, 2.7)) == ()  # drawn again


@pytest.mark.parametrize(
    "lines",
    [
        ["step {} loss {}"],
        ["step: {} | loss: {}"],
        ["Step {}/100, Loss = {}, lr = 1e-3"],
        ["epoch 1 step {} loss {}"],
        ["[rank0]: 2026-01-02 10:00:00 INFO iter {:05d}: train_loss={}, val_loss=9.0"],
        ["step {} loss {}", "validation: step {} loss 99 ({})", "step 1.5 s loss 9 ({}, {})"],
    ],
)
def test_lines_of_plain_scripts(tmp_path: Path, lines: list[str]) -> None:
    log = tmp_path / "out.log"
    rows = enumerate(LOSSES, 7)
    log.write_text("\n".join(line.format(step, loss) for step, loss in rows for line in lines))
    curve = read_curve(log)
    assert curve.steps.tolist() == [7, 8, 9, 10, 11, 12]
    assert curve.columns["loss"].tolist() == LOSSES


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ("step {0}: val_loss 9.0, train_loss {1}", {"val_loss": 9}),
        ("[step {0}] validation loss: 9.0 - training loss: {1}", {"val_loss": 9}),
        ("step: {0}, valid ppl: 99, valid loss: 9, loss: {1}", {"val_loss": 9}),
        ("{0}/20000 train_loss: {1} val_loss: 9", {"val_loss": 9}),
        ("step {0} loss {1}\n[eval] step {0}: loss = 9", {"val_loss": 9}),
        ("Step: {0}\tLoss: {1}\tLR: 1e-5", {"lr": 1e-5}),
        ("step {0}: loss {1} (lr 1e-5) (grad norm 0.5)", {"lr": 1e-5, "grad_norm": 0.5}),
        ("loss = {1}, lr = 1e-5, step = {0}", {"lr": 1e-5}),
        ("iter 9 step {0}: loss {1}, iter time: 600.00ms", {}),
        ("iteration: 9, optimizer step: {0}, loss: {1}", {}),
        ("micro_step 9 global_step {0} loss {1}", {}),
        ("step 9 (update {0}) loss {1}", {}),
        ("max_steps 100 | step {0} | loss {1}", {}),
        ("iter {0} | loss {1} | ms/step 300", {}),
        ("INFO:x:Epoch 0 | Step {0}/6501 | Loss: {1}", {}),
    ],
)
def test_the_step_is_the_optimizers_and_no_value_is_dropped(
    line: str, others: dict[str, float], tmp_path: Path
) -> None:
    log = tmp_path / "out.log"
    log.write_text("".join(f"{line.format(*row)}\n" for row in enumerate(LOSSES, 7)))
    curve = read_curve(log)
    assert (curve.steps.tolist(), curve.columns["loss"].tolist()) == ([*range(7, 13)], LOSSES)
    assert others.items() <= first_row(curve).items()


def test_the_means_of_nanogpt_are_no_losses_of_a_step(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    means = "step {0}: train loss 4.0000, val loss 4.5000\n"
    lines = [f"{means if step % 4 == 0 else ''}iter {{0}}: loss 3.5, time 2ms" for step in range(9)]
    log.write_text("\n".join(line.format(step) for step, line in enumerate(lines)))
    curve = read_curve(log)
    assert (set(curve.columns["loss"]), curve.warnings) == ({3.5}, ())
    assert curve.series("val_loss")[0].tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("Epoch [{epoch}/3], Step [{of_epoch}/4], Loss: {loss}", range(1, 13)),
        ("epoch {epoch} step {of_epoch} loss {loss}", range(1, 13)),
        ("Epoch [{epoch}/3], Step [{step}/12], Loss: {loss}", range(1, 13)),
        ("epoch {epoch} step {step} loss {loss}", range(1, 13)),
    ],
)
def test_steps_of_an_epoch_are_counted_on(line: str, steps: range, tmp_path: Path) -> None:
    log, rows = tmp_path / "out.log", []
    for step in range(1, 13):
        epoch, of_epoch = divmod(step - 1, 4)
        rows.append(line.format(epoch=epoch + 1, of_epoch=of_epoch + 1, step=step, loss=9 - step))
    log.write_text("\n".join(rows))
    curve = read_curve(log)
    assert (curve.steps.tolist(), curve.warnings) == ([*steps], ())


@pytest.mark.parametrize(
    "line",
    [
        "at step {} of the way, loss of {} data",
        "Step {}k | loss {}",
        "step={}K/100K loss={}",
        "step {}_000 loss {}",
        "step {}e3 loss {}",
    ],
)
def test_a_line_of_which_the_step_or_the_loss_is_unclear(tmp_path: Path, line: str) -> None:
    log = tmp_path / "out.log"
    log.write_text("".join(f"{line.format(step, 1.5)}\n" for step in range(1, 9)))
    with pytest.raises(RunError, match="--pattern"):
        read_curve(log)


@pytest.mark.parametrize("begins", [20, 10, 5])
def test_a_count_that_begins_again_is_left_out_of_a_log(begins: int, tmp_path: Path) -> None:
    log = tmp_path / "x.jsonl"
    rows = [(1, 10), (2, 20), (3, 30), (2, begins), (3, begins + 10), (4, begins + 20)]
    log.write_text("".join(f'{{"step": {s}, "loss": 2.0, "tokens": {t}}}\n' for s, t in rows))
    assert ("tokens" in read_curve(log).columns) == (begins == 20)
