"""Logs of other frameworks: JSON, tables, text."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slurmllm.core.errors import RunError, UserError
from slurmllm.core.metrics.curves import Curve, DamageWarning
from slurmllm.core.metrics.source import locate, parse_tags, read_curve
from slurmllm.core.metrics.tags import METRICS, choose_tags, log_formats


def first_row(curve: Curve) -> dict[str, float]:
    return {key: float(column[0]) for key, column in curve.columns.items()}


def read_lines(tmp_path: Path, *lines: str, name: str = "x.log") -> Curve:
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return read_curve(path)


def test_json_lines_of_wandb_with_nested_keys(tmp_path: Path) -> None:
    rows = [
        {"_step": 2 * i, "_timestamp": 100.0 + i, "trainer": {"global_step": i}, "sys": {"gpu": 1}}
        | ({"train": {"loss": 3.0 - i, "lr": None}} if i else {})
        for i in range(3)
    ]
    path = tmp_path / "history.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    tags = {"loss": "train.loss", "step": "trainer.global_step"}
    curve = read_curve(path, tags)
    assert curve.steps.tolist() == [0, 1, 2]
    assert curve.series("loss")[1].tolist() == [2.0, 1.0]
    assert curve.columns["time"].tolist() == [100.0, 101.0, 102.0]
    assert read_curve(path, {"loss": "train.loss"}).steps.tolist() == [0, 2, 4]
    with pytest.raises(RunError, match=r"no loss in .*train\.loss.*; name it with --tag loss=TAG"):
        read_curve(path)


def test_json_lines_that_are_mixed_or_without_a_step(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"iteration": 1, "lm loss": 2.0}\nwarning\n{"iteration": 2, "lm loss": 1.')
    curve = read_curve(path)
    assert (curve.steps.tolist(), curve.columns["loss"].tolist()) == ([1], [2.0])
    assert curve.warnings == (f"{path}:2: not a JSON object; skipped 2 lines",)
    path.write_text('{"epoch": 1, "loss": 2.0}\n')
    with pytest.raises(
        RunError, match=r"no step in .*; its keys are epoch, loss; .*--tag step=epoch"
    ):
        read_curve(path)
    assert read_curve(path, {"step": "epoch"}).steps.tolist() == [1]
    rows = [
        f'{{"step": {step}, "loss": 1.0, "learning_rate": 1}}\n' for step in (1, 1.5, *range(2, 20))
    ]
    path.write_text("".join(rows))
    assert "1 of 20 rows: step is 1.5, not an integer of 0 or" in read_curve(path).warnings[0]
    path.write_text("".join(rows[:3]))
    with pytest.raises(RunError, match=r"x.jsonl:2: step is 1.5, not a whole number; .*--tag step"):
        read_curve(path)
    path = tmp_path / "x.json"
    path.write_text('{"step": [1, 2, 3], "loss": [3.0, 2.0, NaN], "name": "a"}')
    np.testing.assert_array_equal(read_curve(path).columns["loss"], [3.0, 2.0, np.nan])
    path.write_text('{"log_history": [{"st')
    with pytest.raises(RunError, match="is not complete JSON"):
        read_curve(path)


def test_tables_of_lightning_and_wandb(tmp_path: Path) -> None:
    lines = ["epoch,step,train_loss,val_loss,lr-AdamW", "0,9,3.0,,", "0,9,,3.1,", "0,19,2.9,,0.1"]
    curve = read_lines(tmp_path, *lines, "0,29,2.", name="metrics.csv")
    assert curve.steps.tolist() == [9, 19]
    assert curve.series("loss")[1].tolist() == [3.0, 2.9]
    assert curve.series("lr")[0].tolist() == [19]
    assert curve.series("val_loss")[1].tolist() == [3.1]
    assert curve.warnings == (f"{curve.path}:5: skipped the truncated last line",)
    header = '"Step","one - train/loss","one - train/loss__MIN","one - train/loss__MAX"'
    curve = read_lines(tmp_path, header, "1,3,2,4", "2,2.5,2,4", name="chart.csv")
    assert curve.columns["loss"].tolist() == [3.0, 2.5]
    path = tmp_path / "two.tsv"
    path.write_text("Step\tone - loss\ttwo - loss\n1\t3\t4\n")
    with pytest.raises(RunError, match="there are one - loss, two - loss"):
        read_curve(path)
    assert read_curve(path, {"loss": "two - loss"}).columns["loss"].tolist() == [4.0]
    for text in ("", "x" * 200_000):
        path.write_text(text)
        with pytest.raises(RunError, match="has no header"):
            read_curve(path)


OURS = (
    "step {step}/120  loss 7.1000  grad norm 0.812  lr 2.00e-04  39.1 seq/s  1,251 tokens/s  "
    "eta 0:00:07"
)
BAR = (
    "Epoch 0:  22%|██▏       | {step}/20101 [22:26:14<77:48:37, 17.95s/it, loss=2.43, v_num=5563, "
    "reduced_train_loss=2.470, gradient_norm=0.121, parameter_norm=1864.0, global_step={step}.0, "
    "consumed_samples=1.16e+6, iteration_time=16.40]"
)


def test_text_logs_of_a_terminal(tmp_path: Path) -> None:
    """Lines that overwrite each other, one of them twice, and bytes that are not UTF-8."""
    path = tmp_path / "x.log"
    for line, metric, value in ((OURS, "tokens_per_s", 1251.0), (BAR, "samples", 1.16e6)):
        lines = ["Loading … loss of nothing", *(line.format(step=i) for i in (10, 20, 30, 30))]
        path.write_bytes("\r".join(lines).encode() + b"\n\xff\xfe loss \0\n")
        curve = read_curve(path)
        assert (curve.kind, curve.steps.tolist(), curve.overlap_rows) == ("text", [10, 20, 30], 0)
        assert first_row(curve)[metric] == value
    expected = {"loss": 2.47, "grad_norm": 0.121, "param_norm": 1864.0, "step_time_s": 16.4}
    assert expected.items() <= first_row(curve).items()
    lines = [f"E|#| {i}/9 [1s, loss=2, global_step={99990 + i}.0]" for i in range(9)]
    lines += [f"E|#| {i}/9 [1s, loss=2, global_step=1.00e+5]" for i in range(10, 15)]
    steps = read_lines(tmp_path, *lines).steps.tolist()
    assert steps == [*range(99990, 99999), *range(100000, 100005)]
    lines = [OURS.format(step=step) for step in (*range(1, 21), *range(16, 31))]
    curve = read_lines(tmp_path, *lines)
    assert curve.steps.tolist() == list(range(1, 31))
    assert (curve.restarts.tolist(), curve.overlap_rows, curve.overlap_identical) == ([16], 5, True)
    with pytest.raises(RunError, match=r"no metrics in .*: no line is of a known format"):
        read_lines(tmp_path, "nothing here", name="y.txt")


@pytest.mark.parametrize(
    "name", [name for name, log_format in log_formats().items() if log_format.tags.get("loss")]
)
def test_every_framework_is_known_by_its_tags(name: str) -> None:
    log_format = log_formats()[name]
    tags = log_format.tags | {"loss": log_format.recognized_by or log_format.tags["loss"]}
    there = [names[0].replace("*", "AdamW") for names in tags.values()]
    assert set(tags) < set(METRICS)
    choice = choose_tags(dict.fromkeys([*there, log_format.mark or "other"], 9), {}, Path("log"))
    assert dict(zip(tags, there, strict=True)).items() <= choice.tags.items()
    assert choice.format is log_format


def test_tags_that_differ_are_named(tmp_path: Path) -> None:
    rows = [
        {"step": i, "loss": 1.0 * i, "train_loss": 2.0 * i, "lr-x": 1, "tps": 5} for i in range(9)
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    choice, units = read_curve(path).warnings
    assert "from 'train_loss', not from 'loss'; select another with --tag loss=TAG" in choice
    assert units == "tokens_per_s is the value of one device, not of the run: 'tps'"
    assert read_curve(path, {"loss": "loss"}).columns["loss"].tolist() == [
        1.0 * i for i in range(9)
    ]
    (elsewhere, *_) = read_curve(path, {"loss": "mine"}).warnings
    assert "has no 'mine' (--tag loss=mine); loss is taken from 'train_loss'" in elsewhere
    with pytest.raises(RunError, match=r"no 'mine' \(--tag param_norm=mine\); there are"):
        read_curve(path, {"param_norm": "mine"})
    assert parse_tags(["loss=a=b", " lr = my lr "]) == {"loss": "a=b", "lr": "my lr"}
    for wrong in (["loss"], ["=x"], ["los=x"], ["loss=a", "loss=b"]):
        with pytest.raises(UserError, match="--tag"):
            parse_tags(wrong)


def test_locate(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for folder in ("whole", "part/metrics", "empty"):
        (root / folder).mkdir(parents=True)
    (root / "whole" / "config.yaml").write_text("")
    (tmp_path / "tb").mkdir()
    (tmp_path / "tb" / "events.out.tfevents.1.h").write_bytes(b"")
    (tmp_path / "x.csv").write_text("")
    for source in (root / "whole", root / "part", tmp_path / "tb", tmp_path / "x.csv"):
        assert locate(str(source), root) == source
    assert locate("whole", root) == root / "whole"
    assert locate("part", root) == root / "part"
    for source, message in (
        ("gone", "no run 'gone'"),
        ("gone.csv", "no metrics file"),
        (str(root / "empty"), "holds no metrics"),
        ("x" * 300, "cannot look up"),
    ):
        with pytest.raises(RunError, match=message):
            locate(source, root)
    (root / "empty" / "metrics.csv").write_text("")
    assert locate(str(root / "empty"), root) == root / "empty" / "metrics.csv"


def test_files_of_no_use(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_text("")
    with pytest.raises(RunError, match="of an unknown kind"):
        read_curve(tmp_path / "x.bin")
    (tmp_path / "x.csv.gz").write_bytes(b"step,loss\n1,2.5\n")
    with pytest.raises(RunError, match=r"x\.csv\.gz is not a gzip file.*rename it to x\.csv if"):
        read_curve(tmp_path / "x.csv.gz")
    path = tmp_path / "x.csv.gz"
    for text in (b"", b"\x1f", gzip.compress(b"step,loss\n1,2.5\n")[:12]):
        path.write_bytes(text)
        with pytest.raises(RunError, match="no metrics in"):
            read_curve(path)


LOSSES = np.random.default_rng(0).random(2_000).tolist()
LINES: dict[str, Callable[[int, float], str]] = {
    ".jsonl": lambda step, loss: json.dumps({"step": step, "loss": loss}),
    ".csv": lambda step, loss: f"{step},{loss}",
    ".log": lambda step, loss: f"step: {step} loss: {loss:.17f}",
}


@pytest.mark.parametrize(
    ("damage", "suffix"),
    [("cut", ".log"), ("flipped", ".jsonl"), ("appended", ".csv"), ("no end", ".log")],
)
def test_a_damaged_gzip_is_read_to_the_damage(damage: str, suffix: str, tmp_path: Path) -> None:
    lines = [LINES[suffix](step, loss) for step, loss in enumerate(LOSSES)]
    text = "\n".join([*(["step,loss"] if suffix == ".csv" else []), *lines, ""])
    whole = gzip.compress(text.encode())
    half = len(whole) // 2
    path = tmp_path / f"x{suffix}.gz"
    path.write_bytes(
        {
            "cut": whole[:half],
            "flipped": whole[:half] + bytes([whole[half] ^ 0xFF]) + whole[half + 1 :],
            "appended": whole + b"what is no gzip",
            "no end": whole[:-8],
        }[damage]
    )
    curve = read_curve(path)
    (warning,) = (each for each in curve.warnings if f"{path} is damaged: " in each)
    assert ("some of it may be wrong" in warning) == (damage == "flipped")
    read = curve.series("loss")[1].tolist()
    assert len(read) > 0.4 * len(LOSSES)
    if damage != "flipped":  # what follows the byte is unpacked to something else
        assert read == pytest.approx(LOSSES[: len(read)], abs=1e-16)
        assert len(read) == len(LOSSES) or damage == "cut"


def test_cells_that_are_no_numbers_or_were_cut(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(
        'step,loss,note\n999,2.0,ok\n"1,000",high,ok\n"1,001",low,NA\n1002,n/a,ok\n1003,1.7,ok\n'
    )
    curve = read_curve(path)
    assert curve.steps.tolist() == [999, 1003]
    assert curve.warnings == (
        f"{path}:3: 'high' in column 'loss' is not a number; such cells are missing values: 2",
    )
    path.write_text("step,loss,odd\n1,2.0,3\nlow,1.9,4\n3,high,5\n4,1.7,none yet\n")
    warnings = read_curve(path).warnings
    columns = {w.column: w.lines for w in warnings if isinstance(w, DamageWarning)}
    assert (len(warnings), columns) == (3, {"": [3], "loss": [4]}), "damage to what is read"
    path.write_text("step,loss\n1,2.25\n2,1.9")  # of 1.95
    curve = read_curve(path)
    assert (curve.steps.tolist(), curve.columns["loss"].tolist()) == ([1], [2.25])
    assert curve.warnings == (
        f"{path}:3: skipped the last line, which is probably truncated: it has no newline, and its "
        "last value, '1.9', is shorter than all others of the column",
    )
    path.write_text("step,loss\n1,2.25\n2,1.9\n3,1.85\n4,1.7")  # a whole table
    curve = read_curve(path)
    assert (curve.steps.tolist(), curve.warnings) == ([1, 2, 3, 4], ())


@pytest.mark.parametrize("first", [1, 21], ids=["first", "resumed"])
@pytest.mark.parametrize("redrawn", [True, False], ids=["redrawn", "before its row"])
def test_a_bar_is_of_the_row_that_it_belongs_to(tmp_path: Path, first: int, redrawn: bool) -> None:
    """Of the Trainer, which begins a bar at 0 and redraws it after a row, and of a plain script."""
    lines = [
        "Map (num_proc=2): 100%|###| 300/300 [00:00<00:00, 566.18 examples/s]",
        "Saving the dataset (0/1 shards):   0%|   | 0/319 [00:00<?, ? examples/s]",
        "Loading weights: 100%|###| 39/39 [00:00<00:00, 26151.54it/s]",
    ]
    lines += ["  0%|   | 0/40 [00:00<?, ?it/s]"] if redrawn else []
    for step in range(first, 26):
        bar, row = f"{step}%|## | {step}/40 [00:01<00:02, 1.0it/s]", f"{{'loss': 3.{step:02}}}"
        lines += [row, bar] if redrawn else [bar, row]
    path = tmp_path / "trainer.log"
    path.write_text("\n".join(lines) + "\n")
    assert read_curve(path).steps.tolist() == list(range(first, 26))
