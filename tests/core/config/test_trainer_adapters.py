"""The adapters of configs/trainers: each resolves, and knows its trainer's files."""

import re
from pathlib import Path

import pytest

from slurmllm.core.config.profiles import TRAINERS, available, shipped_dir
from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise.progress import check_progress
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints

FOLDER = shipped_dir() / "configs" / TRAINERS
# Adapter → files of a checkpoint in the order in which they are written, and its step
FILES = {
    "torchtitan": (["checkpoint/step-500/__0_0.distcp", "checkpoint/step-500/.metadata"], 500),
    "megatron": (["iter_0000500/__0_0.distcp", "iter_0000500/metadata.json"], 500),
    "megatron_bridge": (["iter_0000500/metadata.json", "iter_0000500/train_state.pt"], 500),
    "olmo_core": (["step500/model_and_optim/.metadata", "step500/.metadata.json"], 500),
    "nemo": (
        [
            f"default/checkpoints/gpt--val_loss=0.00-step=9-consumed_samples=5120.0-last/{name}"
            for name in ("weights/__0_0.distcp", "weights/metadata.json")
        ],
        9,
    ),
    "hf_trainer": (["checkpoint-500/model.safetensors", "checkpoint-500/trainer_state.json"], 500),
    "axolotl": (["checkpoint-500/optimizer.pt", "checkpoint-500/trainer_state.json"], 500),
    "automodel": (["epoch_0_step_9/model/__0_0.distcp", "epoch_0_step_9/config.yaml"], 9),
    "litgpt": (["step-00000500/lit_model.pth", "step-00000500/model_config.yaml"], 500),
}


def adapter(name: str, folder: Path) -> RunConfig:
    recipe = folder / "mine.yaml"
    recipe.write_text(
        f"extends: {TRAINERS}/{name}\nname: mine\ncommand: {{run: python train.py}}\n"
    )
    return resolve(str(recipe), "local")


@pytest.mark.parametrize("name", [name for name in available(FOLDER) if name != "plain"])
def test_an_adapter_says_what_it_is_of(name: str, tmp_path: Path) -> None:
    recipe = adapter(name, tmp_path).recipe
    assert recipe.command.checkpoints is not None
    if name != "deepspeed":  # whose scripts print their losses themselves
        assert recipe.command.progress is not None
        check_progress(recipe.command.progress)
    comments = " ".join(re.findall(r"#(.*)", (FOLDER / f"{name}.yaml").read_text()))
    assert re.search("Ran here|From the (documentation|source of)", comments)
    assert re.search(r"\w+\.(py|qmd|md)\b", comments), "no source"
    assert "{run}/outputs" in comments, "no command line to begin with"


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_is_complete_with_its_last_file(name: str, tmp_path: Path) -> None:
    command = adapter(name, tmp_path).recipe.command
    assert command is not None
    run = RunDir(tmp_path / "run")
    (*before, last), step = FILES[name]
    for file in before:
        (run.path / "outputs" / file).parent.mkdir(parents=True)
        (run.path / "outputs" / file).write_bytes(b"x")
    assert [(c.step, c.complete) for c in list_trainer_checkpoints(run, command)] == [(step, False)]
    (run.path / "outputs" / last).write_bytes(b"x")
    assert [(c.step, c.complete) for c in list_trainer_checkpoints(run, command)] == [(step, True)]


def test_olmo_core_is_told_of_the_shared_file_system(tmp_path: Path) -> None:
    assert adapter("olmo_core", tmp_path).recipe.env == {"OLMO_SHARED_FS": "1"}


@pytest.mark.parametrize("ckpt_format", ["torch_dcp", "fsdp_dtensor"])
def test_the_other_formats_of_megatron_are_in_its_header(ckpt_format: str, tmp_path: Path) -> None:
    header = re.sub(r"\n\s*#", "", (FOLDER / "megatron.yaml").read_text())
    setting = re.search(rf"\b{ckpt_format}\b.*?completion_file: (\S+),", header)
    assert setting is not None
    command = adapter("megatron", tmp_path).recipe.command
    run = RunDir(tmp_path / "run")
    folder = run.path / "outputs/iter_0000500"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").touch()
    command = command.model_copy(update={"completion_file": setting[1]})
    assert not list_trainer_checkpoints(run, command)[0].complete
    (folder / ".metadata").touch()
    assert list_trainer_checkpoints(run, command)[0].complete


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("lightning", "lightning_logs/version_0/checkpoints/epoch=0-step={}.ckpt"),
        ("composer", "ep0-ba{}-rank0.pt"),
    ],
)
def test_a_file_of_torch_save_is_whole_with_its_end(name: str, file: str, tmp_path: Path) -> None:
    import torch

    command = adapter(name, tmp_path).recipe.command
    assert command is not None
    run = RunDir(tmp_path / "run")
    first, second = (run.path / "outputs" / file.format(step) for step in (10, 20))
    first.parent.mkdir(parents=True)
    torch.save({"weights": torch.ones(100)}, first)
    second.write_bytes(first.read_bytes()[:-100])
    checkpoints = list_trainer_checkpoints(run, command)
    assert [(entry.step, entry.complete) for entry in checkpoints] == [(10, True), (20, False)]
