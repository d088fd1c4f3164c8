"""The wheel, installed into an empty environment, works without the checkout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import slurmllm
from slurmllm.config.schema import file_schema

ROOT = Path(__file__).resolve().parents[2]

Call = Callable[..., str]


def call(*command: str | Path, cwd: Path) -> str:
    # Nothing of the environment may lead to the checkout.
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of wheel and source archive, as `make dist` makes them."""
    folder = tmp_path_factory.mktemp("dist")
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    call(*command, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(archives: Path) -> Path:
    (path,) = archives.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel; its dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("venv")
    call(sys.executable, "-m", "venv", folder, cwd=folder)
    call(folder / "bin" / "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    # A folder in a .pth file: .pth files in it, such as the checkout's, are not read.
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("\n".join(folders))
    return folder / "bin" / "python"


def use(python: Path, folder: Path) -> None:
    """Use the installed package from an empty folder."""
    command = python.parent / "slurmllm"
    script = "import slurmllm; print(slurmllm.__file__, slurmllm.load_recipe('neox_20b').backend)"
    path, backend = call(python, "-c", script, cwd=folder).split()
    assert Path(path).is_relative_to(python.parent.parent)
    assert backend == "nxd"
    assert "neox_20b" in call(command, "recipes", cwd=folder)
    schema = json.loads(call(command, "recipes", "--schema", cwd=folder))
    assert schema == json.loads(json.dumps(file_schema("recipe")))
    plan = json.loads(
        call(command, "plan", "gpt3_125m", "--cluster", "p4d", "--nodes", "1", "--json", cwd=folder)
    )
    assert plan["candidates"][0]["fits"]
    dry = call(command, "submit", "tiny_neox", "--local", "--dry-run", "--json", cwd=folder)
    assert str(python) in json.loads(dry)["scripts"]["train"]
    assert str(ROOT) not in dry
    assert "fineweb_edu_10bt" in call(command, "data", "fetch", "--list", cwd=folder)


def test_the_installed_wheel_needs_no_checkout(python: Path, tmp_path: Path) -> None:
    use(python, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)  # torch's files, on a busy disk
def test_pip_installs_the_wheel_with_its_dependencies(wheel: Path, tmp_path: Path) -> None:
    call(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    options = ("--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt")
    call(python, "-m", "pip", "install", *options, wheel, cwd=tmp_path)
    call(python, "-m", "pip", "check", cwd=tmp_path)
    use(python, tmp_path)


def test_the_archives_are_complete_and_sound(archives: Path, wheel: Path) -> None:
    files = sorted(archives.iterdir())
    assert [file.name for file in files] == [
        f"slurmllm-{slurmllm.__version__}-py3-none-any.whl",
        f"slurmllm-{slurmllm.__version__}.tar.gz",
    ]
    call(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=archives)
    names = {*zipfile.ZipFile(wheel).namelist()}
    expected = {
        *(path.relative_to(ROOT) for path in (ROOT / "slurmllm").rglob("*")),
        *(Path("slurmllm/_shipped") / path.relative_to(ROOT) for path in shipped()),
    }
    missing = {str(path) for path in expected if "__pycache__" not in path.parts} - names
    assert {name for name in missing if not (ROOT / name).is_dir()} == set()


def shipped() -> list[Path]:
    """What is at the top of the tree: configuration, job bodies, and the README's figures."""
    folders = (ROOT / "configs", ROOT / "sbatch")
    images = re.findall(r'src="(docs/[^"]+)"', (ROOT / "README.md").read_text())
    assert images
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [*files, *(ROOT / image for image in images)]
