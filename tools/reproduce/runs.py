"""The small runs of the figures: trained by `slurmllm submit --local`, two at a time."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from slurmllm.analysis.evaluate.suites import suites_dir
from slurmllm.core.run.rundir import RunDir
from slurmllm.data.tokenizer import train_tokenizer

AT_ONCE = 2


class CommandError(Exception):
    """A verb of slurmllm failed."""


@dataclass(frozen=True)
class RunSpec:
    """A run of the catalogue."""

    recipe: str
    nodes: int = 1
    set: list[str] = field(default_factory=list)  # settings, after those of every run
    also: list[str] = field(default_factory=list)  # more of them
    after: str | None = None  # the run from whose last checkpoint it starts
    corpus: str | None = None  # `smoke`: a corpus with the answers of the smoke suite


def train_missing(
    specs: Mapping[str, RunSpec],
    names: Iterable[str],
    common: Sequence[str],
    runs_dir: Path,
    steps: int | None = None,
) -> None:
    """Train the runs that are not complete; an interrupted one is resumed.

    Raises CommandError for the first run that failed.
    """
    names = list(names)
    first = [after for name in names if (after := specs[name].after) is not None]
    if first:
        train_missing(specs, dict.fromkeys(first), common, runs_dir, steps)
    runs_dir.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tasks = [
            pool.submit(_train, name, specs[name], common, runs_dir.absolute(), steps)
            for name in names
        ]
        for task in tasks:
            task.result()


def _train(
    name: str, spec: RunSpec, common: Sequence[str], runs_dir: Path, steps: int | None
) -> None:
    run = RunDir(runs_dir / name)
    if run.config.is_file():
        if _state(name, runs_dir) != "done":
            slurmllm("resume", name, "--local", "--runs-dir", str(runs_dir))
        return
    settings = [*common, *spec.set, *spec.also]
    if spec.corpus == "smoke":
        settings += smoke_corpus(runs_dir.parent / "smoke")
    if spec.after is not None:
        newest = RunDir(runs_dir / spec.after).checkpoint_steps()[-1]
        settings.append(f"train.init_from={RunDir(runs_dir / spec.after).checkpoint(newest)}")
    if steps is not None:
        settings += [f"train.steps={steps}", f"checkpoint.every_steps={steps}"]
        settings += ["optim.warmup_steps=1"]
    command = ["submit", spec.recipe, "--local", "--name", name, "--nodes", str(spec.nodes)]
    for setting in settings:
        command += ["--set", setting]
    slurmllm(*command, "--runs-dir", str(runs_dir))


def _state(name: str, runs_dir: Path) -> str:
    text = slurmllm("status", name, "--json", "--runs-dir", str(runs_dir))
    return str(json.loads(text)["state"])


def slurmllm(*arguments: str, may_differ: bool = False) -> str:
    """Run a verb and return what it prints; `may_differ`: that runs differ is no error."""
    done = subprocess.run(
        [sys.executable, "-m", "slurmllm", *arguments], check=False, capture_output=True, text=True
    )
    if done.returncode > (may_differ and arguments[0] == "compare"):
        end = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise CommandError(f"slurmllm {' '.join(arguments[:2])} failed:\n{end}")
    return done.stdout


def smoke_corpus(folder: Path) -> list[str]:
    """Write a corpus with the answered questions of the smoke suite; return its settings."""
    texts = _smoke_texts()
    rng = random.Random(1)
    tokens = " ".join(texts).split()
    # Documents of its vocabulary without its answers: some of them are held out.
    texts = texts * 3 + [" ".join(rng.choices(tokens, k=12)) + "\n" for _ in range(60)]
    source, corpus, tokenizer = (
        folder / name for name in ("texts.jsonl", "corpus.arrow", "tokenizer.json")
    )
    if not corpus.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        tokenizer.write_text(train_tokenizer(texts, 400), encoding="utf-8")
        slurmllm("data", "build", str(source), "--out", str(corpus))
    return [f"data.corpus={corpus.absolute()}", f"data.tokenizer={tokenizer.absolute()}"]


def _smoke_texts() -> list[str]:
    def rows(name: str) -> list[dict[str, str]]:
        text = (suites_dir() / "smoke" / name).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    choices = [
        f"{row['question']}\n"
        + "".join(f"{a}. {b}\n" for a, b in zip("ABCD", row["choices"], strict=True))
        + f"Answer: {'ABCD'[int(row['answer'])]}\n"
        for row in rows("choice_test.jsonl")
    ]
    sums = [
        f"Question: {row['question']}\nAnswer: {row['answer']}\n" for row in rows("sums_test.jsonl")
    ]
    code = [f"{row['prompt']}{row['canonical_solution']}\n" for row in rows("code_test.jsonl")]
    return choices + sums + code
