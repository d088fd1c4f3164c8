"""The same tests on the fake and on a real Slurm: what slurmllm relies on."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_slurm import FakeSlurm

from slurmllm.core.config.directives import quoted
from slurmllm.core.errors import SlurmError
from slurmllm.core.slurm.client import SlurmClient, retry_unreachable
from slurmllm.launch.submit.launch import check_dependency


def test_the_fake_has_every_method_of_its_own() -> None:
    public = {name for name in vars(SlurmClient) if not name.startswith("_")}
    # An inherited one would call the commands of a real Slurm.
    assert public <= vars(FakeSlurm).keys()


class Bench:
    """A client and the means to bring its jobs to where a test wants them."""

    def __init__(self, client: SlurmClient, folder: Path) -> None:
        self.client, self.folder = client, folder

    def script(self, body: str, nodes: int = 1) -> str:
        return (
            f"#!/bin/bash\n#SBATCH --nodes={nodes}\n#SBATCH --requeue\n"
            f"#SBATCH --output={self.folder}/out.%j\n#SBATCH --kill-on-invalid-dep=yes\n{body}\n"
        )

    def wait(self, job_id: str, state: str) -> None:
        fake = self.client
        if isinstance(fake, FakeSlurm):
            fake.start(job_id)
            if state != "RUNNING":
                fake.finish(job_id, state)
        self.until(lambda: self.state(job_id) == state, f"{job_id} never {state}")

    def state(self, job_id: str) -> str:
        job = self.client.queue([job_id]).get(job_id)
        return job.state if job else self.client.accounting(job_id)[-1].state

    def until(self, holds: Callable[[], bool], message: str) -> None:
        deadline = time.monotonic() + 300
        while not holds():
            assert time.monotonic() < deadline, message
            time.sleep(0.2)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.slurm)])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if request.param == "fake":
        yield Bench(FakeSlurm(("n1", "n2", "n3", "n4", "n5")), tmp_path)
        return
    request.getfixturevalue("slurm")
    bench = Bench(SlurmClient(), tmp_path)
    yield bench


def test_a_second_job_waits_for_the_first_and_is_accounted_for(bench: Bench) -> None:
    first = bench.client.submit(bench.script("sleep 2"))
    second = bench.client.submit(bench.script("true"), after_ok=first)
    bench.wait(first, "RUNNING")
    waiting = bench.client.queue([first, second])[second]
    assert (waiting.state, waiting.reason) == ("PENDING", "Dependency")
    bench.wait(first, "COMPLETED")
    bench.wait(second, "COMPLETED")

    def accounted() -> list[str]:
        return [row.state for row in bench.client.accounting(first) if row.job_id == first]

    # slurmctld sends what changes to slurmdbd in batches: sacct may be seconds behind squeue.
    bench.until(lambda: accounted() == ["COMPLETED"], "sacct does not know that the job completed")


def test_a_failed_job_takes_the_one_that_waits_along(bench: Bench) -> None:
    first = bench.client.submit(bench.script("sleep 1; exit 3"))
    second = bench.client.submit(bench.script("true"), after_ok=first)
    bench.wait(first, "RUNNING")
    bench.wait(first, "FAILED")
    bench.until(lambda: bench.state(second) == "CANCELLED", "the second job still waits")


def test_requeue_starts_another_incarnation(bench: Bench) -> None:
    job = bench.client.submit(bench.script("sleep 60"))
    bench.wait(job, "RUNNING")
    assert bench.client.batch_job(job).restarts == 0
    bench.client.requeue(job)
    assert bench.client.batch_job(job).restarts == 1
    bench.until(lambda: bench.state(job) in ("PENDING", "COMPLETING", "RUNNING"), "not requeued")
    bench.wait(job, "RUNNING")
    bench.until(
        lambda: "REQUEUED" in [r.state for r in bench.client.accounting(job) if r.job_id == job],
        "sacct does not know of the requeue",
    )
    for _ in range(2):  # the second time is no error
        bench.client.cancel([job])
        bench.until(lambda: bench.state(job) == "CANCELLED", "not cancelled")


def test_a_node_of_the_job_answers_and_is_kept_away_from_once_excluded(bench: Bench) -> None:
    job = bench.client.submit(bench.script("sleep 60"))
    bench.wait(job, "RUNNING")
    node = bench.client.queue([job])[job].nodes
    for name in ("n1", "n2", "n3", "n4", "n5"):
        assert bench.client.responds(job, name) is (name == node)
    with pytest.raises(SlurmError, match="no longer pending"):
        bench.client.exclude(job, [node])
    bench.client.requeue(job)
    bench.client.exclude(job, [node])
    bench.until(lambda: bench.state(job) != "COMPLETING", "never requeued")
    bench.wait(job, "RUNNING")
    assert bench.client.queue([job])[job].nodes != node
    bench.client.cancel([job])


def test_a_node_that_left_slurm_conf_is_left_out_of_lists(bench: Bench) -> None:
    """Slurm refuses a list with it; without the rest of the list, it would start anywhere."""
    script = bench.script("sleep 60").replace("#!/bin/bash\n", "#!/bin/bash\n#SBATCH --hold\n", 1)
    for exclude in ("n99", "n[1-2],n99"):
        assert bench.client.can_start(script, [exclude])
        job = bench.client.submit(script, exclude=[exclude])
        names = bench.client.hostnames(bench.client.queue([job])[job].excluded or "")
        assert names == ([] if exclude == "n99" else ["n1", "n2"])
        bench.client.exclude(job, ["n99", "n3"])
        assert bench.client.queue([job])[job].excluded == "n3"
        bench.client.cancel([job])
    if not isinstance(bench.client, FakeSlurm):
        own = script.replace("#SBATCH --hold\n", "#SBATCH --hold\n#SBATCH --exclude=n99,n4\n")
        job = bench.client.submit(own)
        assert bench.client.queue([job])[job].excluded == "n4"
        bench.client.cancel([job])
        with pytest.raises(SlurmError, match="Invalid node name"):
            bench.client.submit(script.replace("--hold", "--nodelist=n99"), exclude=["n1"])


def test_a_requeued_job_can_be_made_to_wait(bench: Bench) -> None:
    job = bench.client.submit(bench.script("sleep 60"))
    bench.wait(job, "RUNNING")
    with pytest.raises(SlurmError):
        bench.client.delay(job, 5.0)
    bench.client.requeue(job)
    for seconds in (3000.0, 5.0):  # the shorter one takes nothing back
        bench.client.delay(job, seconds)
        if isinstance(bench.client, FakeSlurm):
            assert bench.client.jobs[job].delay_s == 3000
            continue
        shown = subprocess.run(
            ["scontrol", "show", "job", job], capture_output=True, text=True, check=True
        ).stdout
        eligible = re.search(r"EligibleTime=(\S+)", shown)
        assert 2990 <= datetime.fromisoformat(eligible[1]).timestamp() - time.time() <= 3001
    bench.client.cancel([job])


def test_a_controller_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "scontrol: error: slurm_receive_msg: Socket timed out on send/recv operation"
    monkeypatch.setattr("slurmllm.core.slurm.client._RETRY_S", 0.01)
    answers: list[SlurmError | str] = [SlurmError(message), SlurmError(message), "4711"]

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    assert retry_unreachable(ask) == "4711"
    answers[:] = [SlurmError(message)] * 99
    with pytest.raises(SlurmError):
        retry_unreachable(ask, patience_s=0.05)
    answers[:] = [SlurmError("Invalid job id specified"), "too late"]
    with pytest.raises(SlurmError, match="Invalid job id"):
        retry_unreachable(ask)
    assert answers == ["too late"]


def test_nodes(bench: Bench) -> None:
    assert bench.client.hostnames("n[1-3],n5") == ["n1", "n2", "n3", "n5"]
    assert bench.client.hostnames("a-[08-10]") == ["a-08", "a-09", "a-10"]
    assert set(bench.client.node_states()) == {"n1", "n2", "n3", "n4", "n5"}
    main = [node for node in bench.client.partition_nodes() if node.partition == "main"]
    assert sorted(node.name for node in main) == ["n1", "n2", "n3", "n4", "n5"]
    assert all(node.default and node.up and node.cpus > 0 and node.gres == "" for node in main)


def test_unknown_jobs_and_what_slurmctld_runs_with(bench: Bench) -> None:
    assert bench.client.queue(["999999"]) == {}
    assert bench.client.queue([]) == {}
    assert bench.client.accounting("999999") == []
    with pytest.raises(SlurmError, match="Invalid job id"):
        bench.client.requeue("999999")
    settings = bench.client.settings()
    assert settings["JobRequeue"] == "1"
    assert re.match(r"\d\d\.\d\d", settings["SLURM_VERSION"])
    bench.client.check_accounting()
    assert bench.client.missing_commands() == []


def refusing_sbatch(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> SlurmClient:
    (folder / "sbatch").write_text(f'#!/bin/sh\necho "{text}" >&2; exit 1\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return SlurmClient()


def test_absent_commands_are_named_and_those_that_fail_show_their_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match=r"sbatch is not on the PATH; run [^,]*$"):
        SlurmClient().submit("#!/bin/bash\n")
    client = refusing_sbatch(tmp_path, "sbatch: error: controller not responding", monkeypatch)
    with pytest.raises(SlurmError, match="controller not responding"):
        client.submit("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("refusal", "starts"),
    [
        ("Requested node configuration is not available", False),
        ("Required node not available (down, drained or reserved)", False),
        ("Requested nodes not in this partition", False),
        ("Invalid node name specified", False),  # of a node that --nodelist names
        ("Invalid account or account/partition combination specified", True),
        ("User's group not permitted to use this partition", True),
        ("Access denied to requested reservation", True),
        ("Job violates accounting/QOS policy (job submit limit, user's size)", True),
    ],
)
def test_an_exclusion_is_refused_for_its_nodes_only(
    refusal: str, starts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = refusing_sbatch(tmp_path, f"allocation failure: {refusal}", monkeypatch)
    assert client.can_start("#!/bin/bash\n", ["n1"]) is starts


@pytest.mark.slurm
@pytest.mark.usefixtures("slurm")
def test_slurm_reads_what_is_quoted_and_names_what_it_does_not_take(tmp_path: Path) -> None:
    text, real = "a b 'c' \"d\" #e \\f $HOME %j|", SlurmClient()
    with pytest.raises(SlurmError, match="invalid partition specified: nowhere"):
        real.submit("#!/bin/bash\n#SBATCH --partition=nowhere\ntrue\n")
    script = (
        f"#!/bin/bash\n#SBATCH --comment={quoted(text)}\n#SBATCH --output={tmp_path}/out\n"
        "#SBATCH --hold\ntrue\n"
    )
    job = real.submit(script)
    shown = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job}", "--format=%k"], capture_output=True, text=True
    )
    assert shown.stdout == f"{text}\n"
    real.check_srun(["--mpi=none", "--comment=a b"])
    with pytest.raises(SlurmError, match="unrecognized option '--container-image=x'"):
        real.check_srun(["--container-image=x"])
    real.cancel([job])
    with pytest.raises(SlurmError, match=f"can never be met: job {job} has ended as CANCELLED"):
        check_dependency(f"afterok:{job}", real)
    assert check_dependency(f"afternotok:{job}", real) == []


@pytest.mark.parametrize(
    ("kind", "state", "met"),
    [
        *(("afterok", "COMPLETED", True), ("afterok", "FAILED", False)),
        *(("afternotok", "FAILED", True), ("afternotok", "COMPLETED", False)),
        ("afterany", "FAILED", True),
    ],
)
def test_a_dependency_that_can_never_be_met(kind: str, state: str, met: bool) -> None:
    row = SimpleNamespace(job_id="7", state=state)
    client: Any = SimpleNamespace(queue=lambda jobs: {}, accounting=lambda *jobs: [row])
    refused = pytest.raises(SlurmError, match=f"never be met: job 7 has ended as {state}")
    with nullcontext() if met else refused:
        assert check_dependency(f"{kind}:7", client) == []
