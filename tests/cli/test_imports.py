"""Wings and rooms import one way (docs/developing/architecture.md); login nodes load no torch."""

import ast
import importlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurmllm

ROOT = Path(slurmllm.__file__).parent
WINGS = ("core", "plan", "data", "train", "launch", "analysis", "cli")


def imported(source: Path) -> Iterator[tuple[str, ...]]:
    """Yield the modules of slurmllm that a module imports, inside functions too, as path parts."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            package, *parts = name.split(".")
            if package == "slurmllm" and parts:
                yield tuple(parts)


def room_of(parts: tuple[str, ...]) -> str:
    """Return `WING/ROOM`; of train, data and plan, whose own modules are a room, the wing."""
    wing, *names = parts
    is_room = bool(names) and slurmllm._WING_OF_ROOM.get(names[0]) == wing
    return "/".join(parts[:2]) if is_room else wing


def test_a_wing_imports_only_the_wings_above_it() -> None:
    checked = 0
    for source in ROOT.rglob("*.py"):
        wing = source.relative_to(ROOT).parts[0]
        if wing in WINGS:
            for parts in imported(source):
                if parts[0] in WINGS:
                    checked += 1
                    assert WINGS.index(parts[0]) <= WINGS.index(wing), f"{source}: {parts}"
    assert checked > 1000  # the imports are seen at all


def test_no_room_imports_one_that_imports_it() -> None:
    direct: dict[str, set[str]] = defaultdict(set)
    for source in ROOT.rglob("*.py"):
        room = room_of(source.relative_to(ROOT).with_suffix("").parts)
        direct[room] |= {room_of(parts) for parts in imported(source)} - {room}
    assert direct["launch/submit"] >= {"core/config", "core/run"}
    reached = {room: set(targets) for room, targets in direct.items()}
    for _ in direct:
        for targets in reached.values():
            targets.update(*(direct.get(target, ()) for target in tuple(targets)))
    assert {room for room, targets in reached.items() if room in targets} == set()


@pytest.mark.parametrize("name", ["plugins", "train.hooks", "model", "config.families"])
def test_names_that_plugins_import_still_work(name: str) -> None:
    wing = {"plugins": "core.", "model": "train.", "config.families": "core."}.get(name, "")
    new = importlib.import_module(f"slurmllm.{wing}{name}")
    if wing:
        with pytest.warns(DeprecationWarning, match="has moved to slurmllm"):
            module = importlib.import_module(f"slurmllm.{name}")
    else:
        module = importlib.import_module(f"slurmllm.{name}")
    assert module is new
    assert new.__spec__.name == f"slurmllm.{wing}{name}"


COUNT = """
import sys
from slurmllm.cli.main import cli
code = 0
try:
    cli(sys.argv[1:], prog_name="slurmllm")
except SystemExit as ending:
    code = ending.code
heavy = sorted({name.partition(".")[0] for name in sys.modules} & set(sys.stdin.read().split()))
print("loaded", ",".join(heavy) or "nothing", "code", code, file=sys.stderr)
"""


LIGHT = "torch transformers matplotlib tensorboard numpy pandas pyarrow"


@pytest.mark.parametrize(
    ("arguments", "among"),
    [
        ("--help", "torch numpy pyarrow pydantic rich yaml tokenizers submitit asyncio"),
        ("recipes neox_20b --explain", LIGHT),
        ("submit neox_20b --nodes 4 --dry-run --fetch", LIGHT),
        ("submit neox_20b --nodes 4 --dry-run --fetch parallel=auto", LIGHT),
        ("status", LIGHT),
        ("plan llama2_70b --nodes 4096", "torch matplotlib pandas pyarrow"),
    ],
)
def test_the_login_node_loads_little(arguments: str, among: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *arguments.split()],
        input=among,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert done.stderr.strip().splitlines()[-1] == "loaded nothing code 0"


def test_resume_loads_no_numpy() -> None:
    script = "import sys, slurmllm.launch.submit.resume; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_module_but_the_workers_loads_without_torch() -> None:
    script = (
        "import pkgutil, importlib, sys, slurmllm\n"
        "worker = ('slurmllm.train', 'slurmllm.train.model', 'slurmllm.train.backends.native.', "
        "'slurmllm.train.backends.nxd.', 'slurmllm.train.backends.process_group', "
        "'slurmllm.train.checkpoint', 'slurmllm.__main__', "
        "'slurmllm.launch.diagnose.allreduce', 'slurmllm.analysis.calibrate.measuring', "
        "'slurmllm.analysis.calibrate.worker', "
        "'slurmllm.analysis.evaluate.validation_loss')\n"
        "light = ('slurmllm.train.backends.native.environment', "
        "'slurmllm.train.backends.nxd.environment', "
        "'slurmllm.analysis.evaluate.validation_text')\n"
        "for module in pkgutil.walk_packages(slurmllm.__path__, 'slurmllm.'):\n"
        "    if not module.name.startswith(worker) or module.name in light:\n"
        "        importlib.import_module(module.name)\n"
        "assert 'slurmllm.launch.supervise.supervisor' in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


_ENTRY = """
import atexit, os, sys, types
import slurmllm.train.worker
from slurmllm.cli.main import cli
sys.modules["torch"] = types.ModuleType("torch")
atexit.register(os.abort)  # as a thread of C++ that outlives the interpreter does
slurmllm.train.worker.run_worker = lambda *_: print("saved", end="") or 75
cli(["worker", ".", "--stage=train", "--attempt=0"])
"""


def test_what_torch_does_at_the_interpreters_end_changes_no_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", _ENTRY], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (75, "saved", "")
