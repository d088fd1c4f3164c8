"""The wheel works without the checkout, and the Containerfile builds from what it copies."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import slurmllm
from slurmllm.core.config.schema import file_schema

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


_BUILDERS = {"podman": ("info",), "buildah": ("info",), "docker": ("info",)}


def steps() -> list[tuple[str, str]]:
    """The instructions with their arguments, without comments and line breaks."""
    text = (ROOT / "Containerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "")
    pairs = (line.partition(" ") for line in text.splitlines() if line)
    return [(name, arguments.strip()) for name, _, arguments in pairs]


def copied() -> list[tuple[list[str], str]]:
    lines = (shlex.split(arguments) for name, arguments in steps() if name == "COPY")
    return [(line[:-1], line[-1]) for line in lines if not line[0].startswith("--from=")]


def test_what_it_copies_is_there_and_builds_the_wheel(tmp_path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for sources, target in copied():
        for source in sources:
            assert source.split("/")[0] not in ignored
            path, into = ROOT / source, tmp_path / target
            if path.is_dir():
                shutil.copytree(path, into, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                into = into / path.name if target.endswith("/") else into
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, tmp_path / path.name if target == "./" else into)
    (build,) = (rest for name, rest in steps() if name == "RUN" and rest.startswith("pip wheel"))
    command = shlex.split(build.replace("/wheels", str(tmp_path / "out")))
    # Without a network: with the builder that is installed here.
    command = [sys.executable, "-m", *command, "--no-build-isolation"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert len([*(tmp_path / "out").glob("slurmllm-*.whl")]) == 1


def test_its_shell_is_sound() -> None:
    for name, arguments in steps():
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", arguments], check=True)
            command = [Path(sys.executable).parent / "shellcheck", "--shell=sh", "-"]
            subprocess.run(command, input=arguments, text=True, check=True)


def builder() -> str:
    reasons = []
    for name, arguments in _BUILDERS.items():
        if shutil.which(name) is None:
            reasons.append(f"no {name}")
            continue
        done = subprocess.run([name, *arguments], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return name
        reasons.append((done.stderr.strip().splitlines() or [f"{name} fails"])[-1])
    pytest.skip(f"nothing builds images here: {'; '.join(reasons)}")


@pytest.mark.long
def test_the_image_of_the_cpu_is_built_and_plans() -> None:
    program = builder()
    tag = "slurmllm-test"
    command = [program, "build", "--tag", tag, "--build-arg", "DEVICE=cpu"]
    subprocess.run([*command, "--file", ROOT / "Containerfile", ROOT], check=True)
    if program == "buildah":  # builds only
        return
    run = [program, "run", "--rm", tag, "slurmllm", "plan", "neox_20b", "--nodes", "4"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert "neox_20b on 4 nodes" in done.stdout
