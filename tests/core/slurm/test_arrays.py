"""Calls in processes of this machine and in job arrays, whose folders another user can reach."""

import operator
import os
import pickle
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmllm.core.errors import StorageError
from slurmllm.core.slurm import arrays
from slurmllm.core.slurm.arrays import ArrayRequest, SlurmOptions, map_calls
from slurmllm.core.slurm.processes import CallProcess


class Planted:
    """Its pickle writes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


class Job:
    """A job of submitit: its result is a pickle in the array's folder."""

    def __init__(self, folder: Path) -> None:
        self.paths = SimpleNamespace(folder=folder, stderr=folder / "log.err")

    def result(self) -> Any:
        return pickle.loads((self.paths.folder / "result.pkl").read_bytes())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder to another user")
def test_results_in_another_user_s_folder_are_not_read(tmp_path: Path) -> None:
    folder, mark = tmp_path / "array-x", tmp_path / "code ran"
    folder.mkdir(mode=0o700)
    (folder / "result.pkl").write_bytes(pickle.dumps("fine"))
    assert arrays._result(Job(folder)) == "fine"
    (folder / "result.pkl").write_bytes(pickle.dumps(Planted(mark)))
    os.chown(folder, 65534, 65534)
    with pytest.raises(StorageError, match=r"array-x: .*it belongs to .*65534.*they run code"):
        arrays._result(Job(folder))
    assert not mark.exists()


def local_results(
    function: Callable[..., Any], arguments: list[tuple[Any, ...]], logs: Path
) -> dict[int, Any]:
    names = [f"call_{index}" for index, _ in enumerate(arguments)]
    calls = map_calls(function, arguments, names=names, logs=logs, at_once=2, on_poll=lambda: None)
    return dict(calls)


def test_calls_in_processes(tmp_path: Path) -> None:
    results = local_results(operator.truediv, [(6, 2), (1, 0), (4, 2)], tmp_path)
    assert (results[0], results[2]) == (3, 2)
    assert "ended with exit code 1; see" in results[1].message
    (log,) = tmp_path.glob("call_1-*.log")
    assert "ZeroDivisionError" in log.read_text()
    assert local_results(signal.raise_signal, [(9,)], tmp_path)[0].signal == 9


def test_nothing_that_others_put_next_to_a_log_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    process = CallProcess((operator.truediv, (1, 1)), tmp_path / "logs" / "call.log", None)
    while not process.done():
        time.sleep(0.01)
    for suffix in (".request", ".outcome"):
        process.log.with_suffix(suffix).write_bytes(pickle.dumps(Planted(tmp_path / "code ran")))
    assert "ended with exit code 0" in process.result().message
    assert not (tmp_path / "code ran").exists()


def test_an_array_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Path, dict[str, Any]]] = []
    setups: list[str] = []

    class Executor:
        def __init__(self, folder: str, **options: Any) -> None:
            made.append((Path(folder), options))

        def update_parameters(self, **parameters: Any) -> None:
            setups.append("\n".join(parameters["slurm_setup"]))

        def map_array(self, function: Any, *arguments: Any) -> list[Any]:
            return [SimpleNamespace(job_id="7_0", done=lambda: True)]

    monkeypatch.setattr(arrays, "_POLL_S", 0)
    monkeypatch.setattr(arrays, "_result", lambda job: "fine")
    monkeypatch.setattr("submitit.AutoExecutor", Executor)
    profile = SlurmOptions(
        setup=("module load cuda",),
        python="/my/python",
        directives={"gres": "gpu:1"},
        container=lambda folders: ["apptainer", "exec", f"--bind={folders[0]}", "/a.sif"],
    )
    for options in (SlurmOptions(), profile):
        array = ArrayRequest("n", options, "", "")
        request = {"logs": tmp_path / "logs" / "data", "at_once": 1, "on_poll": lambda: None}
        assert list(map_calls(print, [("x",)], array=array, **request)) == [(0, "fine")]
    (first, parameters), (second, with_profile) = made
    assert first != second
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    # Not the modules of the working directory, which may be another user's.
    assert parameters["slurm_python"].endswith(" -P")
    words = f"apptainer exec --bind={tmp_path} /a.sif /my/python -P"
    assert with_profile["slurm_python"] == words
    assert "ulimit -S -c 0" in setups[0]
    assert "cluster.setup:" not in setups[0]
    assert "'module load cuda'" in setups[1]
    assert setups[1].endswith("|| exit 2")
