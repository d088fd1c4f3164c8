"""`submit`, `status`, `cancel`, `resume` on the fake cluster, and bad input."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from command_line import call, call_json, fails
from fake_slurm import FakeSlurm
from launch.submit.commands import Inputs, graph_manifest, run_of, submitted, submitted_run
from made_records import save_manifest

from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import SlurmError
from slurmllm.core.run.artifact_records import MicroBatchRecord
from slurmllm.core.run.records import ExcludedNode, ExcludedNodes, JobsRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm.client import QueuedJob
from slurmllm.launch.graphs.archive import checksum
from slurmllm.launch.graphs.reuse import graph_fingerprint
from slurmllm.launch.submit.run_folder import claim_run
from slurmllm.plan.mesh import make_mesh
from slurmllm.train.backends.environment import requires_graphs


def test_submit_writes_the_run_and_two_jobs(fake: FakeSlurm, inputs: Inputs) -> None:
    sent = submitted(inputs, "--partition", "main", "--account", "ml", "--time", "8:00:00")
    run = run_of(sent)
    assert sent["run"] == "tiny_neox-001"
    assert sent["jobs"] == {"precompile": "1", "train": "2"}
    assert fake.jobs["2"].after_ok == "1"
    assert fake.jobs["2"].script == run.script("train").read_text()
    assert "#SBATCH --partition=main\n" in fake.jobs["1"].script
    assert "#SBATCH --time=8:00:00\n" in fake.jobs["2"].script
    config = yaml.safe_load(run.config.read_text())
    assert config["train"]["steps"] == 120
    assert config["origin"]["slurm.partition"] == "--partition"
    assert json.loads(run.plan.read_text())["data"] == 4
    assert JobsRecord.load(run.jobs).submissions[0].train_job == "2"
    assert JobsRecord.load(run.jobs).submissions[0].restart == "requeue"
    fake.config = {"JobRequeue": "0"}  # the site refuses requeues
    second = submitted_run(inputs)
    assert second.name == "tiny_neox-002"
    assert JobsRecord.load(second.jobs).submissions[0].restart == "chain"


def test_profiles_for_planning_alone_are_refused(fake: FakeSlurm, inputs: Inputs) -> None:
    why = "trn2 is for planning only\n  neuronx-distributed as this project"
    for more in ((), ("--dry-run",)):
        assert why in fails(2, "submit", "neox_20b", "--nodes", "4", "--cluster", "trn2", *more)
    call("submit", "tiny_neox", "--nodes", "2", "--name", "first", *inputs)
    fake.jobs.clear()
    assert why in fails(2, "resume", "first", "--cluster", "trn2")
    assert not fake.jobs
    beta = ("submit", "llama3_8b", "--cluster", "trn2", "backend=native", "--data=builtin")
    done = call(*beta, "--dry-run")
    assert (done.exit_code, "is a public beta" in done.stderr) == (0, True), done.output
    assert "TorchNeuron, which is not installed" in fails(2, *beta)


def test_a_job_that_cannot_be_taken_back_is_named(
    fake: FakeSlurm, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = fake.submit

    def refuse_the_second(script: str, after_ok: str | None = None, **more: str | None) -> str:
        fake.refuse = None if after_ok is None else "QOSMaxSubmitJobPerUserLimit"
        return submit(script, after_ok, **more)

    def cannot_cancel(job_ids: object) -> None:
        raise SlurmError("scancel failed with exit code 1: down")

    monkeypatch.setattr(fake, "submit", refuse_the_second)
    message = fails(3, "submit", "tiny_neox", "--name", "r", *inputs)
    assert "QOSMaxSubmitJobPerUserLimit" in message
    assert fake.jobs["1"].state == "CANCELLED"
    assert not Path("runs/r").exists()
    monkeypatch.setattr(fake, "cancel", cannot_cancel)
    message = fails(3, "submit", "tiny_neox", "--name", "r", *inputs)
    assert "QOSMaxSubmitJobPerUserLimit" in message
    assert "`scancel 2` ends it" in message
    assert JobsRecord.load(RunDir(Path("runs/r")).jobs).submissions[0].precompile_job == "2"


def test_two_submits_at_the_same_moment_get_two_names(tmp_path: Path) -> None:
    runs, cluster = tmp_path / "runs", resolve("tiny_neox").cluster
    with ThreadPoolExecutor(8) as pool:
        claims = [pool.submit(claim_run, runs, None, "tiny_neox", cluster) for _ in range(8)]
        names = sorted(claim.result().name for claim in claims)
    assert names == [f"tiny_neox-{number:03d}" for number in range(1, 9)]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("recipes > /dev/full", 4),
        ("nosuch", 2),
        ("nosuch 2> /dev/full", 2),
        ("--help | true; exit ${PIPESTATUS[0]}", 141),
        ("spikes r.csv --no-plot | true; exit ${PIPESTATUS[0]}", 141),
        ("status nosuch 2>&1 | true; exit ${PIPESTATUS[0]}", 2),
    ],
)
def test_only_compare_answers_with_exit_code_1(
    script: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.csv").write_text("step,loss\n" + "".join(f"{n},3.0\n" for n in range(99)))
    command = ["bash", "-c", f"{sys.executable} -m slurmllm {script}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)


def test_dry_run_shows_environment_and_arguments(fake: FakeSlurm) -> None:
    more = ("--set", "env.NEURON_RT_EXEC_TIMEOUT=7", "--set", "env.EMPTY=")
    result = call("submit", "neox_20b", "--nodes", "4", "--dry-run", "--json", *more)
    assert (result.exit_code, "no training data" in result.stderr) == (2, True)
    assert not fake.jobs
    assert not [*Path().iterdir()]
    shown = json.loads(result.stdout)
    assert {"run_dir", "mesh", "scripts", "environment", "backend_arguments"} <= shown.keys()
    rows = {row["name"]: row for row in shown["environment"]}
    assert rows["NEURON_RT_EXEC_TIMEOUT"]["value"] == "7"
    assert rows["NEURON_RT_EXEC_TIMEOUT"]["source"] == "--set"
    assert rows["EMPTY"]["value"] == ""
    # What the table says is what a shell has after the script's exports.
    exports = shown["scripts"]["train"].partition("# Body")[0]
    done = subprocess.run(
        ["bash", "-c", exports + "env -0"], env={}, capture_output=True, text=True, check=True
    )
    exported = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    assert {name: row["value"] for name, row in rows.items()}.items() <= exported.items()
    config = shown["backend_arguments"]["neuronx_distributed_config"]
    assert (config["tensor_parallel_size"], config["pipeline_parallel_size"]) == (8, 4)


def test_dry_run_shows_the_same_to_people(fake: FakeSlurm) -> None:
    shown = call("submit", "neox_20b", "--nodes", "4", "--dry-run", "--set", "env.A=b").stdout
    table = shown.partition("# ── the workers' environment\n")[2]
    table, _, arguments = table.partition("# ── arguments of backend nxd\n")
    assert ["A", "b", "--set"] in [line.split() for line in table.splitlines()]
    assert "NEURON_TRANSFER_WITH_STATIC_RING_OPS" in table
    assert yaml.safe_load(arguments)["neuronx_distributed_config"]["tensor_parallel_size"] == 8
    early = ("gpt3_125m", "--data=builtin", "train.steps=2000")
    warned = call("submit", *early, "--dry-run").stderr
    assert "warning: optim.decay_steps: the run ends at step 2000, before the decay" in warned
    dry = call("submit", "tiny_neox", "--dry-run")  # whose data are built in
    native = dry.stdout
    assert (dry.exit_code, native.count("#!/bin/bash")) == (0, 2)
    assert "the workers' environment" in native
    assert "# ── arguments" not in native
    message = "train.init_from: not set, and this recipe starts from trained weights"
    refused = call("submit", "tiny_neox_finetune", "--dry-run")
    assert refused.exit_code == 0
    assert f"warning: submit would refuse this: {message}" in refused.stderr
    assert "warning" not in dry.stderr


def test_resume_submits_again_in_the_same_directory(fake: FakeSlurm, inputs: Inputs) -> None:
    sent = submitted(inputs, "--name", "r")
    assert "is pending or running" in fails(2, "resume", "r")
    call("cancel", "r")
    resumed = call_json("resume", "r", "--nodes", "2")
    assert resumed["jobs"] == {"precompile": "3", "train": "4"}
    assert resumed["mesh"]["data"] == 2
    call("cancel", "r")
    run = run_of(sent)
    graph_manifest().save(run.graphs_manifest)
    run.graphs_archive().touch()
    third = call_json("resume", "r")
    assert third["jobs"] == {"precompile": None, "train": "5"}
    assert fake.jobs["5"].after_ok is None
    assert len(JobsRecord.load(run.jobs).submissions) == 3


def test_resume_and_delete_wait_for_the_end_of_cancelled_jobs(
    fake: FakeSlurm,
    inputs: Inputs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    submitted(inputs, "--name", "r")
    ending = dict.fromkeys(fake.jobs, 2)  # job → how often it is still seen
    queue = FakeSlurm.queue

    def queue_while_ending(self: FakeSlurm, jobs: Sequence[str]) -> dict[str, QueuedJob]:
        for job in jobs:
            ending[job] -= 1
            fake.jobs[job].state = "COMPLETING" if ending[job] >= 0 else "CANCELLED"
        return queue(self, jobs)

    monkeypatch.setattr(fake, "cancel", lambda jobs: None)
    monkeypatch.setattr("slurmllm.launch.submit.resume._POLL_S", 0.0)
    call("cancel", "r")
    monkeypatch.setattr(FakeSlurm, "queue", queue_while_ending)
    resumed = call("resume", "r")
    assert (resumed.exit_code, max(ending.values()) < 0) == (0, True), resumed.output
    assert "waiting up to 60 s for the last processes of r to end" in caplog.text
    monkeypatch.setattr("slurmllm.launch.submit.resume._ENDING_S", 0.0)
    ending |= dict.fromkeys(fake.jobs, 9)
    call("cancel", "r")
    refused = call("delete", "r", "--yes")
    assert (refused.exit_code, "the last processes of r still run" in refused.stderr) == (2, True)


DAMAGE = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "gone": Path.unlink,
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.timeout(60)  # a pipe blocks who opens it
@pytest.mark.parametrize("damage", DAMAGE)
def test_resume_repairs_damaged_derived_files(fake: FakeSlurm, inputs: Inputs, damage: str) -> None:
    run = submitted_run(inputs, "--name", "r")
    call("cancel", "r")
    run.micro_batch.parent.mkdir(exist_ok=True)
    run.micro_batch.write_text("{")
    derived = [run.plan, run.script("precompile"), run.script("train")]
    whole = [path.read_text() for path in derived]
    for path in derived:
        DAMAGE[damage](path)
    assert call_json("status", "r")["state"] == "cancelled"
    resumed = call("resume", "r")
    assert resumed.exit_code == 0, resumed.output
    for path, text in zip(derived, whole, strict=True):
        assert path.read_text() == text


def test_resume_looks_at_other_weights_to_start_from(
    fake: FakeSlurm, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted_run(inputs, "--name", "r")
    call("cancel", "r")
    jobs = len(fake.jobs)
    assert "nosuch" in fails(2, "resume", "r", "--set", "train.init_from=nosuch")
    assert load(run.config).recipe.train.init_from is None
    assert len(fake.jobs) == jobs
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    looked_at = []
    require = "slurmllm.train.checkpoint.state.require_model"
    monkeypatch.setattr(require, lambda source, model: looked_at.append(source))
    assert call("resume", "r", "--set", "train.init_from=weights").exit_code == 0
    assert load(run.config).recipe.train.init_from == str(tmp_path / "weights")
    call("cancel", "r")
    assert call("resume", "r").exit_code == 0
    assert looked_at == [tmp_path / "weights"]  # once: later it may be gone


def test_weights_by_name(fake: FakeSlurm, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    source = submitted_run(inputs, "--name", "source")
    for step in (10, 20, 30):
        save_manifest(source, step)
        (source.checkpoint(step) / "weights").touch()
    (source.checkpoint(30) / "manifest.json").unlink()  # a save that did not finish
    monkeypatch.setattr("slurmllm.train.checkpoint.state.require_model", lambda *_: None)
    for name, step in (("source", 20), ("source@10", 10)):
        config = load(submitted_run((*inputs, "--set", f"train.init_from={name}")).config)
        assert config.recipe.train.init_from == str(source.checkpoint(step))
    message = fails(2, "submit", "tiny_neox", *inputs, "--set", "train.init_from=source@7")
    assert "run source has no checkpoint of step 7; it has: 10, 20, 30" in message


def test_resume_dry_run_changes_nothing(fake: FakeSlurm, inputs: Inputs) -> None:
    run = submitted_run(inputs, "--name", "r")
    assert "is pending or running" in fails(2, "resume", "r", "--dry-run")
    call("cancel", "r")
    save_manifest(run, 10)
    files = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    how = ("resume", "r", "-N", "2", "-t", "99", "--set", "train.log_every=5", "--dry-run")
    shown = call(*how)
    assert shown.exit_code == 0, shown.output
    assert "# ── the run continues from step 10\n" in shown.stdout
    assert "# ── changed: train.log_every, from 10 to 5\n" in shown.stdout
    assert "#SBATCH --time=99\n" in shown.stdout
    assert "nothing was written, nothing submitted" in shown.stderr
    document = call_json(*how)
    assert (document["from_step"], document["mesh"]["nodes"]) == (10, 2)
    assert document["changes"] == {"train.log_every": [10, 5]}
    assert call_json(*how, "--from-scratch")["from_step"] == 0
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == files
    assert len(fake.jobs) == 2
    assert "leave out --dry-run" in fails(2, *how, "--include", "n1")


def test_included_nodes_of_a_queued_run(fake: FakeSlurm, inputs: Inputs) -> None:
    run = submitted_run(inputs, "--name", "r")
    for more in (["--json"], []):
        node = ExcludedNode(node="n1", reason="broken", since=0.0, until=9e9)
        ExcludedNodes(nodes=(node,)).save(run.excluded)
        done = call("resume", "r", "--include", "n1", *more)
        assert (done.exit_code, "r uses n1 again" in done.stderr) == (0, True), done.output
        fields = {"run": "r", "run_dir": str(run.path), "included": ["n1"]}
        assert not more or json.loads(done.stdout) == fields
    assert done.stdout == ""
    assert len(fake.jobs) == 2


def test_resume_refuses_what_would_have_no_effect(
    fake: FakeSlurm, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted_run(inputs, "--name", "r")
    for change in (("--set", "train.log_every=5"), ("-N", "2"), ("--from-scratch",), ("-t", "9")):
        message = fails(2, "resume", "r", "--include", "n1", *change)
        assert "so only --include can change it" in message
    call("cancel", "r")
    assert "a range is for Slurm's jobs" in fails(2, "resume", "r", "--local", "-N", "2-4")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for change in (("-t", "9"), ("-p", "trn1"), ("-N", "2-4")):
        message = fails(2, "resume", "r", "--in-allocation", *change)
        assert "--in-allocation and" in message
        assert "exclude each other" in message


def compiled(run: RunDir, nodes: int = 4, *, complete: bool = True) -> None:
    """Leave what a precompile job leaves."""
    config, archive = load(run.config), run.graphs_archive()
    archive.parent.mkdir()
    archive.write_bytes(b"graphs")
    fingerprint = graph_fingerprint(config, make_mesh(config, nodes), local=False) or ""
    sums = {"archive_bytes": 6, "archive_sha256": checksum(archive), "fingerprint": fingerprint}
    graph_manifest(complete=complete, graphs=2, **sums).save(run.graphs_manifest)


def test_graphs_of_an_earlier_run_spare_the_precompile_job(fake: FakeSlurm, inputs: Inputs) -> None:
    first = submitted(inputs, "--name", "first")
    assert first["graphs_from"] is None
    compiled(run_of(first))
    second = submitted(inputs, "--name", "second")
    assert second["graphs_from"] == "first"
    assert second["jobs"] == {"precompile": None, "train": "3"}
    assert fake.jobs["3"].after_ok is None
    run = run_of(second)
    assert run.graphs_archive().read_bytes() == b"graphs"
    assert JobsRecord.load(run.jobs).submissions[0].precompile_job is None
    text = call("submit", "tiny_neox", "--nodes", "4", "--name", "third", *inputs).stdout
    assert "compiled by run first already; no precompile stage" in text
    always = submitted(inputs, "--name", "fourth", "--precompile", "always")
    assert always["graphs_from"] is None
    other = submitted(inputs, "--name", "fifth", "--set", "train.micro_batch=1")
    assert other["graphs_from"] is None
    call("cancel", "second")
    resumed = call_json("resume", "second")
    assert (resumed["graphs_from"], resumed["jobs"]["precompile"]) == ("first", None)
    call("cancel", "second")
    forced = call_json("resume", "second", "--precompile", "always")
    assert forced["jobs"]["precompile"] is not None
    call("cancel", "second")
    shutil.rmtree(run.graphs)
    compiled(run, complete=False)
    past = call_json("resume", "second", "--set=train.incomplete_graphs=compile")
    assert past["jobs"]["precompile"] is None


def test_a_run_without_graphs_has_no_precompile_job(fake: FakeSlurm, inputs: Inputs) -> None:
    eager = (*inputs, "--set=train.compile=false")
    sent = submitted(eager, "--name", "r")
    assert (sent["jobs"], sent["graphs_from"]) == ({"precompile": None, "train": "1"}, None)
    assert fake.jobs["1"].after_ok is None
    for options in (["--precompile=always"], ["--set=train.micro_batch=auto"]):
        assert submitted((*eager, *options))["jobs"]["precompile"] is not None
    text = call("submit", "tiny_neox", "--set=backend=rehearsal", "--nodes=2", *inputs).stdout
    assert "graphs     none to compile; no precompile stage" in text
    call("cancel", "r")
    resumed = call_json("resume", "r", "--set=train.compile=true")
    assert resumed["jobs"]["precompile"] is not None
    fake.limits = {"MaxTime": "00:10:00"}  # of a precompile job that is not submitted
    assert submitted((*eager, "--time=9"))["jobs"]["precompile"] is None


def test_precompile_never(fake: FakeSlurm, inputs: Inputs) -> None:
    never = ("--precompile", "never")
    run = submitted_run(inputs, "--name", "first", *never)
    assert [job.after_ok for job in fake.jobs.values()] == [None]
    assert not requires_graphs(load(run.config))
    compiled(run)
    assert submitted(inputs, "--name", "third", *never)["graphs_from"] == "first"
    auto = (*inputs, *never, "--set", "train.micro_batch=auto")
    assert "the precompile stage measures it" in fails(2, "submit", "tiny_neox", *auto)
    fake.limits = {"MaxTime": "00:10:00"}  # of a precompile job that is not submitted
    assert submitted(inputs, "--time=9", *never)["jobs"]["precompile"] is None


def test_a_micro_batch_to_be_measured(fake: FakeSlurm, inputs: Inputs) -> None:
    auto = ("--set", "train.micro_batch=auto")
    fake.states = dict.fromkeys((f"n{number}" for number in range(1, 9)), "idle")
    sent = submitted(inputs, "--name", "r", *auto)
    mesh = sent["mesh"]
    assert isinstance(mesh, dict)
    assert (mesh["micro_batch"], mesh["accumulation"], mesh["data"]) == (None, None, 4)
    assert "auto: measured by the precompile stage" in call("status", "r").stdout
    call("cancel", "r")
    run = run_of(sent)
    graph_manifest().save(run.graphs_manifest)
    run.graphs_archive().touch()
    resumed = call_json("resume", "r")
    assert resumed["jobs"]["precompile"] is not None, "graphs without the micro batch"
    call("cancel", "r")
    times = {"peak_bytes": 1, "first_step_s": 1.0}
    tried = [{"micro_batch": n, "seconds_per_sequence": 1 / n, **times} for n in (1, 2)]
    fields = {"candidates": tried, "limit_bytes": 9, "nodes": ["n1"], "device": "cpu", "workers": 1}
    measured = MicroBatchRecord.model_validate({"micro_batch": 2, "reason": "", **fields})
    measured.save(run.micro_batch)
    more = call_json("resume", "r", "--nodes", "8")
    assert more["jobs"]["precompile"] is None
    assert (more["mesh"]["micro_batch"], more["mesh"]["global_batch"]) == (1, 8)
    message = call("status", "r").stdout
    assert "8 = data 8 × 1 × micro batch 1; auto: 2 chosen of 1, 2 on n1" in message
    assert call_json("status", "r")["micro_batch"]["micro_batch"] == 2
    assert "auto: measured" in call("submit", "tiny_neox", "--name", "s", *inputs, *auto).stdout


def test_a_taken_name(fake: FakeSlurm, inputs: Inputs) -> None:
    submitted(inputs, "--name", "r")
    assert "is a run of recipe 'tiny_neox'" in fails(2, "submit", "tiny_neox", "--name", "r")
    message = fails(2, "submit", "neox_20b", "--nodes", "4", "--name", "r", "--dry-run")
    assert "is a run of recipe 'tiny_neox' (not this one)" in message
    for name in ("../up", "a b", "-x", ""):
        assert "choose another --name" in fails(2, "submit", "tiny_neox", f"--name={name}")


@pytest.mark.parametrize("killed_at", ["directory", "unrecorded job", "precompile job"])
def test_a_name_after_a_killed_submit(killed_at: str, fake: FakeSlurm, inputs: Inputs) -> None:
    run = submitted_run(inputs, "--name", "r")
    sent = JobsRecord.load(run.jobs).submissions[0]
    run.jobs.unlink()
    if killed_at == "directory":
        shutil.rmtree(run.path)
        run.path.mkdir()
    if killed_at == "precompile job":
        half = sent.model_copy(update={"train_job": None})
        JobsRecord(submissions=(half,)).save(run.jobs)
    submitted(inputs, "--name", "r")
    last = JobsRecord.load(run.jobs).submissions
    active = {job for job, of in fake.jobs.items() if of.state == "PENDING"}
    assert len(last) == 1
    assert active == {last[0].precompile_job, last[0].train_job}
    assert active.isdisjoint({sent.precompile_job, sent.train_job})
    # What is no submit's stays as it is.
    (run.path / "notes.txt").write_text("mine")
    run.jobs.unlink()
    assert "is a run of recipe 'tiny_neox'" in fails(2, "submit", "tiny_neox", "--name", "r")
    assert call("resume", "r").exit_code == 0  # its jobs, without a record, do not run beside
    assert active.isdisjoint({job for job, of in fake.jobs.items() if of.state == "PENDING"})


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("submit nosuch", "unknown recipe 'nosuch'"),
        ("submit a100_ib", "a100_ib is a cluster profile, not a recipe"),
        ("submit tiny_neox --cluster moon", "unknown cluster profile 'moon'"),
        ("submit tiny_neox --nodes 3", "--nodes 4: 33 % more nodes; "),
        ("submit tiny_neox --nodes 3 --set train.micro_batch=auto", "12 % more sequences a step"),
        ("submit tiny_neox --set train.micro_batch=Auto", "above 0, or auto"),
        ("submit tiny_neox --set data.corpus=no.arrow", "no.arrow"),
        ("submit neox_20b --nodes 4 --set train.precision=bf16_mixed", "--set parallel.zero=1, or"),
        ("submit neox_20b --set cluster.devices_per_node=64", "trn1.32xlarge has 32 NeuronCores"),
        ("submit neox_20b --set backend=native", "TorchNeuron, which is for trn2"),
        ("submit llama2_70b --nodes=32 --cluster=p4d --set parallel.tensor=32", "8 key and value"),
        ("submit tiny_neox --set data.corpus=null", "data.corpus: not set"),
        ("submit tiny_neox_finetune", "add --set train.init_from=FOLDER, a checkpoint of"),
        ("status nosuch", "no run 'nosuch'"),
        ("resume nosuch", "no run 'nosuch'"),
    ],
)
def test_bad_input(fake: FakeSlurm, command: str, message: str) -> None:
    assert message in fails(2, *command.split())
    assert not fake.jobs


def test_inputs_that_do_not_fit(fake: FakeSlurm, inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    corpus = Path(inputs[1].partition("=")[2])
    (tmp_path / "cut.arrow").write_bytes(corpus.read_bytes()[:5000])
    for settings, texts in (
        (["model.vocab_size=200"], ["300", "model.vocab_size"]),
        (["train.global_batch=8192", "model.seq_len=4096"], ["fewer than one global batch"]),
        ([f"data.tokenizer={tmp_path}/broken.json"], ["broken.json"]),
        ([f"data.corpus={tmp_path}/cut.arrow"], ["cut.arrow"]),
    ):
        message = fails(2, "submit", "tiny_neox", *inputs, *settings)
        assert [text for text in texts if text not in message] == []


def test_without_slurm_the_way_out_is_named(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "--local" in fails(3, "submit", "tiny_neox", *inputs)
    assert not Path("runs/tiny_neox-001").exists()


def test_a_secret_is_in_no_script_and_no_job(fake: FakeSlurm, inputs: Inputs) -> None:
    sent = submitted(inputs, "--set", "env.HF_TOKEN=cAnArY")
    run = run_of(sent)
    assert "# HF_TOKEN: from secrets.json, by the launcher" in run.script("train").read_text()
    assert "cAnArY" not in f"{sent} {fake.jobs}"
    texts = {path for path in run.path.rglob("*") if path.is_file()}
    assert {path for path in texts if b"cAnArY" in path.read_bytes()} == {run.secrets}
    assert load(run.config).worker_secrets() == {"HF_TOKEN": "cAnArY"}
    shown = call("recipes", "tiny_neox", "--explain", "--set", "env.HF_TOKEN=cAnArY").output
    assert "HF_TOKEN" in shown
    assert "cAnArY" not in shown
