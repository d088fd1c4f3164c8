"""The schemas of what a run reads and makes: graphs, data, checkpoints and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from slurmllm.core.format import Texts
from slurmllm.core.run.records import Lines, NodeName, NodeNames, Record, Versions

_NO_NAMES = frozenset({"", ".", ".."})
LATEST_TIME = 253_402_214_400  # Unix time, s: the last day that Python's datetime knows


def _stays_inside(path: str) -> str:
    # A record may be a replica's or somebody else's: files are copied and unpacked by these names.
    # Fast: a checkpoint of thousands of workers has as many files.
    if not _NO_NAMES.isdisjoint(path.split("/")) or "\0" in path:
        raise ValueError(f"{path!r:.100} is no file inside the folder")
    return path


InnerPath = Annotated[str, AfterValidator(_stays_inside)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class GraphFile(Record):
    """One file of the graph archive."""

    path: InnerPath
    bytes: int


class GraphState(Record):
    """One graph of a stage, and whether it was compiled."""

    name: str
    folder: str  # inside the cache; identifies the graph
    # missing: the compiler left neither an artifact nor a reason.
    state: Literal["compiled", "failed", "missing"]
    compiler: str  # name and version
    log: InnerPath | None = None  # compiler's, of a failed graph; in the run


class GraphManifest(Record):
    """`graphs/manifest.json`: what the archive of compiled graphs holds."""

    complete: bool  # every graph is compiled, and no node is missing
    backend: str
    # Of torch, the compiler, …, and the processor that the graphs are made for.
    versions: Versions
    graphs: int  # number of compiled graphs
    # A bare name: the archive is in this file's folder.
    archive: Annotated[str, Field(pattern=r"^graphs[A-Za-z0-9._-]*\.tar$")] = "graphs.tar"
    archive_bytes: int
    archive_sha256: str
    cold_first_step_s: float  # first step with an empty cache, s
    compile_s: float = 0.0  # seconds of the compiler after those steps
    files: tuple[GraphFile, ...]
    states: tuple[GraphState, ...] = ()  # of every graph
    missing_nodes: NodeNames = ()  # the precompile nodes that submitted no graphs
    fingerprint: str = ""  # see graphs.reuse; empty: unknown
    # The run that compiled the graphs.
    reused_from: Annotated[str, Field(pattern=r"^[^/\x00-\x1f\x7f]+$")] | None = None
    rejected: str = ""  # why no attempt uses the graphs any longer

    def unusable(self, versions: Versions) -> str | None:
        """Return why a node of these versions must not use the graphs; None if it may."""
        if self.rejected or self.versions == versions:
            return self.rejected or None
        differences = []
        for name in sorted(self.versions.keys() | versions.keys()):
            built = self.versions.get(name, "none")
            ours = versions.get(name, "none")
            if name == "cpu_features":  # long: only those that the other has not
                old = {*built.split()}
                new = {*ours.split()}
                built, ours = (" ".join(sorted(s)) or "no others" for s in (old - new, new - old))
            if built != ours:
                differences.append(f"{name} {built} in the archive, {ours} on this node")
        return f"built in another environment ({'; '.join(differences)})"


class NewGraphs(Record):
    """`graphs/new/NNN_<node>.json`: what a node compiled in training, until it is merged."""

    node: NodeName
    attempt: int
    nodes: NodeNames  # of the attempt
    versions: Versions
    archive_sha256: str
    files: tuple[GraphFile, ...]
    states: tuple[GraphState, ...]


class MicroBatchCandidate(Record):
    """A measured micro batch."""

    micro_batch: int
    # Forward and backward of a step as long as the run's, divided by its sequences on one
    # data-parallel worker; the slowest worker's.
    seconds_per_sequence: float
    peak_bytes: int  # memory, of the worker that used most
    first_step_s: float  # first step, compilation included


class MicroBatchRecord(Record):
    """`graphs/micro_batch.json`: the result of `train.micro_batch: auto`."""

    micro_batch: int = Field(ge=1)  # chosen; used if it divides a worker's share
    reason: str  # why no larger one was measured
    candidates: tuple[MicroBatchCandidate, ...]  # smallest first
    limit_bytes: int  # memory that a worker may use, of the one with least
    nodes: Texts  # on which it was measured
    device: str
    workers: int


class CorpusRecord(Record):
    """One corpus that a run reads."""

    path: str
    fingerprint: str  # of its content
    documents: int
    weight: float  # its share of the sequences, relative to the others'


class DataRecord(Record):
    """`data.json`: what a run reads and in which order; written when it first trains.

    Everything but the paths decides which tokens are in which row of which step.
    """

    corpora: tuple[CorpusRecord, ...]
    tokenizer: str | None  # fingerprint; None: only corpora of token ids
    seed: int
    seq_len: int
    global_batch: int
    mask: str  # data.mask
    validation: float  # data.validation

    def differences(self, other: DataRecord) -> Lines:
        """Return why the two read different tokens, a phrase each."""
        differences = []
        if self._contents() != other._contents():
            differences.append(f"corpora {_phrase(self.corpora)} and {_phrase(other.corpora)}")
        for name in ("tokenizer", "seed", "seq_len", "global_batch", "mask", "validation"):
            ours = getattr(self, name)
            theirs = getattr(other, name)
            if ours != theirs:
                differences.append(f"{name} {ours} and {theirs}")
        return tuple(differences)

    def _contents(self) -> list[tuple[str, float]]:
        total = sum(corpus.weight for corpus in self.corpora)
        return [(corpus.fingerprint, corpus.weight / total) for corpus in self.corpora]


def _phrase(corpora: tuple[CorpusRecord, ...]) -> str:
    return " + ".join(
        f"{Path(c.path).name} ({c.fingerprint})" + (f" x {c.weight:g}" if corpora[1:] else "")
        for c in corpora
    )


class CheckpointFile(Record):
    """One file of a checkpoint."""

    path: InnerPath  # relative, inside the checkpoint's folder
    bytes: Count
    sha256: str


class CheckpointManifest(Record):
    """`checkpoints/step_XXXXXXXX/manifest.json`, written last: it makes the checkpoint."""

    step: Count
    tokens: Count  # trained on so far
    world_size: int = Field(ge=1, lt=1 << 31)
    attempt: int = Field(ge=0, lt=1 << 31)
    recipe: str
    saved_at: float = Field(ge=0, lt=LATEST_TIME)  # Unix time, s
    save_s: float = Field(allow_inf_nan=False)
    fingerprint: str  # of model and data configuration; must match to resume
    files: tuple[CheckpointFile, ...] = Field(min_length=1)


class ImportedModel(Record):
    """`model.json` of an imported checkpoint: the model of its weights, instead of a run's."""

    source: str  # the folder that it was made from
    architecture: str  # class of transformers
    model: dict[str, Any]  # the model section of a recipe
    parameters: int
    dtypes: Texts  # of the weights, as safetensors names them
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None


class CheckpointEvaluation(Record):
    """`evaluating/step_XXXXXXXX.json`: an evaluation during training (`Recipe.evaluate`).

    The supervisor's child writes it until the job starts, then the job does.
    """

    step: int
    path: str  # the checkpoint
    saved_at: float  # Unix time, s; tells two checkpoints of one step apart
    state: Literal["skipped", "due", "submitted", "done", "failed"]
    job: str = ""  # id of the evaluation's job
    error: str = ""  # why it was not submitted, or failed

    @property
    def finished(self) -> bool:
        return self.state in ("skipped", "done", "failed")


class EvaluationRecord(Record):
    """`evaluations/<checkpoint>/<task>.json`: the scores of a checkpoint in one task."""

    step: int  # of the checkpoint
    tokens: int  # that it was trained on
    checkpoint: str  # its checksum
    task: str  # the harness's name; `validation`: loss on the held-out text
    shots: int | None = None  # examples before each question
    limit: float | None = None  # of questions; a share if below 1
    scores: dict[str, float]  # metric → value, as the harness names them
    errors: dict[str, float] = Field(default_factory=dict)  # metric → standard error
    num_samples: int | None = None  # questions
    version: str  # of the evaluator, such as lm_eval 0.4.13
    seconds: float
    evaluated_at: float  # Unix time, s
