"""libyaml reads what PyYAML reads, and faults are told in PyYAML's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmllm.core.config import yaml_source
from slurmllm.core.config.resolve import clusters_dir, recipes_dir
from slurmllm.core.config.yaml_source import parse_scalar, read_yaml, write_yaml
from slurmllm.core.errors import ConfigError

WORDS = st.text("a1eé:#'\"-[]{},&*?|>%!~ _.\n", max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS
TREES = st.dictionaries(
    WORDS,
    st.recursive(LEAVES, lambda t: st.lists(t) | st.dictionaries(WORDS, t), max_leaves=9),
    min_size=1,
)

DEEP = "[" * 1100  # more than libyaml is given


def by_both(path: Path) -> list[Any]:
    """What is read, or the message; by libyaml, and without it."""
    result: list[Any] = []
    for loader in (yaml_source._FastLoader, yaml_source._Loader):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(yaml_source, "_FastLoader", loader)
            try:
                result.append(read_yaml(path))
            except ConfigError as error:
                result.append(str(error))
    return result


@settings(max_examples=amount(20, of=200))
@given(TREES)
def test_a_tree_comes_back(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, object]
) -> None:
    path = tmp_path_factory.getbasetemp() / "tree.yaml"
    path.write_text(write_yaml(tree))
    fast, slow = by_both(path)
    assert fast == slow
    assert isinstance(fast, str) or fast[0] == tree


@pytest.mark.parametrize(
    "text",
    [
        "a: [1\n",
        "a: b: c\n",
        "a:\tb\n",
        "a:\n\tb: 1\n",
        "a: @b\n",
        "? [a]\n: b\n",
        "a: !!python/name:os.system\n",
        "a: 1\n---\nb: 2\n",
        "a: " + DEEP + "]" * len(DEEP),
        "a: |#\n b\n",
        "a: {b?: 1,<, c: }\n",
        "a:\n\ufeffb: 1\n",
        "\ufeffa: 1\n",
        "a: &x {b: 1}\n<<: *x\n<<: *x\n",
        "%X\n",
        "a:\n  " + "- " * 200_000,
    ],
)
def test_faults_are_told_in_the_same_words(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    fast, slow = by_both(path)
    assert fast == slow


def test_what_a_merge_brings_may_be_written_over(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("a: &x {b: 1, c: 2}\nd: &y\n  <<: *x\n  b: 3\ne:\n  <<: [*y]\n  c: 4\n")
    values, lines = read_yaml(path)
    assert (values["d"], values["e"]) == ({"b": 3, "c": 2}, {"b": 3, "c": 4})
    assert (lines["d.b"], lines["e.c"]) == ("r.yaml:4", "r.yaml:7")
    assert lines["d.c"] == "r.yaml:1"  # what is merged is set, too
    assert not any("<<" in path for path in lines)


def test_shipped_files_and_their_lines() -> None:
    assert yaml.__with_libyaml__ == (yaml_source._FastLoader is not yaml_source._Loader)
    for folder in (recipes_dir(), clusters_dir()):
        for path in folder.glob("*.yaml"):
            fast, slow = by_both(path)
            assert fast == slow
            assert not isinstance(fast, str)


def test_scalars_of_the_command_line() -> None:
    texts = ("1e-4", "1:30", "[1, a]", "null", "x: [", DEEP)
    assert [parse_scalar(text) for text in texts] == [
        1e-4,
        "1:30",
        [1, "a"],
        None,
        "x: [",
        DEEP,
    ]
