"""Loss on held-out text, against transformers on the same sequences."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from command_line import answer, call, refused
from rounding import forward_terms, rounding_bound

from slurmllm.analysis.evaluate.validation_loss import held_out_loss
from slurmllm.analysis.evaluate.validation_text import stream_spec, validation_text
from slurmllm.core.run.rundir import RunDir
from slurmllm.data.sources import open_all
from slurmllm.data.spec import Split
from slurmllm.data.stream import single_sequences
from slurmllm.train.checkpoint.state import read_origin

transformers = pytest.importorskip("transformers")
Evaluate = Callable[..., Result]


@pytest.mark.numerics
def test_the_loss_is_that_of_transformers(run: RunDir, tmp_path: Path) -> None:
    directory = run.checkpoint(180)
    export = ["checkpoint", "export", "180", "--run", str(run.path), "--out", str(tmp_path / "hub")]
    assert call(*export).exit_code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub").eval()
    with stream_spec(validation_text(run, None), directory, None) as spec:
        result = held_out_loss(directory, spec, None, None, "cpu")
        rows = torch.from_numpy(
            np.concatenate([batch.tokens for batch in single_sequences(spec, 1000)])
        )
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    terms = forward_terms(read_origin(directory).model) + rows[:, 1:].numel()
    assert result.loss == pytest.approx(float(expected), rel=rounding_bound(terms))
    assert result.targets == rows[:, 1:].numel()
    assert result.scores["perplexity"] == pytest.approx(np.exp(result.loss))


def test_each_held_out_token_once_and_no_other(run: RunDir) -> None:
    with stream_spec(validation_text(run, None), run.checkpoint(180), None) as spec:
        rows = [batch.tokens[0] for batch in single_sequences(spec, 1000)]
        some = [batch.tokens[0] for batch in single_sequences(spec, 2)]
    assert len(some) == 2
    assert all((a == b).all() for a, b in zip(some, rows, strict=False))
    # A sequence hands out its last token again as the next one's first.
    assert all(a[-1] == b[0] for a, b in itertools.pairwise(rows))
    (source,), _ = open_all(spec)
    split = Split("validation", spec.validation)
    held = split.document_mask(source.document_hashes(np.arange(len(source))))
    pieces = [source.read([(document, 0)]).tokens for document in np.flatnonzero(held).tolist()]
    count = sum(len(piece) for piece in pieces)
    assert 0 <= count - 1 - spec.seq_len * len(rows) < spec.seq_len


def test_by_the_command_and_without_text(run: RunDir, evaluate: Evaluate, tmp_path: Path) -> None:
    asked = ("--task", "validation", "--checkpoint", "all", "--json", "--jobs", 2)
    first = json.loads(evaluate(run, *asked).stdout)
    assert [checkpoint["step"] for checkpoint in first["checkpoints"]] == [90, 180]
    losses = next(r for r in first["suites"][0]["rows"] if r["metric"] == "loss")["scores"]
    assert set(losses) == {"90", "180"}
    repeated = json.loads(evaluate(run, *asked).stdout)
    assert (repeated["evaluated"], repeated["cached"]) == (0, 2)
    bare = RunDir(tmp_path / "bare")
    bare.path.mkdir()
    text = run.config.read_text().replace("validation: 0.1", "validation: 0.0")
    bare.config.write_text(text)
    message = refused(evaluate(bare, "--task", "validation"))
    assert "data.validation is 0" in message
    assert "--validation-corpus" in message


def test_a_text_of_one_s_own(run: RunDir, evaluate: Evaluate, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("Question: What is 2 plus 3?\nAnswer: 5\n\n" * 40)
    asked = ("--task", "validation", "--validation-corpus", text, "--limit", 3, "--json")
    (row, *_) = answer(evaluate(run, *asked))["suites"][0]["rows"]
    assert row["task"] == "validation:own.txt"
    assert 0 < row["scores"]["180"] < 3
    # Another text of that name has scores of its own, and the first keeps its.
    other = tmp_path / "other" / text.name
    other.parent.mkdir()
    other.write_text("no such thing was ever seen\n" * 80)
    by_path = ("--task", "validation", "--limit", 3, "--json", "--validation-corpus")
    output = [json.loads(evaluate(run, *by_path, path).stdout) for path in (other, text)]
    losses = [values["suites"][0]["rows"][0]["scores"]["180"] for values in output]
    assert losses == [pytest.approx(losses[0]), row["scores"]["180"]]
    assert losses[0] != losses[1]
