"""What a recipe's published data become at submit: set, a site's, fetched, built in, or missing."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from command_line import call, call_json, fails
from data.corpus.data_server import DataServer, data_server
from data.corpus.published import mirror_configuration, publish_wikipedia
from fake_slurm import FakeSlurm

from slurmllm.core.config.data_sources import read_source
from slurmllm.core.config.load import load
from slurmllm.core.config.profiles import available
from slurmllm.core.config.resolve import recipes_dir, resolve
from slurmllm.core.run.rundir import RunDir

REHEARSED = (
    *("--cluster=local", "--set=backend=rehearsal", "--set=parallel.tensor=1"),
    *("--set=parallel.pipeline=4", "--set=parallel.sequence=false", "--set=train.global_batch=4"),
    "--set=model.seq_len=64",
)
NEOX = ("submit", "neox_20b", "--nodes=4", *REHEARSED)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataServer]:
    with data_server() as server:
        publish_wikipedia(server, tmp_path_factory.mktemp("published"))
        yield server


@pytest.fixture
def mirrored(
    fake: FakeSlurm, published: DataServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> DataServer:
    file = mirror_configuration(published, tmp_path / "user" / "config.yaml")
    monkeypatch.setenv("SLURMLLM_CONFIG", str(file))
    published.requests.clear()
    return published


def files_of(result: Result) -> tuple[str, str, dict[str, str]]:
    """Corpus, tokenizer and origins of a submitted run."""
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    config = load(RunDir(Path(shown["run_dir"])).config)
    data = config.recipe.data
    return str(data.corpus), str(data.tokenizer), dict(config.origins)


def test_every_recipe_names_data_that_are_described() -> None:
    for name in available(recipes_dir()):
        sources = resolve(name).recipe.data.sources
        assert bool(sources) is not name.startswith("tiny_"), name
        data_sets = [read_source(source) for source in sources]
        corpora = [data_set.corpus for data_set in data_sets if data_set.corpus]
        assert len(corpora) == 1 or name.startswith("tiny_"), name
        assert sum(data_set.tokenizer is not None for data_set in data_sets) <= 1, name


def test_missing_data_name_the_command(fake: FakeSlurm) -> None:
    message = fails(2, *NEOX)
    for fix in ("run `slurmllm data fetch wikipedia_gpt2`", "--data builtin", "--set data.corpus="):
        assert fix in message
    dry = call(*NEOX, "--dry-run")
    assert "dry run; would be refused: neox_20b has no training data" in dry.stderr.split("\n")
    assert (dry.exit_code, dry.stdout.count("#!/bin/bash")) == (2, 1)  # rehearsed
    assert message in dry.stderr
    assert "data fetch" in json.loads(call(*NEOX, "--dry-run", "--json").stdout)["refusals"][0]
    elsewhere = fails(2, *NEOX, "--runs-dir", "other")
    assert f"fetch wikipedia_gpt2 --to {Path.cwd() / 'other' / '.data'}`" in elsewhere
    # A tokenizer alone is not complete after --fetch.
    for options in (["--sweep=optim.lr=1e-4,2e-4"], ["--data=gpt2_tokenizer", "--fetch"]):
        dry = call(*NEOX, "--dry-run", *options)
        assert (dry.exit_code, "no training data" in dry.stderr) == (2, True)


def test_fetch_first_then_submit(mirrored: DataServer, fake: FakeSlurm, tmp_path: Path) -> None:
    assert call(*NEOX, "--fetch", "--dry-run").exit_code == 0
    assert not mirrored.requests
    umask = os.umask(0)
    corpus, tokenizer, origins = files_of(call(*NEOX, "--fetch", "--json"))
    os.umask(umask)
    folder = tmp_path / "runs" / ".data" / "wikipedia_gpt2"
    assert corpus == str(folder / "my-gpt2_text_document")
    assert tokenizer == str(folder / "tokenizer.json")
    assert not folder.stat().st_mode & 0o022, "others could replace what is trained on"
    assert origins["data.corpus"] == origins["data.tokenizer"] == "fetched: wikipedia_gpt2"
    asked = len(mirrored.requests)
    assert call(*NEOX, "--json").exit_code == 0  # it is there now
    assert call(*NEOX, "--fetch").exit_code == 0
    assert len(mirrored.requests) == asked
    # An option takes precedence.
    for end in ("bin", "idx"):
        shutil.copyfile(folder / f"my-gpt2_text_document.{end}", folder / f"moved.{end}")
    moved = call(*NEOX, f"--set=data.corpus={folder}/moved", "--json")
    assert files_of(moved)[:2] == (f"{folder}/moved", "None")


def test_what_sbatch_would_misread_is_refused_before_the_download(mirrored: DataServer) -> None:
    before = len(mirrored.requests)
    message = fails(2, *NEOX, "--fetch", "--runs-dir", "a$b")
    assert "a value that sbatch would misread" in message
    assert (len(mirrored.requests), Path("a$b").exists()) == (before, False)


def test_fetch_by_its_own_command(mirrored: DataServer, tmp_path: Path) -> None:
    (data_set,) = call_json("data", "fetch", "neox_20b")["fetched"]
    assert data_set["name"] == "wikipedia_gpt2"
    assert "gpt2-merges.txt" in [file["name"] for file in data_set["files"]]
    line = call("data", "fetch", "wikipedia_gpt2", "--to", "to").stdout.splitlines()[-1].strip()
    folder = tmp_path / "to" / "wikipedia_gpt2"
    settings = f"corpus: {folder}/my-gpt2_text_document, tokenizer: {folder}/tokenizer.json"
    assert line == f"wikipedia_gpt2: {{{settings}}}"
    assert "names no published data set" in fails(2, "data", "fetch", "tiny_neox")
    message = fails(2, "data", "fetch", "wikipedia")
    assert "neither a data set nor a recipe; did you mean 'wikipedia_gpt2'?" in message
    listed = call_json("data", "fetch", "--list")["data_sets"]
    assert "neox_20b" in next(d["recipes"] for d in listed if d["name"] == "wikipedia_gpt2")


def test_a_data_set_of_a_file(fake: FakeSlurm, tmp_path: Path) -> None:
    """The command that `submit` names fetches it."""
    file = tmp_path / "mine.yaml"
    with data_server() as server:
        publish_wikipedia(server, tmp_path / "published")
        urls = [f"{{url: {server.url}wiki/my-gpt2_text_document.{end}}}" for end in ("bin", "idx")]
        file.write_text(
            "description: d\norigin: o\nlicence: l\ncorpus: my-gpt2_text_document\n"
            f"tokens: 1.0e+6\nfiles: [{', '.join(urls)}]\n"
        )
        line = (*NEOX, f"--data={file}")
        assert f"run `slurmllm data fetch {file}`" in fails(2, *line)
        epochs = f"data: 2.56M tokens are about 2.6 epochs of {file}\n"
        assert epochs in call(*line, "--dry-run").stdout
        assert call("data", "fetch", str(file)).exit_code == 0
    assert epochs in call(*line, "--dry-run").stdout
    assert files_of(call(*line, "--json"))[0].endswith("/.data/mine/my-gpt2_text_document")
    assert "epochs" not in call(*NEOX, "--dry-run").stdout  # the tokens of its corpus are unknown


def test_a_site_has_it_already(mirrored: DataServer, tmp_path: Path) -> None:
    (data_set,) = call_json("data", "fetch", "neox_20b", "--to", f"{tmp_path}/site")["fetched"]
    corpus, tokenizer = data_set["corpus"], data_set["tokenizer"]
    profile = tmp_path / "site.yaml"
    profile.write_text(
        f"extends: local\ndata:\n  wikipedia_gpt2: {{corpus: {corpus}, tokenizer: {tokenizer}}}\n"
    )
    files = files_of(call(*NEOX, f"--cluster={profile}", "--json"))
    assert files[:2] == (corpus, tokenizer)
    assert files[2]["data.corpus"] == "cluster.data.wikipedia_gpt2 (site.yaml:3)"
    # The user's own configuration is over the profile's.
    profile.write_text("extends: local\ndata:\n  wikipedia_gpt2: {corpus: /nosuch}\n")
    assert "/nosuch" in fails(2, *NEOX, f"--cluster={profile}")
    file = tmp_path / "user" / "config.yaml"
    file.write_text(f"data:\n  wikipedia_gpt2:\n    corpus: {corpus}\n")
    files = files_of(call(*NEOX, f"--cluster={profile}", "--json"))
    assert files[:2] == (corpus, "None")
    assert files[2]["data.corpus"] == "cluster.data.wikipedia_gpt2 (user/config.yaml:3)"
    file.write_text(f"data_folder: {tmp_path}/site\n")
    assert files_of(call(*NEOX, "--json"))[0] == corpus
    for text, message in (
        ("dta: {}\n", "unknown field 'dta'; it may set cluster, data, data_folder, data_mir"),
        ("data: {wikipedia: {corpus: x}}\n", "unknown data set; did you mean 'wikipedia_gpt2'?"),
        ("data: 3\n", "cluster.data: 3"),
    ):
        file.write_text(text)
        assert message in fails(2, *NEOX)
    file.write_text("data: {}\n")
    file.chmod(0o666)
    assert "every user may write to it" in fails(2, *NEOX)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of runs in which the built-in texts are made once."""
    return f"--runs-dir={tmp_path_factory.mktemp('runs')}"


@pytest.mark.parametrize("recipe", ["llama2_7b_finetune", "llama3_8b"])
def test_a_trial_on_the_built_in_texts(
    fake: FakeSlurm, recipe: str, runs: str, caplog: pytest.LogCaptureFixture
) -> None:
    """llama2_7b_finetune then needs no weights; llama3_8b's batch is longer than the texts."""
    more = (*REHEARSED[:3], "--set=parallel.pipeline=1", "--set=parallel.sequence=false")
    sent = call("submit", recipe, "--nodes=4", *more, "--data=builtin", "--json", runs)
    trial = f"TRIAL RUN: with --data builtin, {recipe} trains on the source files of this mac"
    assert trial in caplog.text
    corpus, tokenizer, origins = files_of(sent)
    assert "stdlib" in corpus
    assert "stdlib" in tokenizer
    assert origins["data.corpus"] == origins["data.tokenizer"] == "--data builtin"
    run = json.loads(sent.stdout)["run"]
    assert "texts that ship with Python" in call("status", run, runs).stdout
    assert call_json("status", run, runs)["trial"] is True


def test_other_data(fake: FakeSlurm) -> None:
    other = fails(2, *NEOX, "--data=c4_en,gpt2_tokenizer")
    assert "run `slurmllm data fetch c4_en gpt2_tokenizer` (about 305" in other
    assert "exclude each other" in fails(2, *NEOX, "--data=builtin", "--fetch")
