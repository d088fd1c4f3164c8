"""Each reader of tools/fuzz with each attack: it answers or says what is wrong with which file."""

import os
import re
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from amounts import amount

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from _fuzz.targets import TARGETS, corpus_files, run_target  # noqa: E402

from slurmllm.core.format import printable  # noqa: E402

_CPU_S = 20  # far above what any file needs, below what any endless reading takes
_MEMORY_BYTES = 1 << 30
_LONGEST_MESSAGE = 10_000
_NO_FILE = re.compile(
    r"not a regular file|no (recipe|cluster profile) file|an \.idx and a \.bin|neither model"
)


def middle(insertion: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[: len(content) // 2] + insertion + content[len(content) // 2 :]


def flip(content: bytes, part: int, bit: int) -> bytes:
    place = len(content) // part
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


# Changes of a valid file, after which it may have a meaning still.
CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "first half": lambda content: content[: len(content) // 2],
    "without the last byte": lambda content: content[:-1],
    "zeros behind it": lambda content: content + bytes(4096),
    "a bit of the middle": lambda content: flip(content, 2, 0x10),
    "the highest bit of a byte": lambda content: flip(content, 3, 0x80),
    "a first number that is huge": lambda content: b"\xff" * 7 + b"\x7f" + content[8:],
    "a first number of 2^40": lambda content: (1 << 40).to_bytes(8, "little") + content[8:],
    "no UTF-8": middle(b"\xff\xfe\xed\xa0\x80"),
    "a NUL byte": middle(b"\0"),
    "sequences of a terminal": middle(b"\x1b]0;x\x07\x1b[2J"),
    "sequences in front": lambda content: b"\x1b]0;x\x07\x1b[2J\n" + content,
    "twice": lambda content: content + content,
}
# Contents that no reader may take for its own.
OTHERS: dict[str, bytes] = {
    "zeros": bytes(1000),
    "noise": b"\xff\xfe\x00" * 100,
    "deep lists": b"[\n" * 30_000,  # in one line, PyYAML takes seconds
    "deep mappings": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "many digits": b'{"step": ' + b"9" * 5000 + b"}\n",
    "a long line": b'{"step": 1, "note": "' + b"x" * (9 << 20),
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:46\n",
}


def sparse_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 2 << 30)


PLACES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path),
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "sparse file": sparse_file,
}
# What these get is a part of a file, or what a command printed.
PARTS = {"safetensors_header", "tensorboard_event", "slurm", "probe"}
# These read files of any size, in a time that grows with it.
STREAMS = {"corpus", "tensorboard", "dcp", "lines", "run"}
STREAMED_LOGS = {".log", ".txt"}
# These read a file whole, and no large one.
LIMITED = {"records", "config", "recipe", "profile", "suite", "plan", "tokenizer"}
LIMITED |= {"huggingface", "huggingface_index"}
REASONS = {"sparse file": "larger than", "a pointer of Git LFS": "a Git LFS pointer"}
# These pass over what they cannot read, or say it in what they print.
LENIENT = {"events", "slurm", "lines", "phase", "probe", "scores", "run"}
# The file's name in the folder that the reader is given.
NAMES = {
    "events": "attempt_000.jsonl",
    "huggingface": "config.json",
    "safetensors_header": "model.safetensors",
}
CASES = [
    *((target, attack) for target in TARGETS for attack in (*CHANGES, *OTHERS)),
    *(
        (target, attack)
        for target in TARGETS
        for attack in PLACES
        if target not in PARTS and not (target in STREAMS and attack == "sparse file")
    ),
]


def some_files(target: str) -> dict[str, bytes]:
    """The valid files; of each ending one, or all in `make test-all`."""
    files = {name: text for name, text in corpus_files(target).items() if "~" not in name}
    first = {Path(name).suffix: name for name in reversed(files)}.values()
    names = sorted(files, key=lambda name: name not in first)
    return {name: files[name] for name in names[: amount(len(first), of=len(files))]}


@pytest.fixture(autouse=True)
def _limits() -> Iterator[None]:
    """A reader that holds a device's zeros fails its test."""
    warnings.simplefilter("ignore")
    size = re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
    assert size is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(size[1]) * 1024 + _MEMORY_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@pytest.mark.timeout(120)  # a pipe blocks who opens it
@pytest.mark.parametrize(("target", "attack"), CASES)
def test_a_reader_answers_or_names_the_file(target: str, attack: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    refusal = target not in LENIENT and attack not in CHANGES
    if target == "tokenizer_config" and attack in PLACES:
        refusal = False  # as without the file
    for name, valid in some_files(target).items():
        if attack == "sparse file" and Path(name).suffix in STREAMED_LOGS:
            continue
        content = PLACES.get(attack) or OTHERS.get(attack) or CHANGES[attack](valid)
        began = time.process_time()
        error = run_target(target, name, content, folder)
        assert time.process_time() - began < _CPU_S
        if error is None:
            assert not refusal or name == "a.txt", name  # every content is a text
            continue
        message = str(error)
        assert error.exit_code in (2, 4)
        assert NAMES.get(target, name) in message or str(folder) in message
        assert len(message) < _LONGEST_MESSAGE
        assert printable(message) == message
        assert target not in LIMITED or REASONS.get(attack, "") in message
        assert attack not in ("pipe", "endless device") or _NO_FILE.search(message)
