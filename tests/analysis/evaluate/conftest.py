"""A run that has memorized the smoke suite, more or less, evaluated once for all tests."""

from __future__ import annotations

import importlib.util
import json
import random
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import Result
from command_line import call
from train.gang import Gang, make_run

from slurmllm.analysis.evaluate.request import JobOutcome
from slurmllm.analysis.evaluate.suites import suites_dir
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm.processes import Call
from slurmllm.data.corpus.build import build_corpus
from slurmllm.data.corpus.inputs import find_inputs
from slurmllm.data.corpus.options import ReadOptions
from slurmllm.data.tokenizer import train_tokenizer

MISSING = [n for n in ("lm_eval", "accelerate") if importlib.util.find_spec(n) is None]
needs_harness = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
ALL = ("--suite", "smoke", "--checkpoint", "all", "--allow-code-execution", "--json")


def smoke_texts() -> list[str]:
    """The questions of the smoke suite, answered."""

    def lines(name: str) -> list[dict[str, Any]]:
        text = (suites_dir() / "smoke" / name).read_text()
        return [json.loads(line) for line in text.splitlines()]

    texts = []
    for question in lines("choice_test.jsonl"):
        options = "\n".join(f"{a}. {b}" for a, b in zip("ABCD", question["choices"], strict=True))
        texts.append(f"{question['question']}\n{options}\nAnswer: {'ABCD'[question['answer']]}\n")
    texts += [
        f"Question: {s['question']}\nAnswer: {s['answer']}\n" for s in lines("sums_test.jsonl")
    ]
    texts += [
        f"{problem['prompt']}{problem['canonical_solution']}\n"
        for problem in lines("code_test.jsonl")
    ]
    return texts


class Learnt(NamedTuple):
    """A trained run, and the JSON of `evaluate`."""

    run: RunDir
    output: dict[str, Any]


@pytest.fixture(scope="session", autouse=True)
def _small_and_without_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    home = str(tmp_path_factory.getbasetemp() / "hf")
    names = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": home}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        if not MISSING:
            from lm_eval.tasks._index import TaskIndex

            make = TaskIndex.build
            index = cache(lambda path: make([path]))  # of the harness's own tasks: seven seconds
            whole = staticmethod(lambda paths: dict(ChainMap(*map(index, reversed(paths)))))
            patch.setattr(TaskIndex, "build", whole)
            patch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)  # asks pip
        yield


def train_tiny(folder: Path, texts: list[str], lines: list[str], overrides: str) -> RunDir:
    """Train a model of width 64 on lines, with a tokenizer of the texts, in 2 to 8 sequences."""
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    corpus, tokenizer = folder / "corpus.arrow", folder / "tokenizer.json"
    build_corpus(find_inputs([str(source)]), corpus, ReadOptions())
    tokenizer.write_text(train_tokenizer(texts, 400))
    model = "model.vocab_size=400 model.hidden_size=64 model.num_heads=2 model.ffn_hidden_size=128"
    paths = (str(corpus), str(tokenizer))
    return Gang(make_run(folder / "runs" / "tiny", paths, *f"{model} {overrides}".split())).finish()


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Checkpoints at steps 90 and 180; some documents held out."""
    rng, words = random.Random(1), " ".join(smoke_texts()).split()
    lines = smoke_texts() * 3 + [" ".join(rng.choices(words, k=12)) + "\n" for _ in range(60)]
    overrides = (
        "model.seq_len=96 model.num_layers=2 data.validation=0.1 train.steps=180 "
        "train.global_batch=8 train.micro_batch=8 checkpoint.every_steps=90 checkpoint.keep=9 "
        "optim.lr=0.01 optim.warmup_steps=5"
    )
    return train_tiny(tmp_path_factory.mktemp("evaluate"), lines, lines, overrides)


class JobHere:
    """A job in this process, where the harness is imported once for all of them."""

    def __init__(self, call: Call, log: Path, device: str | None) -> None:
        function, arguments = call
        log.parent.mkdir(parents=True, exist_ok=True)
        with (
            log.with_name("here.log").open("a") as stream,
            redirect_stdout(stream),
            redirect_stderr(stream),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # those of the harness and what it imports
            self._outcome: JobOutcome = function(*arguments)

    def done(self) -> bool:
        return True

    def result(self) -> JobOutcome:
        return self._outcome

    @staticmethod
    def terminate(calls: Sequence[JobHere]) -> None:
        """Each has ended in its construction."""


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command, with its jobs in this process."""
    monkeypatch.setattr("slurmllm.core.slurm.processes.CallProcess", JobHere)
    return in_processes


def in_processes(run: RunDir | Path, *arguments: object) -> Result:
    path = run.path if isinstance(run, RunDir) else run
    return call("evaluate", path, *arguments)


@pytest.fixture(scope="session")
def learnt(run: RunDir) -> Learnt:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slurmllm.core.slurm.processes.CallProcess", JobHere)
        done = in_processes(run, *ALL)
    assert done.exit_code == 0, done.output
    return Learnt(run, json.loads(done.stdout))


def by_hand(folder: Path, out: Path, *arguments: str) -> dict[str, dict[str, float]]:
    """Scores by the harness's own command line for a model folder: task → metric → value."""
    from lm_eval.__main__ import cli_evaluate

    model = ("--model", "hf", "--model_args", f"pretrained={folder}", "--device", "cpu")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("DISABLE_MULTIPROC", "1")  # no pool forked beside torch's threads
        patch.setattr("sys.argv", ["lm_eval", "run", *model, *arguments, "--output_path", str(out)])
        cli_evaluate()
    (file,) = out.rglob("results_*.json")
    return dict(json.loads(file.read_text())["results"])


def scores(output: dict[str, Any], name: str) -> dict[str, float]:
    """A row of the only suite: step → value."""
    (row,) = [row for row in output["suites"][0]["rows"] if row["name"] == name]
    return dict(row["scores"])
