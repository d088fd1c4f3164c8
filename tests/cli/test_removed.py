"""Removed verbs, options and fields: one error that names the replacement."""

import json
from pathlib import Path

import pytest
import yaml
from command_line import call

from slurmllm.core import removed
from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import ConfigError


def _run(*arguments: str) -> tuple[int, str]:
    result = call(*arguments)
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(removed.VERBS, "checkpoint melt", "use `resume`")
    monkeypatch.setitem(removed.VERBS, "melt", "use `resume`")
    monkeypatch.setitem(removed.OPTIONS, ("plan", "--melt"), "use --nodes")
    monkeypatch.setitem(removed.FIELDS, "train.melting", "use cluster.setup")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("melt", "--any"), "slurmllm melt was removed; use `resume`"),
        (("checkpoint", "melt"), "slurmllm checkpoint melt was removed; use `resume`"),
        (("plan", "tiny_neox", "--melt", "3"), "--melt of slurmllm plan was removed; use --nodes"),
        (
            ("plan", "tiny_neox", "--nodes", "1", "train.melting.heat=3"),
            "train.melting was removed; use cluster.setup",
        ),
    ],
)
def test_an_error_names_the_replacement(arguments: tuple[str, ...], message: str) -> None:
    code, output = _run(*arguments)
    assert (code, message in output) == (2, True), output


def test_every_row_that_is_in_the_tables_is_gone() -> None:
    for verb in removed.VERBS:
        code, output = _run(*verb.split(), "--help")
        assert (code, "was removed" in output) == (2, True), verb
    for verb, option in removed.OPTIONS:
        assert f" {option} " not in _run(*verb.split(), "--help")[1], (verb, option)


@pytest.mark.parametrize(("origin", "is_read"), [("default", True), ("recipe x", False)])
def test_a_run_of_an_older_version_resumes_if_the_field_had_its_default(
    tmp_path: Path, origin: str, is_read: bool
) -> None:
    config = tmp_path / "config.yaml"
    tree = json.loads(_run("recipes", "tiny_neox", "--json")[1])
    tree["train"]["melting"] = False
    config.write_text(json.dumps(tree | {"origin": {"train.melting": origin}}))
    if is_read:
        assert load(config).recipe.name == "tiny_neox"
    else:
        with pytest.raises(ConfigError, match=r"train\.melting was removed"):
            load(config)


def test_a_run_resumes_without_a_field_that_only_planned(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    tree = yaml.safe_load(resolve("neox_20b", "trn1").to_yaml())
    tree["cluster"]["price"]["reserved"] = 7.59
    tree["origin"]["cluster.price.reserved"] = "trn1.yaml:36"
    config.write_text(yaml.safe_dump(tree))
    assert load(config).cluster.price.on_demand == 21.5
