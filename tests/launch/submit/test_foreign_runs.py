"""What another user could put into the directory of a run, to have it run as its owner."""

import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from made_records import save_attempt

from slurmllm.cli.main import cli
from slurmllm.core.config.load import load, save
from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.core.errors import ConfigError, RunError
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.submit.prepare import RunRequest, prepare
from slurmllm.launch.submit.run_folder import run_umask
from slurmllm.launch.supervise.allocation import LocalAllocation
from slurmllm.launch.supervise.supervisor import Supervisor
from slurmllm.launch.supervise.workers import Workers
from slurmllm.train.backends.base import Worker
from slurmllm.train.exits import StopRequest
from slurmllm.train.job import make_job

NOBODY = pwd.getpwnam("nobody")
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def config(stdlib: tuple[Path, Path]) -> RunConfig:
    corpus, tokenizer = stdlib
    return resolve("tiny_neox", overrides=[f"data.corpus={corpus}", f"data.tokenizer={tokenizer}"])


@pytest.fixture
def run(tmp_path: Path, config: RunConfig) -> RunDir:
    prepare(RunRequest(config, 1, tmp_path, name="mine"))
    return RunDir(tmp_path / "mine")


def resumed(run: RunDir) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["resume", "mine", "--local", f"--runs-dir={run.path.parent}"])
    return done.exit_code, done.output


def planted(path: Path) -> None:
    os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)


@only_root
@pytest.mark.parametrize("harm", [planted, lambda path: path.chmod(0o666)])
def test_a_configuration_that_others_may_have_written_does_not_run(
    run: RunDir, harm: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_attempt(run, nodes=("local0",))
    monkeypatch.setenv("SLURMLLM_NODE_NAME", "local0")
    harm(run.config)
    for start in (
        lambda: Supervisor(run, "train", LocalAllocation(run)),
        lambda: Workers(run, "train", 0),
        lambda: make_job(run, "train", 0, Worker(0, 1, 0, "local0"), StopRequest(), 0.0),
    ):
        with pytest.raises(ConfigError, match=r"(belongs to nobody|may write to it).*`chmod go-w`"):
            start()
    code, output = resumed(run)
    assert (code, "config.yaml: " in output) == (2, True), output
    assert load(run.config).recipe.name == "tiny_neox", "others may still look at it"


@pytest.mark.parametrize("folder", [".", "scripts"])
def test_a_run_that_others_may_write_to_is_not_resumed(
    run: RunDir, config: RunConfig, folder: str
) -> None:
    (run.path / folder).chmod(0o777)
    request = RunRequest(config, 1, run.path.parent, run=run)
    with pytest.raises(RunError, match=r"every user may write to it.*`chmod -R go-w .*/mine`"):
        prepare(request)
    (run.path / folder).chmod(0o755)
    prepare(request)


def prepare_ours(config: RunConfig, folder: Path, **fields: str | None) -> None:
    cluster = config.cluster.model_copy(update=fields)
    prepare(RunRequest(RunConfig(config.recipe, cluster), 1, folder, name="ours"))


@pytest.mark.parametrize("umask", [0o777, 0o300, 0o100])
def test_a_umask_of_the_owner_makes_no_run(tmp_path: Path, config: RunConfig, umask: int) -> None:
    os.umask(umask)
    with pytest.raises(RunError, match=f"own permissions .{umask & 0o700:03o}"):
        prepare(RunRequest(config, 1, tmp_path / "runs", name="mine"))
    assert not (tmp_path / "runs").exists()


def test_others_may_not_write_to_a_new_run(tmp_path: Path, config: RunConfig) -> None:
    os.umask(0)
    prepare(RunRequest(config, 1, tmp_path / "new" / "runs", name="mine"))
    assert os.umask(0) == 0, "it belongs to the process"
    assert run_umask(config.cluster) == 0o022, "sbatch hands it to the jobs"
    prepare_ours(config, tmp_path, trusted_group="users")
    for path in (tmp_path / "new", *(tmp_path / "new").rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o022, path
    assert (tmp_path / "ours").stat().st_mode & 0o020, "its members share what they may write"


@only_root
@pytest.mark.parametrize("trusted", [None, "users"])
def test_the_runs_group_may_read_and_nobody_else(
    tmp_path: Path, config: RunConfig, trusted: str | None
) -> None:
    os.umask(0)
    prepare_ours(config, tmp_path, runs_group="users", trusted_group=trusted)
    run = tmp_path / "ours"
    limit = 0o027 if trusted is None else 0o007
    for path in (run, *run.rglob("*")):
        info = path.stat()
        assert info.st_gid == grp.getgrnam("users").gr_gid, path
        # Files that are written whole have mode 644: the folders keep others out.
        if path.is_dir():
            assert stat.S_IMODE(info.st_mode) == 0o2777 & ~limit, path
        assert not info.st_mode & 0o002, path


@only_root
def test_a_group_that_runs_cannot_be_given_to(tmp_path: Path, config: RunConfig) -> None:
    def refused(group: str) -> str:
        with pytest.raises(ConfigError) as caught:
            prepare_ours(config, tmp_path, runs_group=group)
        assert not (tmp_path / "ours").exists()
        return str(caught.value)

    assert "there is no group void on this machine; name one of your groups" in refused("void")
    groups = os.getgroups()
    for path in (tmp_path, *tmp_path.parents):
        path.chmod(path.stat().st_mode | 0o055)
    os.setgroups([])
    os.setegid(NOBODY.pw_gid)
    os.seteuid(NOBODY.pw_uid)
    try:
        message = refused("users")
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
    assert "cluster.runs_group: you are not a member of the group users" in message


@only_root
def test_a_file_of_root_is_trusted(run: RunDir, config: RunConfig) -> None:
    save(config, run)
    for path in (*run.path.parents, run.path):
        if path.stat().st_mode & 0o005 != 0o005:
            path.chmod(0o755)
    os.seteuid(NOBODY.pw_uid)
    try:
        assert load(run.config, trusted=True) == load(run.config)
    finally:
        os.seteuid(0)
