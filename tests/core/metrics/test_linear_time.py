"""Every pattern of formats.yaml and error_patterns.yaml takes linear time on long hostile lines."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from core.metrics.test_formats import LINES

from slurmllm.core.errors import RunError
from slurmllm.core.metrics.source import read_curve
from slurmllm.core.metrics.tags import PATTERN_EXAMPLE, log_formats
from slurmllm.core.metrics.text_logs import TextReader
from slurmllm.core.run.error_patterns import table

LONG = 1 << 13  # characters
MOST_S = 0.25  # of processor time; quadratic time takes a second


def long_lines(example: str, length: int = LONG) -> Iterator[str]:
    """Yield long lines made of an example: itself or a begin of it, repeated, or with a long tail.

    A pattern takes more than linear time where a part of it matches again and again, and what must
    follow is missing.
    """
    yield example * (length // len(example))
    for place in sorted({len(example) * part // 12 for part in range(1, 12, 2)}):
        begin = example[:place]
        yield begin * (length // len(begin))
        for tail in (begin[-2:], "1", " ", "1,", "a."):
            yield begin + tail * ((length - place) // len(tail))


EXAMPLES = [(example["format"], example["text"]) for example in LINES]
EXAMPLES += [
    (
        "Hugging Face Trainer",
        "{{'loss': 3.2, 'step': '{step}/9', 'x': tensor(1.2, device='cuda')}}",
    ),
    ("torchtune", "Step {step} | loss:2.3 lr:2e-05 tokens_per_second_per_gpu:12"),
    ("script", "step {step} iter 1 update 1 val loss 1.0, eval_loss=1.0, epoch 1 loss 1.0"),
    ("bar", "Epoch 0:  10%|#  | {step}/10 [00:10<00:10,  5.00it/s, v_num=0, train_loss=2.5]"),
]


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_formats_take_linear_time(name: str, line: str) -> None:
    for text in long_lines(line.format(step=7).split("\n")[0]):
        reader = TextReader(log_format=log_formats().get(name))
        start = time.process_time()
        reader.feed(text.encode() + b"\n")
        took = time.process_time() - start
        assert took < MOST_S, (name, took, text[:80], text[-40:])


@pytest.mark.parametrize("row", table(), ids=lambda row: row.pattern[:30])
def test_error_patterns_take_linear_time(row: object) -> None:
    pattern, example = re.compile(row.pattern), row.example  # type: ignore[attr-defined]
    for text in long_lines(example):
        start = time.process_time()
        pattern.search(text)
        took = time.process_time() - start
        assert took < MOST_S, (pattern.pattern, took, text[:80], text[-40:])


@pytest.mark.parametrize(
    "line",
    [
        "step " + "1" * 60_000,
        "step 1 " * 8_000,
        "step " + "1" * 4000 + " loss" + " loss" * 8_000,
        "step 1" + "\t " * 20_000,
    ],
)
def test_the_recommended_expression_takes_linear_time(line: str) -> None:
    reader, start = TextReader(PATTERN_EXAMPLE.strip("'")), time.process_time()
    reader.feed(f"{line}\nstep 2{' ' * 8000}loss 2.5\n".encode())
    assert time.process_time() - start < 4 * MOST_S  # with quadratic time 20 s
    reader.flush(last=True)
    assert 2.5 in [row.get("loss") for row in reader.take()]


def test_long_lines_and_long_numbers_are_no_metrics(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    good = ["iter 1: loss 2.5, time 1ms", "iter 2: loss 2.25, time 1ms"]
    bad = [
        f"iter 3: loss 2.{'5' * 5000}, time 1ms",
        f"iter 4: loss 2.5, time 1ms{' ' * (1 << 16)}",
        f"{'x' * (3 << 20)}iter 5: loss 2.5, time 1ms",
        f"{{'loss': {'1' * 10_000}, 'step': 6}}",
        "{'loss': 1,2,3, 'step': 7}",
    ]
    path.write_text("\n".join([*bad, *good, *bad]) + "\n")
    start = time.process_time()
    curve = read_curve(path)
    assert time.process_time() - start < 2
    assert curve.columns["loss"].tolist() == [2.5, 2.25]
    path.write_text("\n".join(bad))
    with pytest.raises(RunError, match="no metrics in"):
        read_curve(path)
    table_path = tmp_path / "x.csv"
    table_path.write_text(f"step,loss\n1,2.5\n2,{'1' * 5000}\n3,2.25\n")
    assert read_curve(table_path).series("loss")[1].tolist() == [2.5, 2.25]
