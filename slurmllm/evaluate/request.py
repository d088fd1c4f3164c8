"""What a job evaluates, and its outcome; all of it is pickled, so it is plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from slurmllm.evaluate.suites import SuiteTask
from slurmllm.rundir import RunDir

# Prefix of the temporary folders of exported models, in the folder of the scores.
EXPORT_PREFIX = ".export-"


@dataclass(frozen=True)
class ModelRef:
    """A model to evaluate.

    Attributes:
        directory: A checkpoint folder, or a Hugging Face model folder.
        step: Of the checkpoint; 0 for a Hugging Face model.
        tokens: Tokens trained on; 0 if unknown.
        checksum: Of its contents.
        huggingface: Whether it is a Hugging Face folder, which is evaluated without an export.
        verified: Whether its files have been verified already.
    """

    directory: Path
    step: int
    tokens: int
    checksum: str
    huggingface: bool = False
    verified: bool = False


@dataclass(frozen=True)
class ValidationText:
    """The text of the task `validation`.

    Attributes:
        run: The run whose held-out documents are read; None for a named corpus of a model folder.
        corpus: The named corpus.
        name: Of the task in the records.
    """

    run: Path | None
    corpus: Path | None
    name: str


@dataclass(frozen=True)
class TaskRequest:
    """One task to evaluate.

    Attributes:
        task: As the suite defines it.
        folder: The task's own folder is relative to it.
        key: Cache key of its scores.
    """

    task: SuiteTask
    folder: Path
    key: str


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of all tasks.

    Attributes:
        limit: Maximum questions (`validation`: sequences); None: all (the first 1,000).
        batch_size: Sequences in a batch; None: one on a CPU, as many as fit on a CUDA device.
        device: cpu, cuda, or auto: cuda if available.
        allow_code: Whether programs that the model writes may be executed.
        export_dir: Where exported models are kept; None: they are removed.
        tokenizer: A tokenizer.json to use instead of the run's.
        call_id: In the names of this call's temporary folders.
    """

    limit: int | None = None
    batch_size: int | None = None
    device: str = "auto"
    allow_code: bool = False
    export_dir: Path | None = None
    tokenizer: Path | None = None
    call_id: str = ""


@dataclass(frozen=True)
class JobRequest:
    """One job: some tasks on one model.

    Attributes:
        store: Directory that holds the scores: the run's.
        model: The model.
        tasks: The tasks.
        validation: Text of `validation`, if requested.
        settings: Settings of all tasks.
    """

    store: Path
    model: ModelRef
    tasks: tuple[TaskRequest, ...]
    validation: ValidationText | None
    settings: EvaluationSettings

    def score_file(self, task: TaskRequest) -> Path:
        """Where a task's scores are stored."""
        return RunDir(self.store).evaluation(self.model.checksum, task.key)

    def title(self, request: TaskRequest) -> str:
        """A task's name, with its shots if it is requested with several numbers of shots."""
        name, shots = request.task.task, request.task.shots
        variants = sum(other.task.task == name for other in self.tasks)
        return name if variants == 1 or shots is None else f"{name} {shots}-shot"


@dataclass(frozen=True)
class JobOutcome:
    """The outcome of a job.

    Attributes:
        failed: Cache key of a task → reason.
        damaged: Faults of the checkpoint's files, which was therefore skipped.
        error: How the job ended, if it returned no outcome.
    """

    failed: dict[str, str] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    error: str | None = None
