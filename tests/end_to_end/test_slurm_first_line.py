"""The README's first line on a real Slurm: the data come from a server, the steps are rehearsed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from corpus.data_server import data_server
from corpus.published import mirror_configuration, publish_wikipedia
from end_to_end.bench import Bench
from end_to_end.slurm_runs import Cluster, wait

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).resolve().parent.parent.parent
# A node of the development cluster has one CPU, so one worker; four of them are the pipeline.
REHEARSED = (
    "--cluster=local",
    "--set=backend=rehearsal",
    "--set=env.SLURMLLM_REHEARSAL_STEP_S=0.05",
    "--set=parallel.tensor=1",
    "--set=parallel.pipeline=4",
    "--set=train.micro_batch=1",
    "--set=parallel.sequence=false",
    "--set=train.global_batch=8",
    "--set=model.seq_len=128",
    "--set=train.steps=12",
    "--set=optim.warmup_steps=2",
    "--set=checkpoint.every_steps=6",
)


def test_neox_20b_on_four_nodes_from_a_fresh_copy(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "slurmllm", "configs", "sbatch"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in names:
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / "clone" / name)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "clone"))
    with data_server() as server, Bench(tmp_path / "runs") as bench:
        publish_wikipedia(server, tmp_path / "published")
        # As a connection does it that breaks off in the middle.
        server.faults["wiki/my-gpt2_text_document.bin"] = {"break_at": [None, 5000, None]}
        user = mirror_configuration(server, tmp_path / "user" / "config.yaml")
        monkeypatch.setenv("SLURMLLM_CONFIG", str(user))
        line = ("submit", "neox_20b", "--nodes=4", "--name=neox", *REHEARSED)
        refused = bench.call(*line, code=2)
        assert "slurmllm data fetch wikipedia_gpt2" in refused
        sent = bench.call(*line, "--fetch", "--json")
        assert "wikipedia_gpt2: 5 files" in sent
        assert len(server.asked("wiki/my-gpt2_text_document.bin")) == 3
        wait(bench, "neox", "done", "stopped")
        shown = bench.status("neox")
    assert (shown["state"], shown["step"], shown["nodes"]) == ("done", 12, 4)
    assert shown["trial"] is False
    data = json.loads((tmp_path / "runs" / "neox" / "data.json").read_text())
    folder = tmp_path / "runs" / ".data" / "wikipedia_gpt2"
    assert str(folder / "my-gpt2_text_document") in json.dumps(data)
    code = "import slurmllm; print(slurmllm.__file__)"
    used = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ,
        check=True,
        capture_output=True,
        text=True,
    )
    assert used.stdout.startswith(str(tmp_path / "clone"))
