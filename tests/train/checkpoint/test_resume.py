"""The newest checkpoint that verifies, else the one before, and what was wrong with the others."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import call, refused
from made_records import save_attempt, save_skips, save_submission

from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.config.resolve import change
from slurmllm.core.errors import CheckpointError, RunError, StorageError
from slurmllm.core.run.artifact_records import DataRecord
from slurmllm.core.run.records import Event, SkippedBatches
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise.policy import is_transient
from slurmllm.train.checkpoint.catalogue import (
    invalidation_reason,
    newest_verified,
    require_recorded,
)
from slurmllm.train.checkpoint.folder import describe, file_faults, read_manifest
from slurmllm.train.checkpoint.resume import Resumable
from slurmllm.train.checkpoint.state import (
    TRAIN_STATE,
    TrainState,
    fingerprint,
    fingerprint_differences,
    model_differences,
    model_fields,
    require_same_settings,
    training_settings,
)
from train.checkpoint.pretend import CONFIG, FINGERPRINT, PretendGang, find, save, save_at, state
from train.gang import small_config


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)


def test_newest(run: RunDir, tmp_path: Path) -> None:
    assert find(run) == Resumable(state(20), ())
    run.path.rename(tmp_path / "moved")
    assert find(RunDir(tmp_path / "moved"), world=1) == Resumable(state(20), ())
    assert find(run) == Resumable(None, ())


@pytest.mark.parametrize(
    ("setting", "is_said"),
    [
        *(("optim.lr=0.5", True), ("optim.weight_decay=0.7", True), ("train.z_loss=0.1", True)),
        *(("optim.betas=[0.5, 0.99]", True), ("train.precision=bf16", True)),
        *(
            ("guard.factor=7.0", True),
            ("optim.grad_clip=0.3", True),
            ("train.micro_batch=1", False),
        ),
        *(("train.log_every=3", False), ("slurm.signal_lead_s=77", False)),
    ],
)
def test_settings_that_a_checkpoint_was_not_trained_with(setting: str, is_said: bool) -> None:
    trained = state(10).model_copy(update={"settings": training_settings(CONFIG.recipe)})
    stored = TrainState.model_validate_json(trained.model_dump_json())
    assert stored.changed_settings(CONFIG.recipe) == ""
    recipe, path = change(CONFIG, None, [setting]).recipe, setting.partition("=")[0]
    message = stored.changed_settings(recipe)
    assert (f"what step 10 was trained with: {path} " in message) is bool(message) is is_said
    assert state(10).changed_settings(recipe) == "", "of an older version"


def test_a_resume_says_what_differs(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    settings = {**training_settings(CONFIG.recipe), "optim.lr": 0.5, "hooks": {"a": {"every": 2}}}
    saved = state(30).model_copy(update={"settings": settings})
    PretendGang().all(lambda b: save(run, b, saved, 0))
    assert find(run).state == saved
    require_same_settings(run, CONFIG.recipe, run.checkpoint(30))
    lines = [line for line in caplog.messages if "step 30 was trained with: optim.lr 0.5" in line]
    assert len(lines) == 2, "of the first worker, and of the verb"
    assert "hooks {'a': {'every': 2}} → {}" in lines[0]


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("shard_1", truncate, "step 20: shard_1 has 999 bytes instead of 1000"),
        ("shard_0", flip, "step 20: shard_0 does not match its checksum"),
        ("shard_1", Path.unlink, "step 20: shard_1 cannot be read: No such file or directory"),
        ("manifest.json", Path.unlink, "step 20: step_00000020 has no manifest.json"),
        ("manifest.json", truncate, "is damaged"),
    ],
)
def test_an_older_one(run: RunDir, name: str, damage: Callable[[Path], None], reason: str) -> None:
    if (name, damage) == ("manifest.json", truncate):
        truncate(run.checkpoint(20) / name)  # the newline at the end is no loss
    damage(run.checkpoint(20) / name)
    resumable = find(run)
    assert resumable.state == state(10)
    assert len(resumable.skipped) == 1
    assert reason in resumable.skipped[0]


def test_none_verifies(run: RunDir) -> None:
    truncate(run.checkpoint(10) / "shard_0")
    flip(run.checkpoint(20) / "shard_1")
    with pytest.raises(CheckpointError) as caught:
        find(run)
    for part in ("step 10: shard_0 has", "step 20: shard_1 does", "move the folder away"):
        assert part in str(caught.value)


def test_another_model_s_checkpoint(run: RunDir) -> None:
    other = {**FINGERPRINT, "model.hidden_size": 128, "data.corpus": "corpus-b"}
    with pytest.raises(RunError) as caught:
        find(run, fingerprint=other)
    assert "model.hidden_size: the checkpoint has 64, the run 128" in str(caught.value)
    assert "data.corpus: the checkpoint has 'corpus-a', the run 'corpus-b'" in str(caught.value)
    assert "train.seed" not in str(caught.value)


def test_a_field_that_only_one_side_knows(run: RunDir) -> None:
    with pytest.raises(RunError, match=r"model\.new: the checkpoint has None, the run 1"):
        find(run, fingerprint={**FINGERPRINT, "model.new": 1})


def test_only_sizes_are_compared_where_checksums_are_not_wanted(run: RunDir) -> None:
    flip(run.checkpoint(20) / "shard_0")
    assert newest_verified(run, checksums=False) == (run.checkpoint(20), [])
    assert newest_verified(run)[0] == run.checkpoint(10)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("saved_at", "NaN"),
        ("save_s", "Infinity"),
        ("step", str(1 << 63)),
        ("tokens", "1" + "0" * 5000),
        ("files", "[]"),
    ],
)
def test_values_that_no_save_writes(run: RunDir, field: str, value: str) -> None:
    path = run.checkpoint(20) / "manifest.json"
    values = json.loads(path.read_text())
    del values[field]
    text = json.dumps(values)
    path.write_text(text[:-1] + f', "{field}": {value}}}')
    assert find(run).state == state(10)
    run.config.write_text("recipe: x\n")
    for verb in (["verify"], ["list"], ["list", "--verify", "--json"]):
        done = call("checkpoint", *verb, run.path)
        assert done.exit_code == (4 if verb == ["verify"] else 0), done.output
        assert "is damaged" in done.stdout.replace("\n", " ")


def test_a_folder_of_a_step_beyond_64_bits(run: RunDir) -> None:
    (run.checkpoints / f"step_{1 << 63}").mkdir()
    (run.checkpoints / f"step_{'9' * 200}").mkdir()
    assert run.checkpoint_steps() == [10, 20]
    assert find(run).state == state(20)


def test_a_state_of_another_step(run: RunDir) -> None:
    """Else the shards of a folder that was never verified would be loaded."""
    state(10).save(run.checkpoint(20) / "train_state.json")
    manifest = read_manifest(run.checkpoint(20))
    files = tuple(describe(run.checkpoint(20), file.path) for file in manifest.files)
    manifest.model_copy(update={"files": files}).save(run.checkpoint(20) / "manifest.json")
    with pytest.raises(StorageError, match="holds step 10"):
        find(run)


def test_a_pipe_in_place_of_a_file(run: RunDir) -> None:
    (run.checkpoint(20) / "shard_0").unlink()
    os.mkfifo(run.checkpoint(20) / "shard_0")
    manifest = read_manifest(run.checkpoint(20))
    files = [
        f.model_copy(update={"bytes": 0} if f.path == "shard_0" else {}) for f in manifest.files
    ]
    assert file_faults(run.checkpoint(20), files) == ["shard_0 cannot be read: not a regular file"]


SKIPS = [
    SkippedBatches(first=20, last=25, roll_back_to=None, onset=20, attempt=1, reason="nan"),
    SkippedBatches(first=30, last=35, roll_back_to=None, onset=30, attempt=3, reason="nan"),
]


@pytest.mark.parametrize(
    ("step", "attempt", "aside"),
    [
        (19, 1, False),  # before the onset
        (20, 1, True),
        (25, 0, True),  # of an earlier attempt, and as late
        (25, 2, False),  # made again
        (30, 2, True),
        (30, 4, False),
    ],
)
def test_which(step: int, attempt: int, aside: bool) -> None:
    assert (invalidation_reason(step, attempt, SKIPS) is not None) == aside


def test_resume_goes_behind_the_onset(run: RunDir) -> None:
    save_skips(run, onset=15, roll_back_to=None)
    message = "attempt 0 saved it after the divergence from step 15 on, which attempt 0 rolled back"
    assert find(run) == Resumable(state(10), (), (f"step 20: {message}",))
    assert newest_verified(run) == (run.checkpoint(10), [f"step_00000020: {message}"])
    save_at(run, 20, attempt=1)
    assert find(run) == Resumable(state(20), ()), "made again, it replaced the other"


def test_where_none_is_left_training_starts_from_step_0(run: RunDir) -> None:
    save_skips(run, onset=8, roll_back_to=None)
    assert find(run).state is None
    assert len(find(run).invalidated) == 2


def test_a_damaged_list_of_skips(run: RunDir) -> None:
    run.skips.write_text("{")
    with pytest.raises(StorageError, match=r"skips\.json"):
        find(run, world=1)


SAVED_AT = 1_800_000_000.0


def record(run: RunDir, attempt: int, *steps: int, first_step: int | None = None) -> None:
    """An attempt's records and its checkpoints."""
    save_attempt(
        run,
        attempt,
        started_at=SAVED_AT,
        ended_at=SAVED_AT,
        ending="node_failure",
        first_step=first_step,
        steps_gained=max(steps, default=0),
        checkpoint_after=max(steps, default=None),
    )
    run.events(attempt).parent.mkdir(exist_ok=True)
    with run.events(attempt).open("w") as stream:
        for step in steps:
            save_at(run, step, attempt=attempt)
            event = Event(kind="save", step=step, attempt=attempt, time=SAVED_AT)
            stream.write(event.model_dump_json() + "\n")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "runs" / "a")
    run_dir.path.mkdir(parents=True)
    run_dir.config.write_text(CONFIG.to_yaml())
    record(run_dir, 0, 10, 20, first_step=1)
    return run_dir


def test_all_gone(run: RunDir) -> None:
    shutil.rmtree(run.checkpoints)
    with pytest.raises(CheckpointError) as caught:
        find(run)
    message = str(caught.value)
    assert f"{run.checkpoint(20)} was saved 2027-01-15 0" in message
    assert "is gone" in message
    assert "`slurmllm resume a --from-scratch` starts again from step 0" in message
    # Slurm's requeue ends with this: no further attempt can do better.
    assert not is_transient([f"rank 0 on n: CheckpointError: {message}"])


def remove_events(run: RunDir) -> None:
    shutil.rmtree(run.events(0).parent)


def remove_records(run: RunDir) -> None:
    shutil.rmtree(run.attempt("train", 0).path.parent)


def remove_all_but_the_submission(run: RunDir) -> None:
    save_submission(run, local=True, first_attempt=1)
    remove_records(run)
    remove_events(run)


def damage_events(run: RunDir) -> None:
    run.events(0).unlink()
    run.events(0).mkdir()


def remove_the_record_and_damage_the_events(run: RunDir) -> None:
    run.events(0).write_text("")
    run.attempt("train", 0).record.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_events, "step_00000020 was saved"),
        (remove_records, "--from-scratch` starts again from step 0"),
        (remove_all_but_the_submission, "--from-scratch` starts again from step 0"),
        (damage_events, "--from-scratch` starts again from step 0"),
        (remove_the_record_and_damage_the_events, "--from-scratch` starts again from step 0"),
    ],
)
def test_the_records_are_gone_or_damaged_too(
    run: RunDir, damage: Callable[[RunDir], None], message: str
) -> None:
    shutil.rmtree(run.checkpoints)
    damage(run)
    for check in (require_recorded, find):
        with pytest.raises(CheckpointError, match=message):
            check(run)


def test_an_attempt_that_was_killed_at_once_has_saved_nothing(run: RunDir) -> None:
    shutil.rmtree(run.checkpoints)
    shutil.rmtree(run.events(0).parent)
    run.attempt("train", 0).record.unlink()
    assert find(run).state is None


def test_the_verb_refuses_before_a_job_waits_in_the_queue(run: RunDir) -> None:
    shutil.rmtree(run.checkpoints)
    assert "step_00000020 was saved" in refused(
        call("resume", "a", "--local", "--runs-dir", run.path.parent, env={**os.environ}), 4
    )
    assert not run.jobs.exists()


def test_the_newest_gone(run: RunDir) -> None:
    shutil.rmtree(run.checkpoint(20))
    resumable = find(run)
    assert resumable.state == state(10)
    (line,) = resumable.skipped
    assert line.startswith("step 20: saved 2027-01-15 0")
    assert line.endswith("and gone; its steps are recomputed")


def test_not_reported_once_its_steps_are_computed_again(run: RunDir) -> None:
    shutil.rmtree(run.checkpoint(20))
    record(run, 1, 15, first_step=11)
    assert find(run).skipped == ()
    shutil.rmtree(run.checkpoints)
    with pytest.raises(CheckpointError, match="step_00000015 was saved"):
        find(run)


def test_a_roll_back_explains_it(run: RunDir) -> None:
    shutil.rmtree(run.checkpoints)
    save_skips(run, onset=5, roll_back_to=None)
    assert find(run).state is None


def test_from_scratch_and_its_requeues(run: RunDir) -> None:
    save_submission(run, local=True, first_attempt=1, from_scratch=True)
    resumable = find(run)  # the old ones verify
    assert resumable.state is None
    assert resumable.invalidated[0] == "step 20: attempt 0 saved it, before `resume --from-scratch`"
    shutil.rmtree(run.checkpoints)
    assert find(run).state is None
    record(run, 1, 10, first_step=1)
    assert find(run).state == state(10)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(CheckpointError, match="step_00000010 was saved"):
        find(run)


RECIPE = small_config().recipe
FIELDS = fingerprint(RECIPE, "corpus", "tokenizer")
YOUNGER = ("model.activation", "model.tied_embeddings", "model.scaled_init")


def test_fields_newer_than_the_checkpoint_have_their_default() -> None:
    old = {path: value for path, value in FIELDS.items() if path not in YOUNGER}
    assert fingerprint_differences(old, FIELDS) == []
    other = fingerprint(small_config("model.activation=gelu_tanh").recipe, "corpus", "tokenizer")
    assert fingerprint_differences(old, other) == [
        "model.activation: the checkpoint has 'gelu', the run 'gelu_tanh'"
    ]
    strange = {**FIELDS, "model.family": "mamba"}
    assert fingerprint_differences(strange, FIELDS) == [
        "model.family: the checkpoint has 'mamba', the run 'neox'"
    ]


def test_the_model_is_nested_again() -> None:
    scaling = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    values = {**scaling, "original_max_position_embeddings": 8192}
    options = [f"model.rope_scaling.{name}={value}" for name, value in values.items()]
    llama = small_config("model.family=llama", "model.rotary_pct=1", *options).recipe
    fields = fingerprint(llama, "corpus", "tokenizer")
    assert fields["model.rope_scaling.factor"] == 8
    assert model_fields(fields)["rope_scaling"] == values
    assert fingerprint_differences(fields, fields) == []
    unscaled = small_config("model.family=llama", "model.rotary_pct=1").recipe
    (kind, *others) = fingerprint_differences(fields, fingerprint(unscaled, "corpus", "tokenizer"))
    assert kind == "model.rope_scaling.kind: the checkpoint has 'llama3', the run None"
    assert len(others) == 4


def test_a_head_width_is_compared_as_a_number() -> None:
    llama = small_config("model.family=llama", "model.rotary_pct=1").recipe.model
    same = llama.model_copy(update={"head_dim": llama.hidden_size // llama.num_heads})
    assert model_differences(llama, same) == []
    wider = llama.model_copy(update={"head_dim": 2 * llama.head_width})
    (line,) = model_differences(llama, wider)
    assert line.startswith("model.head_dim: the checkpoint has")


def test_attention_is_compared_by_what_its_layers_have() -> None:
    window, local = {"window": 8}, {"window": 8, "rope": 100.0}
    values = RECIPE.model.model_dump() | {"family": "gemma3", "num_layers": 2}

    def model(pattern: list[dict[str, Any]], base: float) -> ModelConfig:
        fields = {"attention_pattern": pattern, "rotary_base": base}
        return ModelConfig.model_validate(values | fields)

    # As an import has the base: of the layers that there are.
    assert model_differences(model([window], 100.0), model([local], 500.0)) == []
    line, pattern = model_differences(model([window], 100.0), model([local, {}], 500.0))
    assert line == "model.rotary_base: the checkpoint has 100.0, the recipe 500.0"
    assert pattern.startswith("model.attention_pattern: the checkpoint has [{'window': 8, 'rope': ")
    (line,) = model_differences(model([{}], 100.0), model([{"rope": "none"}], 100.0))
    assert line.startswith("model.attention_pattern: the checkpoint has [], the recipe [{")


def test_settings_are_compared_before_a_resume(tmp_path: Path) -> None:
    run, newest = RunDir(tmp_path / "a"), tmp_path / "a" / "checkpoints" / "step_00000010"
    newest.mkdir(parents=True)
    TrainState(step=10, tokens=1, data={}, fingerprint=FIELDS).save(newest / TRAIN_STATE)
    DataRecord(
        corpora=(), tokenizer=None, seed=1, seq_len=32, global_batch=8, mask="none", validation=0.02
    ).save(run.data)

    def resume(*changes: str) -> None:
        require_same_settings(run, small_config("data.validation=0.02", *changes).recipe, newest)

    resume()
    resume("optim.lr=1", "train.steps=99", "parallel.tensor=2")
    with pytest.raises(RunError, match=r"model.num_layers: the checkpoint has 2, the run 4"):
        resume("model.num_layers=4")
    with pytest.raises(RunError, match=r"data.validation: the run began with 0.02, now 0.1"):
        resume("data.validation=0.1")
    (newest / TRAIN_STATE).write_text("{")
    resume("model.num_layers=4")  # the workers report the damaged file
