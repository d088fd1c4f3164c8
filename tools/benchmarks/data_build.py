"""How long `slurmllm data build` takes beside unpacking and copying the same files, and its memory.

    python tools/benchmarks/data_build.py [--gb 1] [--files 8] [--kinds plain,gz,zst]
        [--workers 2] [--rounds 1] [--text FILE] [--folder DIR]

The input is JSON lines of made-up documents: pieces of five words of a real text in random order,
so that they compress about as text does. The yardstick unpacks every file to the disk, copies it
and forces the copy to the disk, in as many processes as the build has and with the decompressors
that the build uses. The build reads, checks, hashes, writes shards, joins them and forces the
corpus to the disk.

Memory is that of all processes of the build together, polled ten times a second: RSS counts pages
that they share in each of them, PSS once.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

ENDINGS = {"plain": "", "gz": ".gz", "zst": ".zst"}
CODECS = {".jsonl": None, ".gz": "gzip", ".zst": "zstd"}
_UNIQUE_BYTES = 128 << 20  # more than any decompressor looks back
_CHUNK_BYTES = 1 << 20


def some_text(path: Path | None) -> str:
    """The text that documents are made of: a file, or sources of Python's library."""
    if path is not None:
        return path.read_text(encoding="utf-8")
    library = Path(os.__file__).parent
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(library.glob("[a-m]*.py")))


def made_up_lines(text: str) -> list[bytes]:
    """JSON lines of documents of 20 to 2,000 pieces, in chunks of whole lines."""
    rng = random.Random(1)
    words = text.split(" ")
    pieces = [" ".join(words[i : i + 5]) for i in range(0, len(words), 5)]
    chunks: list[bytes] = []
    lines: list[str] = []
    held = number = 0
    while len(chunks) * _CHUNK_BYTES < _UNIQUE_BYTES:
        document = " ".join(rng.choices(pieces, k=int(20 * 100 ** rng.random())))
        lines.append(json.dumps({"id": number, "url": "https://a/b", "text": document}))
        number += 1
        held += len(lines[-1])
        if held >= _CHUNK_BYTES:
            chunks.append(("\n".join(lines) + "\n").encode())
            lines, held = [], 0
    return chunks


def write_inputs(folder: Path, chunks: list[bytes], kind: str, files: int, size: int) -> None:
    """Write the input files of one kind, each with other chunks at its beginning.

    Every chunk is compressed once, and files are such streams joined, as pigz and bgzip make them.
    """
    pack: dict[str, Callable[[bytes], bytes]] = {
        "plain": lambda chunk: chunk,
        "gz": lambda chunk: gzip.compress(chunk, 6),
        "zst": lambda chunk: bytes(pa.compress(chunk, codec="zstd", asbytes=True)),
    }
    packed = [pack[kind](chunk) for chunk in chunks]
    for index in range(files):
        path = folder / f"{index:02d}.jsonl{ENDINGS[kind]}"
        with path.open("wb") as stream:
            written, place = 0, index * len(chunks) // files
            while written < size // files:
                stream.write(packed[place % len(chunks)])
                written += len(chunks[place % len(chunks)])
                place += 1


def unpack_and_copy(path: Path, folder: Path) -> float:
    """What the build is measured by: unpack a file to the disk, copy it, force the copy there.

    Returns:
        Processor time, s.
    """
    began = time.process_time()
    unpacked, copy = folder / path.stem, folder / f"{path.stem}.copy"
    with path.open("rb") as raw, unpacked.open("wb") as target:
        codec = CODECS[path.suffix]
        source = raw if codec is None else pa.CompressedInputStream(raw, codec)
        while data := source.read(_CHUNK_BYTES):
            target.write(data)
    shutil.copyfile(unpacked, copy)
    with copy.open("rb") as file:
        os.fsync(file.fileno())
    return time.process_time() - began


class Times(NamedTuple):
    """Wall and processor time, s."""

    wall: float
    cpu: float


class Build(NamedTuple):
    """One run of `data build`: its times, peak bytes, and what it printed."""

    times: Times
    rss: int
    pss: int
    result: dict[str, int]


def build(inputs: Path, out: Path, workers: int) -> Build:
    """Run the command, watching its memory."""
    arguments = ["data", "build", str(inputs), "--out", str(out), "--json"]
    began, before = time.perf_counter(), _cpu_of_children()
    process = subprocess.Popen(
        [sys.executable, "-m", "slurmllm", *arguments, "--workers", str(workers)],
        stdout=subprocess.PIPE,
    )
    rss = pss = 0
    while process.poll() is None:
        time.sleep(0.1)
        now = [_memory(pid) for pid in (process.pid, *_children(process.pid))]
        rss = max(rss, sum(memory[0] for memory in now))
        pss = max(pss, sum(memory[1] for memory in now))
    times = Times(time.perf_counter() - began, _cpu_of_children() - before)
    assert process.stdout is not None
    with process.stdout as output:
        return Build(times, rss, pss, json.load(output))


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def _memory(pid: int) -> tuple[int, int]:
    """RSS and PSS of a process in bytes; zeros where it has just ended."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0, 0
    sizes = {row.split(":")[0]: int(row.split()[1]) * 1024 for row in rows}
    return sizes["Rss"], sizes["Pss"]


def measure(
    kind: str, chunks: list[bytes], folder: Path, options: argparse.Namespace
) -> Iterable[tuple[Times, Build]]:
    """The yardstick's times, and a build, in every round."""
    inputs, scratch = folder / "in", folder / "scratch"
    inputs.mkdir()
    write_inputs(inputs, chunks, kind, options.files, int(options.gb * 1e9))
    paths = sorted(inputs.iterdir())
    for _ in range(options.rounds):
        scratch.mkdir()
        with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
            list(pool.map(len, [()] * options.workers))  # start-up is no part of it
            began = time.perf_counter()
            cpu = sum(pool.map(unpack_and_copy, paths, [scratch] * len(paths)))
            times = Times(time.perf_counter() - began, cpu)
        shutil.rmtree(scratch)
        out = folder / "corpus.arrow"
        yield times, build(inputs, out, options.workers)
        out.unlink()
        out.with_name(out.name + ".json").unlink()
    shutil.rmtree(inputs)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1, help="of JSON lines, unpacked")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--kinds", default="plain,gz,zst")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--text", type=Path, help="a UTF-8 text to make documents of")
    parser.add_argument("--folder", type=Path, help="where to work: three times --gb, and more")
    options = parser.parse_args()
    chunks = made_up_lines(some_text(options.text))
    print(f"{'':<6} {'':>8} {'unpack + copy':>15} {'build':>15} {'ratio':>13}")
    print(
        f"{'input':<6} {'GB read':>8} {'wall s':>8} {'cpu s':>6} {'wall s':>8} {'cpu s':>6} "
        f"{'wall':>6} {'cpu':>6} {'RSS MB':>7} {'PSS MB':>7} {'shards':>7}"
    )
    for kind in options.kinds.split(","):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rounds = list(measure(kind, chunks, Path(folder), options))
        yardstick = Times(
            *map(statistics.median, zip(*(times for times, _ in rounds), strict=True))
        )
        taken = Times(*map(statistics.median, zip(*(run.times for _, run in rounds), strict=True)))
        ratio = statistics.median(run.times.wall / times.wall for times, run in rounds)
        rss, pss = (max(getattr(run, name) for _, run in rounds) / 1e6 for name in ("rss", "pss"))
        print(
            f"{kind:<6} {options.gb:8.1f} {yardstick.wall:8.1f} {yardstick.cpu:6.1f} "
            f"{taken.wall:8.1f} {taken.cpu:6.1f} {ratio:6.2f} {taken.cpu / yardstick.cpu:6.2f} "
            f"{rss:7.0f} {pss:7.0f} {rounds[0][1].result['shards']:7}",
            flush=True,
        )


if __name__ == "__main__":
    main()
