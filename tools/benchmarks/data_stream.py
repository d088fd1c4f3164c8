"""Tokens/s of the data stream, beside `tokenizers` alone and `datasets.map`, and its start-up.

    python tools/benchmarks/data_stream.py [--text FILE] [--tokenizer tokenizer.json]
        [--rounds 5] [--seconds 4] [--sizes 200,2000] [--json FILE]

Each contestant is a child process that works in its turn alone; the order moves on by one from
round to round, so a slow moment of the machine meets all of them, and ratios are taken within a
round. A number behind a name is its threads or processes:

    tokenizers   encode_batch_fast over all documents, in calls of 1000; the ids stay in the library
    stream       PackedStream with as many workers, batches of 16 sequences of 1024; what was
                 tokenized ahead between the turns is taken before the clock starts
    datasets     Dataset.map as in transformers' run_clm.py: tokenize, then group into sequences of
                 1024, with as many processes

Beside tokens/s, tokens a second of processor time of the contestant and its processes: what is left
of a comparison on a machine with other work.

Start-up is measured in fresh interpreters, on corpora of the given sizes in MB. The text is the
standard library's where none is given. `datasets` and
transformers come with `pip install '.[bench]'`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SEQ_LEN = 1024
ROWS = 16
WIDTHS = (1, 2)
NAMES = [f"{kind} {width}" for kind in ("tokenizers", "stream", "datasets") for width in WIDTHS]
# (ours, its yardstick, the least ratio to reach)
RATIOS = [
    *((f"stream {width}", f"tokenizers {width}", 0.9) for width in WIDTHS),
    *((f"stream {width}", f"datasets {width}", 2.0) for width in WIDTHS),
]
START_UPS = 7
MAPPED_BYTES = 8_000_000
BATCH_BYTES = 64_000_000

# Seconds to go on for → tokens, seconds, seconds of processor time.
Turn = Callable[[float], tuple[int, float, float]]


def processor_s(pids: Sequence[int] = ()) -> float:
    """Processor time of this process, of its children that ended, and of some that have not."""
    total = sum(os.times()[:4])
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return total


def tokenizers_turn(documents: list[str], tokenizer: Path) -> Turn:
    """Turns of the library alone."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer))
    library.encode_special_tokens = True
    calls = [documents[begin : begin + 1000] for begin in range(0, len(documents), 1000)]
    place = 0

    def turn(seconds: float) -> tuple[int, float, float]:
        nonlocal place
        tokens, began, processor = 0, time.perf_counter(), processor_s()
        while time.perf_counter() - began < seconds:
            found = library.encode_batch_fast(calls[place % len(calls)], add_special_tokens=False)
            tokens += sum(map(len, found))
            place += 1
        return tokens, time.perf_counter() - began, processor_s() - processor

    return turn


def stream_turn(corpus: Path, tokenizer: Path, workers: int) -> Turn:
    """Turns of the stream."""
    from slurmllm.data.prefetch import PREFETCH_BATCHES
    from slurmllm.data.stream import PackedStream

    stream = PackedStream(spec(corpus, tokenizer), 0, 1, workers)
    pids = [worker.pid for worker in stream._workers]

    def turn(seconds: float) -> tuple[int, float, float]:
        for _ in range(2 * PREFETCH_BATCHES):
            stream.next_batch()
        tokens, began, processor = 0, time.perf_counter(), processor_s(pids)
        while time.perf_counter() - began < seconds:
            tokens += stream.next_batch().inputs.size
        return tokens, time.perf_counter() - began, processor_s(pids) - processor

    return turn


def datasets_turn(documents: list[str], tokenizer: Path, processes: int) -> Turn:
    """Turns of `datasets.map` as transformers' run_clm.py uses it: tokenize, then group."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    fast: Any = PreTrainedTokenizerFast
    library = fast(tokenizer_file=str(tokenizer))
    # Enough for the processes to be worth starting.
    copies = 1 + MAPPED_BYTES // sum(map(len, documents))
    data = datasets.Dataset.from_dict({"text": documents * copies})

    def tokenize(rows: dict[str, list[str]]) -> Any:
        return library(rows["text"])

    def group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {key: list(itertools.chain(*values)) for key, values in rows.items()}
        length = len(joined["input_ids"]) // SEQ_LEN * SEQ_LEN
        found = {
            key: [values[i : i + SEQ_LEN] for i in range(0, length, SEQ_LEN)]
            for key, values in joined.items()
        }
        return {**found, "labels": found["input_ids"].copy()}

    def mapped(rows: Any, function: Callable[..., Any], remove: list[str]) -> Any:
        return rows.map(
            function,
            batched=True,
            remove_columns=remove,
            load_from_cache_file=False,
            num_proc=processes if processes > 1 else None,
            new_fingerprint=f"turn{time.monotonic_ns()}",
        )

    def turn(seconds: float) -> tuple[int, float, float]:
        tokens, took, processor = 0, 0.0, 0.0
        while took < seconds:
            began, processor_began = time.perf_counter(), processor_s()
            done = mapped(mapped(data, tokenize, ["text"]), group, [])
            took += time.perf_counter() - began
            processor += processor_s() - processor_began
            tokens += len(done) * SEQ_LEN
        return tokens, took, processor

    return turn


def spec(corpus: Path, tokenizer: Path) -> Any:
    """The stream that is measured."""
    from slurmllm.data.spec import StreamSpec

    return StreamSpec([(corpus, 1.0)], tokenizer, SEQ_LEN, ROWS, seed=1)


def contestant(name: str, corpus: Path, tokenizer: Path) -> None:
    """A child: says that it is ready, then takes a turn for each line of its input."""
    kind, width = name.split()
    try:
        if kind == "stream":
            turn = stream_turn(corpus, tokenizer, int(width))
        else:
            import pyarrow.ipc

            documents = pyarrow.ipc.open_file(corpus).read_all()["text"].to_pylist()
            if kind == "tokenizers":
                turn = tokenizers_turn(documents, tokenizer)
            else:
                turn = datasets_turn(documents, tokenizer, int(width))
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    turn(0.5)
    print(json.dumps({"missing": None}), flush=True)
    for line in sys.stdin:
        print(json.dumps(turn(float(line))), flush=True)


def start_up(corpus: Path, tokenizer: Path) -> None:
    """A child: seconds from a fresh interpreter to the first batch of one worker."""
    began = time.perf_counter()
    from slurmllm.data.stream import PackedStream

    imported = time.perf_counter()
    with PackedStream(spec(corpus, tokenizer), 0, 1, num_workers=1) as stream:
        opened = time.perf_counter()
        stream.next_batch()
        first = time.perf_counter()
    print(json.dumps([imported - began, opened - imported, first - opened]))


def child(*arguments: str, threads: int = 1) -> subprocess.Popen[str]:
    """This file again, with some threads for the library."""
    variables = {
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
    }
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> Any:
    """The next line that a child says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"a child ended with exit code {process.wait()}")
    return json.loads(line)


class Rates(NamedTuple):
    """Of a contestant, in each round: tokens/s, and tokens a second of processor time."""

    wall: list[float]
    processor: list[float]


def throughput(corpus: Path, tokenizer: Path, rounds: int, seconds: float) -> dict[str, Rates]:
    """What each contestant reaches; the order moves on by one from round to round."""
    rates: dict[str, Rates] = {}
    children = {
        name: child(
            "--child", name, "--corpus", str(corpus), "--tokenizer", str(tokenizer),
            threads=int(name.split()[1]) if name.startswith("tokenizers") else 1,
        )
        for name in NAMES
    }  # fmt: skip
    try:
        for name, process in list(children.items()):
            if missing := answer(process)["missing"]:
                print(f"{name}: not measured: {missing}", file=sys.stderr)
                children.pop(name).wait()
            else:
                rates[name] = Rates([], [])
        for number in range(rounds):
            names = list(children)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                stdin = children[name].stdin
                assert stdin is not None
                stdin.write(f"{seconds}\n")
                stdin.flush()
                tokens, took, processor = answer(children[name])
                rates[name].wall.append(tokens / took)
                rates[name].processor.append(tokens / processor)
            print(f"  round {number + 1} of {rounds}", file=sys.stderr)
    finally:
        for process in children.values():
            process.kill()
            process.wait()
    return rates


def grown(corpus: Path, size: int, out: Path) -> Path:
    """A corpus of `size` bytes: the documents of another one, over and over."""
    import pyarrow as pa

    table = pa.ipc.open_file(pa.memory_map(str(corpus))).read_all()
    table = pa.concat_tables([table] * (1 + BATCH_BYTES // table.nbytes)).combine_chunks()
    with pa.ipc.new_file(str(out), table.schema) as writer:
        while out.stat().st_size < size:
            writer.write_table(table)
    return out


def start_ups(corpora: list[Path], tokenizer: Path) -> Iterator[tuple[Path, list[float]]]:
    """Corpus → median seconds of imports, opening, first batch."""
    found: dict[Path, list[list[float]]] = {corpus: [] for corpus in corpora}
    for _ in range(START_UPS):
        for corpus in corpora:
            process = child(
                "--child", "start-up", "--corpus", str(corpus), "--tokenizer", str(tokenizer)
            )
            found[corpus].append(answer(process))
            process.wait()
    for corpus, times in found.items():
        yield corpus, [statistics.median(column) for column in zip(*times, strict=True)]


def restoring(corpus: Path, tokenizer: Path) -> dict[str, Any]:
    """Bytes of a state, and seconds from a state to its next batch, near and far."""
    from slurmllm.data.state import merge_states
    from slurmllm.data.stream import PackedStream

    stream = PackedStream(spec(corpus, tokenizer), 0, 1)
    stream.next_batch()
    near = merge_states([stream.state()])
    far = {**near, "slots": [[10**9 + visit, piece, 0] for visit, piece, _ in near["slots"]]}
    seconds: dict[str, list[float]] = {"near": [], "far": []}
    for _ in range(9):
        for name, state in (("near", near), ("far", far)):
            began = time.perf_counter()
            stream.load_state(state)
            stream.next_batch()
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"state_bytes": len(json.dumps(near)), **medians}


def report(
    corpus: Path, tokenizer: Path, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Measure, and print as it comes."""
    rates = throughput(corpus, tokenizer, options.rounds, options.seconds)
    print(f"{'':14}{'tokens/s':>12}{'min':>12}{'max':>12}{'a processor s':>16}")
    for name, found in rates.items():
        columns = (statistics.median(found.wall), min(found.wall), max(found.wall))
        print(
            f"{name:14}" + "".join(f"{figure:12,.0f}" for figure in columns),
            f"{statistics.median(found.processor):15,.0f}",
        )
    ratios = {}
    for ours, other, least in RATIOS:
        if other not in rates:
            continue
        pairs = [
            [a / b for a, b in zip(mine, theirs, strict=True)]
            for mine, theirs in zip(rates[ours], rates[other], strict=True)
        ]
        wall, processor = map(statistics.median, pairs)
        ratios[f"{ours} / {other}"] = {"wall": wall, "processor": processor}
        print(
            f"{ours} / {other}: {wall:.3f} ({min(pairs[0]):.3f} to {max(pairs[0]):.3f}), by "
            f"processor time {processor:.3f}; target {least}"
        )
    restored = restoring(corpus, tokenizer)
    print(
        f"state of {ROWS} slots: {restored['state_bytes']} bytes; to the next batch "
        f"{restored['near']:.3f} s near the begin, {restored['far']:.3f} s after 10^9 documents a "
        "slot"
    )
    sizes = [int(size) for size in options.sizes.split(",") if size]
    corpora = [grown(corpus, size * 10**6, folder / f"{size}.arrow") for size in sizes]
    started = {}
    for path, times in start_ups(corpora, tokenizer):
        started[path.stem] = times
        print(
            f"start-up on {path.stem} MB: {sum(times[1:]):.3f} s to the first batch "
            f"(open {times[1]:.3f}, batch {times[2]:.3f}), after {times[0]:.3f} s of imports"
        )
    rows = {name: found._asdict() for name, found in rates.items()}
    return {"tokens_per_s": rows, "ratios": ratios, "restore": restored, "start_up_s": started}


def main() -> None:
    """Measure what the options say, or be one of the children."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="text file, paragraphs as documents")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument("--sizes", default="200,2000", help="MB; empty: no start-ups")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "start-up":
        start_up(options.corpus, options.tokenizer)
    elif options.child:
        contestant(options.child, options.corpus, options.tokenizer)
    else:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            corpus, tokenizer = folder / "corpus.arrow", options.tokenizer
            if options.text:
                build = ["data", "build", str(options.text), "--out", str(corpus)]
                subprocess.run([sys.executable, "-m", "slurmllm", *build], check=True)
            if not (options.text and tokenizer):
                from slurmllm.corpus.builtin import ensure_stdlib

                stdlib = ensure_stdlib(folder)
                corpus = corpus if options.text else stdlib[0]
                tokenizer = tokenizer or stdlib[1]
            found = report(corpus, tokenizer, options, folder)
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
