"""What a job is to evaluate, and what it says of it; both go through files, so all is plain."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from slurmllm.evaluate.suites import SuiteTask
from slurmllm.rundir import RunDir

# How the names of folders of exported models begin, in the folder of the scores.
EXPORT = ".export-"


@dataclass(frozen=True)
class Candidate:
    """A model to judge.

    Attributes:
        directory: A checkpoint folder, or a Hugging Face model folder.
        step: Of the checkpoint; 0 where there is none.
        tokens: That it was trained on; 0 where nobody knows.
        checksum: Of its contents.
        huggingface: Whether it is a Hugging Face folder, to be judged as it is.
        verified: Whether its files have been checked already.
    """

    directory: Path
    step: int
    tokens: int
    checksum: str
    huggingface: bool = False
    verified: bool = False


@dataclass(frozen=True)
class HeldOut:
    """The text that `validation` reads.

    Attributes:
        run: The run whose held-out documents it is; None where a corpus is named.
        corpus: The named one.
        name: Of the task, as records have it.
    """

    run: Path | None
    corpus: Path | None
    name: str


@dataclass(frozen=True)
class Asked:
    """A task to do.

    Attributes:
        task: As the suite has it.
        folder: From which the task's own folder is seen.
        key: Under which its scores are kept.
    """

    task: SuiteTask
    folder: Path
    key: str


@dataclass(frozen=True)
class Settings:
    """How all tasks are done.

    Attributes:
        limit: Questions (`validation`: sequences) at most; None: all (the first 1,000).
        batch_size: Sequences at a time; None: one on a CPU, as many as fit on a CUDA device.
        device: cpu, cuda, or auto: cuda where there is one.
        allow_code: Whether programs that the model writes may be run.
        export_dir: Where exported models are kept; None: nowhere.
        tokenizer: A tokenizer.json to use instead of the run's.
        word: In the names of this call's temporary folders.
    """

    limit: int | None = None
    batch_size: int | None = None
    device: str = "auto"
    allow_code: bool = False
    export_dir: Path | None = None
    tokenizer: Path | None = None
    word: str = ""


@dataclass(frozen=True)
class Work:
    """One job.

    Attributes:
        store: Directory that keeps the scores: the run's.
        candidate: The model.
        asked: What to do.
        held_out: Text of `validation`, where that is asked for.
        settings: How.
    """

    store: Path
    candidate: Candidate
    asked: tuple[Asked, ...]
    held_out: HeldOut | None
    settings: Settings

    def file(self, asked: Asked) -> Path:
        """Where a task's scores are kept."""
        return RunDir(self.store).evaluation(self.candidate.checksum, asked.key)

    def name(self, asked: Asked) -> str:
        """A task's name, with its shots where it is asked for in several ways."""
        name, shots = asked.task.task, asked.task.shots
        ways = sum(one.task.task == name for one in self.asked)
        return name if ways == 1 or shots is None else f"{name} {shots}-shot"


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        failed: Key of a task → why.
        unsound: What is wrong with the checkpoint's files, where it was passed over for that.
        lost: Why the job ended without a word, where it did.
    """

    failed: dict[str, str] = field(default_factory=dict)
    unsound: tuple[str, ...] = ()
    lost: str | None = None
