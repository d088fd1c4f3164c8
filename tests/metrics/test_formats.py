"""Every format of formats.yaml, by an example of each, and the trackers' files.

The files in formats/ were written by the frameworks' own code (transformers 5.23, lightning 2.6,
torchtune 0.6, wandb 0.19); lines here follow the print statement that the format's `source` names.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from slurmllm.errors import RunError, UserError
from slurmllm.metrics.curves import Curve
from slurmllm.metrics.source import locate, read_curve
from slurmllm.metrics.tags import log_formats
from slurmllm.metrics.text_logs import check_pattern

FOLDER = Path(__file__).parent / "formats"
ROOT = Path("no runs")
LOSSES = [3.0, 2.913, 2.8259999999999996, 2.7, 2.613, 2.526]  # of the files of one example


def first_row(curve: Curve) -> dict[str, float]:
    return {key: float(values[0]) for key, values in curve.columns.items()}


# format → line(s) of one step, first step, values of the first row
LINES: dict[str, tuple[str, int, dict[str, float]]] = {
    "nanotron": (
        "11/21/2025 10:00:00 [INFO|DP=0|PP=0|TP=0|ip-1]: iteration: {step} / 100 | "
        "consumed_tokens: 1.02K | time_per_iteration_ms: 250 | tokens_per_sec: 4.1K | "
        "tokens_per_sec_per_gpu: 4.1K | global_batch_size: 1.02K | lm_loss: 10.8 | lr: 0.0003 | "
        "model_tflops_per_gpu: 0.1 | eta: 0:00:09",
        1,
        {"loss": 10.8, "lr": 3e-4, "tokens": 1020, "tokens_per_s": 4100, "step_time_s": 0.25},
    ),
    "OLMo-core": (
        "2025-11-21 10:00:00.123\tnode:0\tolmo_core.train:1\tINFO\t[step={step}/100,epoch=1,"
        "eta=1h]\n    train/CE loss=10.51\n    train/PPL=3.7E+04\n    optim/total grad norm=1.25\n"
        "    optim/LR (group 0)=1.2E-05\n    throughput/device/TPS=1,234",
        1,
        {"loss": 10.51, "grad_norm": 1.25, "lr": 1.2e-5, "tokens_per_s": 1234},
    ),
    "Composer or LLM Foundry": (
        "[batch={step}/100]:\n\t Train time/batch: 4\n\t Train time/token: 4096\n"
        "\t Train loss/train/total: 11.0123\n\t Train l2_norm/grad/global: 2.5000\n"
        "\t Train lr-DecoupledAdamW/group0: 0.0001",
        1,
        {"loss": 11.0123, "grad_norm": 2.5, "lr": 1e-4, "tokens": 4096},
    ),
    "lingua": (
        "0: INFO    25-11-21 10:00:00.123456 - 0:00:12 - step: {step}  acc: 0  loss:  9.1234  "
        "grad: 1.20e+00  flops: 1.00e+13  wps: 1.20e+05  iter:  0.1234  data:  0.01  lr: 3.00e-04",
        1,
        {"loss": 9.1234, "grad_norm": 1.2, "lr": 3e-4, "step_time_s": 0.1234},
    ),
    "litgpt": (
        "Epoch 1 | iter {step} step {step} | loss train: 10.123, val: n/a | iter time: 25.22 ms "
        "(step) remaining time: 0:10:00",
        1,
        {"loss": 10.123},
    ),
    "llm.c": (
        "s:{step} trl:9.5001 lr:0.000003 norm:12.30",
        0,
        {"loss": 9.5001, "lr": 3e-6, "grad_norm": 12.3},
    ),
    "nanochat": (
        "step {step:05d}/01000 (1.00%) | loss: 3.123456 | lrm: 1.00 | dt: 250.00ms | tok/sec: "
        "1,234,567 | bf16_mfu: 40.00 | epoch: 1 | total time: 0.10m",
        0,
        {"loss": 3.123456, "step_time_s": 0.25, "tokens_per_s": 1234567},
    ),
    "modded-nanogpt": (
        "step:{step}/1750 train_loss:4.1234 train_time:1000ms step_avg:100.00ms",
        1,
        {"loss": 4.1234},
    ),
    "MaxText": (
        "completed step: {step}, seconds: 1.150, TFLOP/s/device: 470.000, Tokens/s/device: 123.5, "
        "total_weights: 49152, loss: 10.871, lr: 3.000e-05, grad_norm: 0.5, raw_grad_norm: 0.7",
        0,
        {"loss": 10.871, "lr": 3e-5, "grad_norm": 0.5, "step_time_s": 1.15, "tokens_per_s": 123.5},
    ),
    "DeepSpeed": (
        "steps: {step} loss: 4.1234 iter time (s): 0.512 samples/sec: 31.250",
        1,
        {"loss": 4.1234, "step_time_s": 0.512, "seq_per_s": 31.25},
    ),
    "Levanter": (
        "Progress on:train {step}.0it/100it rate:1.2it/s remaining:00:10 elapsed:00:05 "
        "postfix:loss=9.25",
        0,
        {"loss": 9.25},
    ),
    "EasyLM": (
        "{{'gradient_norm': 1.5,\n 'learning_rate': 0.0003,\n 'loss': 9.75,\n 'step': {step}}}",
        0,
        {"loss": 9.75, "grad_norm": 1.5, "lr": 3e-4},
    ),
    "nanoGPT": ("iter {step}: loss 3.1000, time 250.00ms, mfu 1.0%", 0, {"loss": 3.1}),
    "torchtitan": (
        "[titan] 2025-11-21 10:00:00,123 - root - INFO - \x1b[31mstep:  {step}  \x1b[32mloss:  "
        "8.1234  \x1b[38;2;180;60;0mgrad_norm:  1.2345  \x1b[36mmemory:  3.40GiB(4%)",
        1,
        {"loss": 8.1234, "grad_norm": 1.2345},
    ),
    "Megatron-LM": (
        " [2025-01-02 03:04:05.500000] iteration {step:8d}/     100 | consumed samples:          "
        "320 | elapsed time per iteration (ms): 545.2 | throughput per GPU (TFLOP/s/GPU): 100.2 | "
        "learning rate: 9.150000E-06 | global batch size:    32 | lm loss: 2.504220E+00 | loss "
        "scale: 1.0 | grad norm: 0.231 | params norm: 12.500 | number of skipped iterations:   0 |",
        1,
        {
            **{"loss": 2.50422, "grad_norm": 0.231, "param_norm": 12.5, "lr": 9.15e-6},
            **{"step_time_s": 0.5452, "time": 1735787045.5, "samples": 320},
        },
    ),
    "slurmllm": (
        "step {step}/120  loss 7.1000  grad norm 0.812  lr 2.00e-04  39.1 seq/s  1,251 tokens/s  "
        "eta 0:00:07",
        1,
        {"loss": 7.1, "grad_norm": 0.812, "lr": 2e-4, "seq_per_s": 39.1, "tokens_per_s": 1251},
    ),
    "NxD's examples": (
        "LOG Sun Nov 22 01:24:10 2026 - (0, {step}) step_loss : 8.1234 learning_rate : 2.00e-04 "
        "throughput : 3.12 seq/s grad-norm : 0.31",
        1,
        {
            **{"loss": 8.1234, "grad_norm": 0.31, "lr": 2e-4, "seq_per_s": 3.12},
            "time": 1795310650.0,
        },
    ),
    "NxD's examples with Lightning": (
        "step {step} loss is 7.1, lr is 1e-05, throughput 3.2 seq/s,  input_ids 1234, norm "
        "tensor([0.5]), global rank 0",
        1,
        {"loss": 7.1, "grad_norm": 0.5, "lr": 1e-5, "seq_per_s": 3.2},
    ),
}
LINES |= {
    "NeMo or NxD Training": (
        "[default0]:Training epoch 1, iteration 3/9999 | lr: 0.0003 | global_batch_size: 512 | "
        "global_step: {step} | reduced_train_loss: 5.3323 | train_step_timing in s: 12.64 | "
        "consumed_samples: 5",
        0,
        {"loss": 5.3323, "lr": 3e-4, "step_time_s": 12.64, "samples": 5},
    ),
    "fairseq or metaseq": (
        '2021-03-08 12:31:36 | INFO | train_inner | {{"epoch": 1, "update": 0.027, "loss": '
        '"16.475", "ppl": "91120.8", "wps": "288.7", "num_updates": "{step}", "lr": "2e-05", '
        '"gnorm": "20.751", "loss_scale": "4"}}\n2021-03-08 12:31:39 | INFO | valid | {{"epoch": '
        '1, "valid_loss": "15.1", "valid_ppl": "3", "valid_num_updates": "{step}"}}',
        1,
        {"loss": 16.475, "grad_norm": 20.751, "lr": 2e-5, "tokens_per_s": 288.7, "val_loss": 15.1},
    ),
    "InternEvo": (
        "2023-07-07 12:26:58,296\tINFO train.py:323 in record_current_batch_training_metrics -- "
        "tflops=63.27,step={step},loss=11.634,tgs (tokens/gpu/second)=1424.64,lr=4e-07,"
        "loss_scale=65536.0,grad_norm=63.67,micro_num=4,num_consumed_tokens=131072",
        0,
        {"loss": 11.634, "grad_norm": 63.67, "lr": 4e-7, "tokens": 131072, "tokens_per_s": 1424.64},
    ),
    "OLMo": (
        "[2024-04-17 09:42:26] INFO     [olmo.train:816, rank=0] [step={step}/739328]\n"
        "    train/CrossEntropyLoss=11.25\n    train/Perplexity=76,631\n"
        "    throughput/total_tokens=4,194,304\n    throughput/device/tokens_per_second=45,538",
        1,
        {"loss": 11.25, "tokens": 4194304, "tokens_per_s": 45538},
    ),
    "PaddleNLP": (
        "[2022-08-31 16:19:16,008] [    INFO] - loss: 3.25806541, learning_rate: 2.9e-05, "
        "global_step: {step}, interval_runtime: 2.2591, interval_samples_per_second: 3.541, "
        "interval_steps_per_second: 4.427, epoch: 0.0265",
        1,
        {"loss": 3.25806541, "lr": 2.9e-5, "seq_per_s": 3.541},
    ),
    "MMEngine or XTuner": (
        "08/12 11:40:22 - mmengine - INFO - Iter(train) [  {step}/2000]  lr: 4.9841e-05  eta: "
        "0:11:24  time: 0.2934  data_time: 0.0044  memory: 3725  grad_norm: 3.3291  loss: 2.5882  "
        "decode.loss_ce: 2.1",
        1,
        {"loss": 2.5882, "grad_norm": 3.3291, "lr": 4.9841e-5},
    ),
    "Detectron2": (
        "[01/02 03:04:05 d2.utils.events]:  eta: 0:10:00  iter: {step}  total_loss: 2.1  loss_cls: "
        "1.5  time: 0.3  data_time: 0.01  lr: 0.0001  max_mem: 100M",
        0,
        {"loss": 2.1, "lr": 1e-4, "step_time_s": 0.3},
    ),
    "open_lm": (
        "2024-01-02,03:04:05 | INFO | Train Epoch: 0 [ {step}/1000 (0%)] Loss: 10.9 (10.95) Data "
        "(t): 0.1 Batch (t): 1.2, 100/s, 50/s/gpu LR: 0.000100 ",
        0,
        {"loss": 10.9, "lr": 1e-4},
    ),
    "picotron": (
        "[rank 0] Step: {step}     | Loss: 10.5000 | Global batch size:   4.10K | Tokens/s:   "
        "12.3K | Tokens/s/GPU:    6.1K | Tokens:   4.10K/1.00M | MFU:  5.00% | Memory usage:   "
        "1.00GB",
        1,
        {"loss": 10.5, "tokens": 4100, "tokens_per_s": 12300},
    ),
    "DeepSpeed-Chat": (
        "Epoch: 0, Step: {step}, Rank: 0, loss = 8.59375",
        0,
        {"loss": 8.59375},
    ),
    "build-nanogpt": (
        "{step} val 10.9901\n{step} hella 0.2444\n{step} train 10.955029",
        0,
        {"loss": 10.955029, "val_loss": 10.9901},
    ),
}
OTHER_LINES = [
    (
        "InternEvo",
        "2024-03-27 17:03:42,047 INFO training_internlm.py:599 in "
        "record_current_batch_training_metrics -- tflops=180.4 step={step} loss=0.00535 tgs "
        "(tokens/gpu/second)=3345.72 tgs/last_tgs_1=3345.74 lr=1e-05 loss_scale=65536.0 grad_norm="
        "{{'0_default': 0.019, '1_fp32': 0.0}} micro_num=4 num_consumed_tokens=10485760",
        0,
        {"loss": 0.00535, "grad_norm": 0.019, "lr": 1e-5},
    ),
    (
        "fairseq or metaseq",
        "2021-01-01 10:00:00 | INFO | train_inner | epoch 001:    100 / 1000 loss=10.5, ppl=1, "
        "wps=1000, ups=1.5, wpb=3000, bsz=100, num_updates={step}, lr=1.25e-05, gnorm=2.5, wall=7",
        1,
        {"loss": 10.5, "grad_norm": 2.5, "lr": 1.25e-5, "tokens_per_s": 1000},
    ),
    (
        "MMEngine or XTuner",
        "2021-01-01 10:00:00,123 - mmdet - INFO - Epoch [1][{step}/7330]\tlr: 1.978e-03, eta: "
        "1:00:00, time: 0.5, data_time: 0.05, memory: 3000, loss_cls: 0.5, loss: 1.25, grad_norm: "
        "3",
        1,
        {"loss": 1.25, "grad_norm": 3, "lr": 1.978e-3},
    ),
    (
        "build-nanogpt",
        "step    {step} | loss: 6.512345 | lr 6.0000e-04 | norm: 1.2000 | dt: 330.00ms | tok/sec: "
        "1588000.00",
        0,
        {"loss": 6.512345, "lr": 6e-4, "grad_norm": 1.2, "step_time_s": 0.33},
    ),
    (
        "NxD's examples",
        "step {step} step_time 1.5s throughput 3.2 seq/s step loss 7.1 grad norm None",
        1,
        {"loss": 7.1, "seq_per_s": 3.2, "step_time_s": 1.5},
    ),
    (
        "Megatron-LM",
        " samples/sec: 3.100 | iteration       {step}/     100 | elapsed time per iteration "
        "(ms): 545.2 | learning rate: 9.150E-06 | lm_loss: 2.504220E+00 |",
        1,
        {"loss": 2.50422, "lr": 9.15e-6, "seq_per_s": 3.1, "step_time_s": 0.5452},
    ),
]


@pytest.mark.parametrize(
    ("name", "line", "first", "expected"),
    [*((name, *case) for name, case in LINES.items()), *OTHER_LINES],
)
def test_a_frameworks_lines(
    name: str, line: str, first: int, expected: dict[str, float], tmp_path: Path
) -> None:
    path = tmp_path / "slurm-1.out"
    steps = range(first, first + 4)
    path.write_text("loading\n" + "".join(line.format(step=step) + "\n\n" for step in steps))
    curve = read_curve(path)
    assert curve.steps.tolist() == list(steps)
    assert expected.items() <= first_row(curve).items()
    assert curve.convention is not None
    assert (curve.convention.format, curve.convention.steps_from) == (name, first)
    assert not curve.invented_steps
    assert all("is the value of one device" in warning for warning in curve.warnings)


def test_every_text_format_has_an_example() -> None:
    elsewhere = {"Hugging Face Trainer", "torchtune"}  # the files below
    text = {name for name, log_format in log_formats().items() if log_format.lines}
    assert text - elsewhere <= set(LINES)


def test_the_hugging_face_trainers_output_equals_its_trainer_state() -> None:
    state = json.loads((FOLDER / "trainer_state.json").read_text())["log_history"]
    text, document = (
        read_curve(FOLDER / name) for name in ("hugging_face.log", "trainer_state.json")
    )
    rows = [row for row in state if "loss" in row]
    for curve in (text, document):
        assert curve.steps.tolist() == [row["step"] for row in rows]
        assert curve.convention is not None
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
        ("run-abc123.wandb", range(1, 7), ("Hugging Face Trainer", 1, "steps")),
    ],
)
def test_files_of_loggers(
    name: str, steps: range, convention: tuple[str, int, str], tmp_path: Path
) -> None:
    path = tmp_path / name
    if name.endswith(".wandb"):  # one of its records spans two blocks
        path.write_bytes(gzip.decompress((FOLDER / f"{name}.gz").read_bytes()))
    else:
        shutil.copy(FOLDER / name.replace("metrics.csv", "lightning.csv"), path)
    curve = read_curve(locate(str(tmp_path if name.startswith(("run", "metr")) else path), ROOT))
    assert curve.steps.tolist() == list(steps)
    assert curve.series("loss")[1].tolist() == LOSSES
    read = curve.convention
    assert read is not None
    assert (read.format, read.steps_from, read.counts) == convention


def test_a_damaged_wandb_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    content = gzip.decompress((FOLDER / "run-abc123.wandb.gz").read_bytes())
    path = tmp_path / "run-1.wandb"
    for damaged, message in (
        (content[:-20], "is cut"),
        (content[:-20] + b"?" + content[-19:], "is damaged"),
    ):
        path.write_bytes(damaged)
        curve = read_curve(path)
        assert curve.columns["loss"].tolist() == LOSSES[:5]
        assert message in curve.warnings[0]
    path.write_bytes(b"nothing")
    with pytest.raises(RunError, match="is not a W&B run file"):
        read_curve(path)


def write_mlflow(run: Path) -> None:
    """Files as mlflow 3's FileStore writes them (mlflow/store/tracking/file_store.py)."""
    for name, values in (("train/loss", LOSSES), ("lr", [1e-4] * 6)):
        path = run / "metrics" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{1795406440214 + step} {value} {step}" for step, value in enumerate(values, 1)]
        path.write_text("\n".join(lines) + "\n")
    (run / "meta.yaml").write_text("run_name: a\n")


def test_mlflows_file_store(tmp_path: Path) -> None:
    write_mlflow(tmp_path / "mlruns" / "0" / "aaa")
    for source in ("mlruns", "mlruns/0", "mlruns/0/aaa"):
        curve = read_curve(locate(str(tmp_path / source), ROOT))
        assert (curve.steps.tolist(), curve.name) == (list(range(1, 7)), "aaa")
        assert curve.columns["loss"].tolist() == LOSSES
        assert curve.columns["time"][0] == 1795406440.215
    restarted = tmp_path / "restarted"
    write_mlflow(restarted)
    for name, values in (("train/loss", LOSSES[4:]), ("lr", [2e-4, 2e-4])):  # from step 5 on
        with (restarted / "metrics" / name).open("a") as stream:
            stream.writelines(f"17954064402{20 + at} {v} {5 + at}\n" for at, v in enumerate(values))
    curve = read_curve(restarted)
    assert curve.columns["lr"].tolist() == [1e-4] * 4 + [2e-4] * 2
    assert (curve.overlap_rows, curve.overlap_identical) == (2, False), "of the learning rate too"
    write_mlflow(tmp_path / "mlruns" / "0" / "bbb")
    with pytest.raises(RunError, match=r"holds 2 MLflow runs: 0/aaa, 0/bbb; name one"):
        read_curve(tmp_path / "mlruns")
    with (tmp_path / "mlruns/0/aaa/metrics/lr").open("a") as stream:
        stream.write("179540644 0.0\n")
    assert "lr:7: not `timestamp value step`" in read_curve(tmp_path / "mlruns/0/aaa").warnings[0]


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
    assert curve.convention is not None
    assert curve.convention.format == "OLMo-core"


@pytest.mark.parametrize(
    ("key", "row", "name"),
    [
        ("global_step", {"loss/out": 2.5, "optim/grad_norm": 1.0, "optim/lr": 1e-4}, "lingua"),
        (
            "current_steps",
            {"total_steps": 9, "loss": 2.5, "lr": 1e-4, "percentage": 0.5},
            "LLaMA-Factory",
        ),
        ("step", {"learning/loss": 2.5, "learning/grad_norm": 1.0}, "MaxText"),
    ],
)
def test_json_lines(key: str, row: dict[str, float], name: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({key: step, **row}) + "\n" for step in (1, 2)))
    curve = read_curve(path)
    assert curve.columns["loss"].tolist() == [2.5, 2.5]
    assert curve.convention is not None
    assert curve.convention.format == name


def test_a_pattern_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "train.any"
    path.write_text("t=1 L 3,5 g 0.5\nt=2 L 2,5 g nan\nt=x L 2\nother\n")
    curve = read_curve(path, pattern=r"t=(?P<step>\S+) L (?P<loss>\S+)(?: g (?P<grad_norm>\S+))?")
    assert curve.steps.tolist() == [1, 2]
    assert curve.columns["loss"].tolist() == [3.5, 2.5]
    assert f"{path}:3: 'x' in column 'step' is not a number" in str(curve.warnings)
    np.testing.assert_array_equal(curve.columns["grad_norm"], [0.5, np.nan])
    with pytest.raises(RunError, match=r"no line of .*train\.any matches --pattern"):
        read_curve(path, pattern=r"z(?P<step>\d)(?P<loss>\d)")
    for wrong, message in (
        ("(?P<step>", "is not a regular expression"),
        (r"(?P<loss>\d)", r"has no group \(\?P<step>"),
        (r"(?P<step>\d)", r"has no group \(\?P<loss>"),
        (r"(?P<step>\d)(?P<los>\d)", "no metric 'los'; one of step, loss"),
    ):
        with pytest.raises(UserError, match=message):
            check_pattern(wrong)


def test_tables_with_decimal_commas_and_byte_order_marks(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes("step;loss;lr\n1;3,25;1e-4\n2;2,5;inf\n".encode("utf-8-sig"))
    curve = read_curve(path)
    assert curve.columns["loss"].tolist() == [3.25, 2.5]
    assert curve.columns["lr"].tolist() == [1e-4, np.inf]
    assert curve.warnings == (f"{path}:2: numbers have decimal commas; read 2,5 as 2.5",)
    rows = tmp_path / "x.jsonl"
    rows.write_bytes('{"epoch": 0, "step": 1, "loss": 2.5}\n'.encode("utf-8-sig"))
    assert read_curve(rows).columns["loss"].tolist() == [2.5]
    text = tmp_path / "x.log"
    text.write_bytes("iter 1: loss 2.5\n".encode("utf-16"))
    with pytest.raises(RunError, match=r"is UTF-16 text.*iconv -f UTF-16"):
        read_curve(text)


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


def test_the_line_of_a_log_is_its_line_in_an_editor(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    rows = [f"iter {step}: loss {loss}" for step, loss in ((1, 3.0), (2, 2.0), (2, 1.0))]
    path.write_bytes(f"\n\r 10%\r\n{rows[0]}\r\n\n{rows[1]}\n{rows[2]}".encode())
    assert read_curve(path).warnings[0].startswith(f"{path}:6: steps are not in order")


def test_the_documentation_lists_every_format() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert f"Known are {', '.join(log_formats())}." in docs


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
    "line", ["Epoch [1/2], Step [{}/300], Loss: {}", "at step {} of the way, loss of {} data"]
)
def test_a_line_of_which_the_step_or_the_loss_is_unclear(tmp_path: Path, line: str) -> None:
    log = tmp_path / "out.log"
    log.write_text("".join(f"{line.format(step, 1.5)}\n" for step in range(1, 9)))
    with pytest.raises(RunError, match="--pattern"):
        read_curve(log)
