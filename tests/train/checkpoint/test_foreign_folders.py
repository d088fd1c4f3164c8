"""Folders that are no whole model, or hold more than one: adapters, pointers, generation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurmllm.cli.main import cli
from train.checkpoint import hub

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 493443\n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def test_generation_config_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = hub.save(hub.small("llama"), tmp_path / "source")
    content = '{"temperature": 0.6, "eos_token_id": [3, 5]}'
    (source / "generation_config.json").write_text(content)
    done = run("checkpoint", "import", source, "--out", "ours", "--json")
    assert json.loads(done.stdout)["tokenizer"] == []
    assert run("checkpoint", "export", "ours", "--out", "back").exit_code == 0
    assert Path("back/generation_config.json").read_text() == content
    (source / "generation_config.json").write_bytes(POINTER)
    done = run("checkpoint", "import", source, "--out", "other")
    assert done.exit_code == 2
    assert "a Git LFS pointer" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        lambda path: ("checkpoint", "import", path, "--out", "out"),
        lambda path: ("evaluate", path, "--task", "validation"),
    ],
)
def test_an_adapter_is_no_model(
    arguments: Callable[[Path], tuple[object, ...]], tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").touch()
    done = run(*arguments(tmp_path))
    assert done.exit_code == 2
    assert "an adapter (LoRA), not a model; merge it" in done.stderr


def test_pointers_are_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tokenizer.json", "a.parquet", "a.jsonl", "a.txt"):
        Path(name).write_bytes(POINTER)
    Path("b.txt").write_text("text")
    assert run("data", "build", "b.txt", "--out", "c.arrow").exit_code == 0
    for arguments in (
        ("data", "inspect", "c.arrow", "--tokenizer", "tokenizer.json"),
        *(
            ("data", "build", name, "--out", "d.arrow")
            for name in ("a.parquet", "a.jsonl", "a.txt")
        ),
    ):
        done = run(*arguments)
        assert done.exit_code == 2
        assert "a Git LFS pointer, not the file; fetch it with `git lfs pull`" in done.stderr
