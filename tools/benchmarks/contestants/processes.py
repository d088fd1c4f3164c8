"""The contestants' processes as `train_speed.py` sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import slurmllm
from contestants.task import Task
from slurmllm.train.backends.native.environment import variables

# Files of this folder, by the contestant's name.
CONTESTANTS = {
    "ours": "ours",
    "trainer": "hf_trainer",
    "litgpt": "litgpt_loop",
    "loop": "compiled_loop",
}
PRODUCTS_A_TURN = 12


class Surroundings(NamedTuple):
    """What the processes are given."""

    folder: Path  # for logs and compiled graphs
    pythons: Mapping[str, str]  # interpreters of contestants that have one of their own
    share_variables: bool  # whether all get the environment variables of ours


class Contestant:
    """A child process, the seconds of each round's steps, and why it cannot run here, if so."""

    def __init__(
        self, module: str, task: Task, python: str, env: Mapping[str, str], log: Path
    ) -> None:
        self.missing: str | None = None
        self.seconds: list[float] = []
        self.loss = float("nan")
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [python, "-m", "contestants.child", module],
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._send(json.dumps(asdict(task)))

    def turn(self, steps: int) -> dict[str, Any]:
        """Let it run so many counted steps and wait for its answer."""
        self._send(str(steps))
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text().splitlines()[-15:])
            raise SystemExit(f"a contestant ended with {self._process.wait()}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        self.missing = answer.get("missing")
        return answer

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # told when its answer is read
            pass

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def started(
    task: Task, names: list[str], surroundings: Surroundings
) -> Iterator[tuple[dict[str, Contestant], Contestant]]:
    """All contestants, compiled and warm, and the matrix products; ended on the way out."""
    folder = surroundings.folder
    slurmllm_parents = [Path(path).parent for path in slurmllm.__path__]
    common = {
        # For contestants with an interpreter of their own.
        "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parents[1], *slurmllm_parents))),
        "OMP_NUM_THREADS": str(task.threads),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    with ExitStack() as stack:

        def start(name: str, module: str, env: Mapping[str, str]) -> Contestant:
            python = surroundings.pythons.get(name, sys.executable)
            contestant = Contestant(module, task, python, {**common, **env}, folder / f"{name}.log")
            stack.callback(contestant.stop)
            return contestant

        contestants = {}
        for name in names:
            contestants[name] = start(
                name, CONTESTANTS[name], _worker_variables(name, task, surroundings)
            )
            # One after the other: compilers run on all cores.
            contestants[name].turn(2)
            told = contestants[name].missing
            print(f"  {name}: {'missing: ' + told if told else 'ready'}", file=sys.stderr)
        products = start("products", "products", {})
        products.turn(PRODUCTS_A_TURN)
        yield contestants, products


def _worker_variables(name: str, task: Task, surroundings: Surroundings) -> dict[str, str]:
    """What the native backend's workers get from the launcher."""
    if name != "ours" and not surroundings.share_variables:
        return {}
    from contestants.ours import config_of

    return {key: variable.value for key, variable in variables(config_of(task)).items()}
