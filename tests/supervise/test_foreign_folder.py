"""A run that is submitted from another user's folder imports nothing from there."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.bench import SMALL, Bench
from train.gang import make_data


def test_modules_of_the_working_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, tokenizer = make_data(tmp_path)
    folder, imported = tmp_path / "folder", tmp_path / "imported"
    folder.mkdir()
    for name in ("click", "numpy", "pydantic", "yaml", "logging"):
        planted = f"import os\nwith open({str(imported)!r}, 'a') as f: f.write('{name}')\n"
        (folder / f"{name}.py").write_text(planted)
    monkeypatch.chdir(folder)
    with Bench(tmp_path / "runs") as bench:
        bench.call(
            "submit",
            "tiny_neox",
            "--nodes=2",
            "--local",
            "--set=backend=rehearsal",
            *SMALL,
            "--set=train.compile=false",
            "--set=model.vocab_size=512",
            # Else the run may be over before the fault injector has started.
            "--set=env.SLURMLLM_REHEARSAL_STEP_S=0.2",
            f"--set=data.corpus={corpus}",
            f"--set=data.tokenizer={tokenizer}",
            "--name=r",
        )
        shown = bench.call("drill", "r", "--kinds=worker", "--json")
    assert '"passed": true' in shown
    assert not imported.exists()
