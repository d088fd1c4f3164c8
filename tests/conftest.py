"""What all tests share: a real Slurm where one may be had, and the environment kept clean."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from pathlib import Path

import hypothesis
import pytest
from training_rows import MakeFile, MakeRun, Row, write_rows

from slurmllm.core.run.rundir import RunDir

ROOT = Path(__file__).resolve().parent.parent
DEVCLUSTER = ROOT / "tools" / "devcluster"
LEFT_OUT = "long: `make test-all` runs it"
# More threads than that wait for each other on a busy machine; workers and jobs inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No pool of processes, each of which imports torch, for the few graphs that a test compiles.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Each of the suite's processes would look through all installed packages for plugins of pydantic.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
_COMMANDS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "sbatch")


# A machine with other work may be slow to make an example or to run it; that is no failure.
hypothesis.settings.register_profile(
    "steady", suppress_health_check=[hypothesis.HealthCheck.too_slow], deadline=None
)
hypothesis.settings.load_profile("steady")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURMLLM_RUNS", "SLURMLLM_CLUSTER", "SLURMLLM_LOCAL_NODES", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURMLLM_CONFIG", "/nonexistent/slurmllm.yaml")


@pytest.fixture(autouse=True, scope="session")
def _compiler_caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile into a folder of this run: torch's own, in /tmp, may be another processor's."""
    # The processes of tools/run_tests.py share what they compile.
    folder = Path(os.environ.get("SLURMLLM_TEST_CACHES") or tmp_path_factory.getbasetemp())
    for compiler in ("torchinductor", "triton"):
        os.environ[f"{compiler.upper()}_CACHE_DIR"] = str(folder / compiler)


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with SIGINT ignored, and children inherit that; the tests of
    # Ctrl-C need the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run, and what takes long."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if on_gpu and (reason := _no_gpu()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=f"no GPU here: {reason}"))
    if os.environ.get("SLURMLLM_TEST_ALL") != "1":
        for item in items:
            if item.get_closest_marker("long") is not None:
                item.add_marker(pytest.mark.skip(reason=LEFT_OUT))


def _no_gpu() -> str | None:
    import torch  # half a second, for the folders with such tests only

    if torch.cuda.is_available():
        return None
    built = torch.version.cuda
    return f"torch {torch.__version__} " + ("finds no device" if built else "has no CUDA")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were left to `make test-all`."""
    skipped = terminalreporter.stats.get("skipped", [])
    left_out = sum(LEFT_OUT in str(report.longrepr) for report in skipped)
    if left_out:
        terminalreporter.write_line(f"{left_out} long tests left to `make test-all`")


@pytest.fixture(scope="session")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The corpus of the standard library's texts and its tokenizer, made once for all processes."""
    from slurmllm.data.corpus.builtin import ensure_stdlib

    caches = os.environ.get("SLURMLLM_TEST_CACHES")
    folder = Path(caches) / "stdlib" if caches else tmp_path_factory.mktemp("stdlib")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return ensure_stdlib(folder)


@pytest.fixture(scope="session")
def inputs(stdlib: tuple[Path, Path]) -> tuple[str, ...]:
    """Corpus and tokenizer as --set options."""
    return (f"--set=data.corpus={stdlib[0]}", f"--set=data.tokenizer={stdlib[1]}")


@pytest.fixture(scope="session")
def layouts_searched_once() -> Iterator[None]:
    """Search the layouts of a request once: many tests of `plan` ask for the same."""
    from slurmllm.core.config.resolve import RunConfig
    from slurmllm.plan import choose_layout, explain, recipe_plan
    from slurmllm.plan.search import SearchResult, Unsupported, search

    results: dict[tuple[object, ...], SearchResult] = {}

    def search_once(
        config: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str] = ()
    ) -> SearchResult:
        key = (repr(vars(config)), nodes, unsupported, *fixed)
        if key not in results:
            results[key] = search(config, nodes, unsupported, fixed)
            if len(results) > 64:  # each may have 2,000 layouts
                del results[next(iter(results))]
        return results[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (choose_layout, explain, recipe_plan):
            patch.setattr(module, "search", search_once)
        yield


class DevCluster:
    """A running development cluster, by its command line."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def call(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, str(DEVCLUSTER), *arguments, "--dir", str(self.directory)],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @cached_property
    def slurm_conf(self) -> str:
        return self.call("env").split("SLURM_CONF=", 1)[1].split()[0].strip("'\"")


@pytest.fixture(scope="session")
def slurm_installed() -> None:
    """Skip without what a development cluster needs; fail if a real Slurm is required."""
    missing = [name for name in _COMMANDS if shutil.which(name, path=_path()) is None]
    reason = f"not installed: {', '.join(missing)}" if missing else ""
    if os.geteuid() != 0:
        reason = "a development cluster needs root"
    if reason:
        assert os.environ.get("SLURMLLM_REQUIRE_SLURM") != "1", f"Slurm is required here: {reason}"
        pytest.skip(f"no real Slurm: {reason}")


@pytest.fixture(scope="session")
def new_cluster(slurm_installed: None) -> Callable[[Path], DevCluster]:
    """A state directory → its development cluster, not up yet."""
    return DevCluster


@pytest.fixture(scope="session")
def _cluster(
    new_cluster: Callable[[Path], DevCluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DevCluster]:
    cluster = new_cluster(tmp_path_factory.mktemp("devcluster") / "state")
    cluster.call("up", "--nodes", "5", "--kill-wait", "30")  # Slurm's own default
    try:
        yield cluster
    finally:
        cluster.call("down")


@pytest.fixture
def slurm(_cluster: DevCluster, monkeypatch: pytest.MonkeyPatch) -> DevCluster:
    """A real Slurm with five nodes, its commands pointed at by the environment."""
    monkeypatch.setenv("SLURM_CONF", _cluster.slurm_conf)
    return _cluster


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run under `<tmp_path>/runs`, one metrics file for each list of rows."""

    def make(name: str, *attempts: Iterable[Row]) -> RunDir:
        run = RunDir(tmp_path / "runs" / name)
        run.path.mkdir(parents=True)
        run.config.write_text("recipe: {}\n")
        for number, rows in enumerate(attempts):
            write_rows(run.metrics(number), rows)
        return run

    return make


@pytest.fixture
def make_file(tmp_path: Path) -> MakeFile:
    """Write a metrics file that belongs to no run."""
    return lambda name, rows: write_rows(tmp_path / f"{name}.jsonl", rows)
