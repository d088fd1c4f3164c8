import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmllm.core.errors import CodeError, DataError, NodeError, StorageError
from slurmllm.data.prefetch import PARENT_SIGNALS
from slurmllm.data.spec import StreamSpec
from slurmllm.data.stream import PackedStream

from .corpora import write_texts


def one_rank(corpus: Path, tokenizer: Path, workers: int = 1) -> PackedStream:
    return PackedStream(StreamSpec([(corpus, 1.0)], tokenizer, 24, 8, 1), 0, 1, workers)


@pytest.fixture
def stream(corpus: Path, tokenizer: Path) -> Iterator[PackedStream]:
    with one_rank(corpus, tokenizer) as stream:
        yield stream


def worker_pid(stream: PackedStream) -> int:
    (worker,) = stream._workers
    return worker.pid


def take_until_error(stream: PackedStream) -> None:
    for _ in range(1000):
        stream.next_batch()


def wait_until_gone(pid: int, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if not alive(pid):
            return True
        time.sleep(0.02)
    return False


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name: state, parent, …."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def alive(pid: int) -> bool:
    try:
        return stat(pid)[0] != "Z"
    except OSError:
        return False


def cpu_s(pid: int) -> float:
    user, system = stat(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_a_worker_is_light_bounded_and_ignores_signals_to_its_job(stream: PackedStream) -> None:
    # At once, while the interpreter starts, and again at work.
    for _ in range(2):
        for number in PARENT_SIGNALS:
            os.kill(worker_pid(stream), number)
        for _ in range(20):
            stream.next_batch()
    assert alive(worker_pid(stream))
    maps = Path(f"/proc/{worker_pid(stream)}/maps").read_text()
    assert "tokenizers" in maps
    assert "torch" not in maps
    # pools of every worker of a node would fight for its cores
    assert int(stat(worker_pid(stream))[17]) <= 8
    time.sleep(0.5)
    before = cpu_s(worker_pid(stream))
    time.sleep(0.5)
    assert cpu_s(worker_pid(stream)) - before < 0.1
    os.kill(worker_pid(stream), signal.SIGKILL)
    with pytest.raises(NodeError, match=r"\(pid \d+\) was killed by signal 9; .*memory"):
        take_until_error(stream)


def test_workers_do_not_load_torch() -> None:
    script = "import sys, slurmllm.data.prefetch, slurmllm.data.inspection"
    script += ", slurmllm.data.corpus.builtin"
    script += "; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_dropped_stream_ends_its_worker(corpus: Path, tokenizer: Path) -> None:
    stream = one_rank(corpus, tokenizer)
    pid = worker_pid(stream)
    del stream
    assert not alive(pid)


def test_a_corpus_cut_while_it_is_read(tmp_path: Path, tokenizer: Path) -> None:
    path = write_texts(tmp_path / "c.arrow", [f"{i} " + "word " * 2000 for i in range(500)])
    with one_rank(path, tokenizer) as stream:
        stream.next_batch()
        with path.open("r+b") as file:
            file.truncate(4096)
        with pytest.raises(StorageError, match=r"killed by SIGBUS: a corpus was truncated or"):
            take_until_error(stream)


def test_errors_of_the_worker_reach_the_parent(corpus: Path, tokenizer: Path) -> None:
    with one_rank(corpus, tokenizer, 2) as stream:
        state = stream.state()
        state["slots"][7] = [0, 0, 9999]
        stream.load_state(state)
        with pytest.raises(DataError, match=r"token 9999 of a part of .* start a new run"):
            stream.next_batch()


def test_faults_of_the_code_come_with_their_traceback(stream: PackedStream) -> None:
    (worker,) = stream._workers
    worker.begin([[0]], [0])  # a third of a position
    stream._readers = stream._workers
    with pytest.raises(CodeError, match=r"data worker failed:\nTraceback(.|\n)*Error"):
        stream.next_batch()


PARENT = """
import os, sys, time
from pathlib import Path
from slurmllm.data.spec import StreamSpec
from slurmllm.data.stream import PackedStream
if __name__ == "__main__":
    spec = StreamSpec([(Path(sys.argv[1]), 1.0)], Path(sys.argv[2]), 24, 8, 1)
    stream = PackedStream(spec, 0, 1, num_workers=1)
    if sys.argv[3] != "idle":
        stream.next_batch()
    if sys.argv[3] == "forked" and os.fork() == 0:
        time.sleep(60)  # holds the pipes open after the parent
    print(stream._workers[0].pid, flush=True)
    if sys.argv[3] == "exit":
        sys.exit(0)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["idle", "forked", "exit"])
def test_workers_end_with_a_parent(tmp_path: Path, corpus: Path, tokenizer: Path, how: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), str(corpus), str(tokenizer), how]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        pid = int(parent.stdout.readline())
        if how != "exit":
            parent.kill()
        parent.wait()
        parent.stdout.close()
        assert wait_until_gone(pid, 5)
    finally:
        if how == "forked":
            os.killpg(parent.pid, signal.SIGKILL)
