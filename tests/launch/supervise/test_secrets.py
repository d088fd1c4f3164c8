"""A secret of a run reaches its workers and nothing else, and a run imports nothing of its folder.

One run shows both: it is submitted and drilled from a folder of another user.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.bench import SLOWLY, SMALL, Bench

RECORDING = Path(__file__).with_name("recording")
CANARY = "hf_cAnArY-7d1f"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path / "runs") as bench:
        yield bench


def files_with(text: str, folder: Path) -> set[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    return {str(path.relative_to(folder)) for path in files if text.encode() in path.read_bytes()}


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that modules planted in the working folder write to."""
    folder, imported = tmp_path / "folder", tmp_path / "imported"
    folder.mkdir()
    for name in ("click", "numpy", "pydantic", "yaml", "logging"):
        planted = f"import os\nwith open({str(imported)!r}, 'a') as f: f.write('{name}')\n"
        (folder / f"{name}.py").write_text(planted)
    monkeypatch.chdir(folder)
    return imported


def test_only_workers_have_it_and_only_one_file(
    bench: Bench, inputs: tuple[str, ...], imported: Path, tmp_path: Path
) -> None:
    records = tmp_path / "records"
    records.mkdir()
    variables = {"HF_TOKEN": CANARY, "PYTHONPATH": RECORDING, "RECORDS": records}
    settings = (f"--set=env.{name}={value}" for name, value in variables.items())
    options = ("--local", *SMALL, *SLOWLY, *inputs, *settings)
    submit = ("submit", "tiny_neox", "--nodes=1", *options)
    shown = bench.look(*submit, "--dry-run", "--json")
    shown += bench.look(*submit, "--dry-run")
    shown += bench.call(*submit, "--name=r")
    run = tmp_path / "runs" / "r"
    seen = {path.name for path in records.iterdir()}
    assert {"worker 0 hf_c", "supervise - none", "launch - none"} <= seen
    # Those of the workers' connections, one for each start.
    secrets = {name.removeprefix("secret ") for name in seen if name.startswith("secret ")}
    assert secrets
    for secret in secrets:
        assert secret not in shown
        assert files_with(secret, run) == set()
    assert files_with(CANARY, run) == {"secrets.json"}
    assert (run / "secrets.json").stat().st_mode & 0o777 == 0o600
    assert bench.node("r", 0, "local0")["environment"]["HF_TOKEN"] == "***"
    drilled = bench.call("drill", "r", "--kinds=worker", "--keep", "--json")
    shown += drilled
    assert json.loads(drilled[drilled.index("{") :])["drills"][0]["passed"]
    for verb in (("status", "r", "--json"), ("logs", "r"), ("report", "r", "--no-files", "--json")):
        shown += bench.call(*verb)
    assert CANARY not in shown
    folders = {path.name for path in run.parent.glob("r-drill-*")}
    assert folders
    expected = {"r/secrets.json", *(f"{name}/secrets.json" for name in folders)}
    assert files_with(CANARY, run.parent) == expected
    assert not imported.exists()
