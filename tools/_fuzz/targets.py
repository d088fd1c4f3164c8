"""Every reader of files that others may have written: what a target does with a hostile file.

A target gets the path of the file, which has the name of the valid file that it was made from. It
may raise a SlurmllmError; anything else is a fault, and so are a hang and a great need of memory.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import click
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from slurmllm.analysis.evaluate.scores import score_tables
from slurmllm.analysis.evaluate.suites import read_suite
from slurmllm.analysis.status.logs import GrowingLog
from slurmllm.cli.main import cli
from slurmllm.core.config.load import load, load_leniently, read_summary
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import ConfigError, RunError, SlurmllmError, StorageError
from slurmllm.core.log import message_of, parse_line
from slurmllm.core.metrics import attempt_metrics
from slurmllm.core.metrics.row_reader import last_rows, read_events
from slurmllm.core.metrics.source import read_curve, read_run
from slurmllm.core.run import artifact_records
from slurmllm.core.run import records as run_records
from slurmllm.core.run.error_patterns import cause_line, meaning_of
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.safe_files import read_limited
from slurmllm.core.run.worker_files import read_phase
from slurmllm.core.slurm import client
from slurmllm.data.corpus.inputs import input_file
from slurmllm.data.corpus.options import InputErrors, ReadOptions
from slurmllm.data.corpus.readers import DocumentReader
from slurmllm.data.corpus.shard import ShardRecord
from slurmllm.data.sources import open_source
from slurmllm.data.tokenizer import TokenEncoder, special_tokens
from slurmllm.launch.diagnose.probe import ProbeLine
from slurmllm.launch.supervise.stacks import stack_location
from slurmllm.plan.mesh import load_mesh
from slurmllm.train.checkpoint.formats.dcp_read import DcpFiles
from slurmllm.train.checkpoint.formats.importing import plan_import
from slurmllm.train.checkpoint.formats.nxd_files import NxdLayout
from slurmllm.train.checkpoint.formats.pickles import pickle_faults
from slurmllm.train.checkpoint.formats.safetensors_files import open_safetensors
from slurmllm.train.checkpoint.state import TrainState

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests/fuzz/corpus"
Target = Callable[[Path], object]


def records(path: Path) -> None:
    others = {kind.__name__: kind for kind in (NxdLayout, TrainState, ShardRecord)}
    kind: Any = {**vars(run_records), **vars(artifact_records), **others}[path.stem]
    with contextlib.suppress(StorageError):
        kind.load_known(path)
    kind.load(path).save(path.with_suffix(".copy"))


def config(path: Path) -> None:
    for read in (read_summary, load_leniently):
        with contextlib.suppress(ConfigError):
            read(path)
    load(path)


def recipe(path: Path) -> None:
    resolve(str(path))


def profile(path: Path) -> None:
    resolve("tiny_neox", str(path))


def suite(path: Path) -> None:
    read_suite(path)


def metrics(path: Path) -> None:
    with contextlib.suppress(OSError):  # its callers say what that means
        last_rows(path, 3)
    for smallest in (0, 1 << 30):  # the fast reader, then the one that reads line by line
        with mock.patch.object(attempt_metrics, "_SMALL_BYTES", smallest):
            read_run(path, lenient=True)
    read_run(path)


def events(path: Path) -> None:
    run = RunDir(path.parent)
    run.events(0).parent.mkdir(exist_ok=True)
    path.replace(run.events(0))
    list(read_events(run, 0))


def logs(path: Path) -> None:
    read_curve(path)


def tensorboard_event(path: Path) -> None:
    """The content of one record of an event file, with the checksums that it must have."""
    content = path.read_bytes()
    header = struct.pack("<Q", len(content))
    frame = header + struct.pack("<I", masked_crc32c(header)) + content + bytes(4)
    framed = path.with_name("events.out.tfevents.1.n1")
    framed.write_bytes(frame)
    logs(framed)


def tokens(path: Path) -> None:
    path.with_suffix(".bin").write_bytes(bytes(128))
    source = open_source(path, None, None)
    for document in range(min(len(source), 4)):
        source.read([(document, 0)])


def arrow(path: Path) -> None:
    source = open_source(path, TokenEncoder(CORPUS / "tokenizer/tokenizer.json"), None)
    for document in range(min(len(source), 4)):
        source.read([(document, 0)])


def corpus(path: Path) -> None:
    for skip_bad in (True, False):
        errors = InputErrors(skip_bad)
        list(DocumentReader(input_file(path), ReadOptions(skip_bad=skip_bad), errors.add))


def tokenizer(path: Path) -> None:
    TokenEncoder(path)


def tokenizer_config(path: Path) -> None:
    special_tokens(path.with_name("tokenizer.json"))


def safetensors(path: Path) -> None:
    files, faults = open_safetensors(path.parent, [path.name])
    if faults:
        raise StorageError("; ".join(faults))
    for name in list(files.tensors)[:4]:
        files.read(name)


def safetensors_header(path: Path) -> None:
    header = path.read_bytes()
    framed = path.with_name("model.safetensors")
    framed.write_bytes(len(header).to_bytes(8, "little") + header + bytes(38))
    safetensors(framed)


def dcp(path: Path) -> None:
    for valid in (".metadata", "__0_0.distcp"):
        if path.name != valid:
            shutil.copy(CORPUS / "dcp" / valid, path.parent)
    pickle_faults(path.parent, [".metadata", "__0_0.distcp"])
    files = DcpFiles(path.parent)
    for name in list(files.tensors)[:4]:
        files.read(name)
        files.step(name)
    for kind, name in list(files.moments)[:4]:
        files.read(name, kind=kind)


def huggingface(path: Path) -> None:
    shutil.copy(CORPUS / "safetensors/model.safetensors", path.parent)
    path.replace(path.with_name("config.json"))
    plan_import(path.parent)


def huggingface_index(path: Path) -> None:
    shutil.copy(CORPUS / "safetensors/model.safetensors", path.with_name("other.safetensors"))
    shutil.copy(CORPUS / "huggingface/llama.json", path.with_name("config.json"))
    plan_import(path.parent)


def slurm(path: Path) -> None:
    text = path.read_text(errors="replace")
    commands = client.SlurmClient()

    def batch_job() -> None:
        commands.batch_job("123")
        commands.delay("123", 5.0)

    verbs: dict[str, Callable[[], object]] = {
        "squeue": lambda: [job.active for job in commands.queue(["123"]).values()],
        "sacct": lambda: commands.accounting("123"),
        "job": batch_job,
        "hosts": lambda: commands.hostnames("n[1-3]"),
        "sinfo_nodes": commands.node_states,
        "sinfo": commands.partition_nodes,
        "config": commands.settings,
        "sbatch": lambda: commands.submit(text),
    }
    answer = mock.patch.object(client, "_run", return_value=text)
    with answer, mock.patch.object(client, "ADOPTION_S", 0.1):  # sbatch's text may be no job id
        verbs[path.stem]()


def lines(path: Path) -> None:
    log = GrowingLog(path)
    read = [*log.lines(), *log.flush()]
    for line in read:
        parse_line(line)
        message_of(line)
        meaning_of(line)
    cause_line(read)
    with contextlib.suppress(OSError):  # as `read_stacks`
        stack_location(read_limited(path).decode(errors="replace"))


def phase(path: Path) -> None:
    read_phase(path)


def probe(path: Path) -> None:
    for line in path.read_text(errors="replace").splitlines():
        ProbeLine.parse(line)


def plan(path: Path) -> None:
    load_mesh(path)


def scores(path: Path) -> None:
    folder = RunDir(path.parent).path / "evaluations/step_00000001"
    folder.mkdir(parents=True, exist_ok=True)
    path.replace(folder / path.name)
    score_tables(RunDir(path.parent))


def run(path: Path) -> None:
    """The verbs of a login node, on a run one of whose files is hostile."""
    runs = path.parent / "runs"
    for valid in (CORPUS / "run").iterdir():
        if "~" not in valid.name:
            copy = runs / "r" / valid.name.replace("+", "/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            if valid.name == path.name:
                path.replace(copy)  # it may be a pipe
            else:
                shutil.copy(valid, copy)
    at = f"--runs-dir={runs}"
    verbs = [["status", at], ["status", "r", at, "--json"], ["checkpoint", "list", "r", at]]
    if path.name.startswith("metrics"):
        verbs.append(["spikes", "r", at])
    else:
        verbs += [["logs", "r", at, *more] for more in ([], ["--failed"], ["--stacks"])]
    for verb in verbs:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.suppress(click.ClickException, RunError),
        ):
            cli.main(verb, prog_name="slurmllm", standalone_mode=False)


# A target's name is that of its folder in tests/fuzz/corpus.
_FUNCTIONS: tuple[Any, ...] = (
    *(records, config, recipe, profile, suite, metrics, events, logs, tokens, arrow),
    *(corpus, tokenizer, tokenizer_config, safetensors, safetensors_header, dcp, huggingface),
    huggingface_index,
    *(slurm, lines, tensorboard_event, phase, probe, plan, scores, run),
)
TARGETS: dict[str, Target] = {function.__name__: function for function in _FUNCTIONS}
TARGETS["tensorboard"] = logs


def corpus_files(target: str) -> dict[str, bytes]:
    """The files of a target: valid ones, and those that once failed, `<name>~<digest>`."""
    return {path.name: path.read_bytes() for path in sorted((CORPUS / target).iterdir())}


def run_target(
    target: str, name: str, content: bytes | Callable[[Path], object], folder: Path
) -> SlurmllmError | None:
    """Give a file, or what a function makes in its place, to a target, in an empty folder.

    Returns the target's error; raises what is a fault of the target.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder / name.partition("~")[0]
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    before = Path.cwd()
    try:
        os.chdir(folder)
        TARGETS[target](path)
    except SlurmllmError as error:
        str(error).encode()  # printable: without half a surrogate pair
        return error
    finally:
        os.chdir(before)
    return None
