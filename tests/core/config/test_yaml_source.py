"""What is written is read back, and hostile files are refused."""

from pathlib import Path

import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st

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


@settings(max_examples=amount(20, of=200))
@given(TREES)
def test_a_tree_comes_back(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, object]
) -> None:
    path = tmp_path_factory.getbasetemp() / "tree.yaml"
    path.write_text(write_yaml(tree))
    assert read_yaml(path)[0] == tree


@pytest.mark.parametrize(
    "text",
    [
        "a: [1\n",
        "a: !!python/name:os.system\n",
        "a: 1\n---\nb: 2\n",
        f"a: {DEEP}",
        "%X\n",
        f"a:\n  {'- ' * 60_000}",
        "? " * 60_000,
    ],
)
def test_a_file_that_is_not_yaml_or_too_deep_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"is not valid YAML|nested too deeply"):
        read_yaml(path)


def test_what_a_merge_brings_may_be_written_over(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("a: &x {b: 1, c: 2}\nd: &y\n  <<: *x\n  b: 3\ne:\n  <<: [*y]\n  c: 4\n")
    values, lines = read_yaml(path)
    assert (values["d"], values["e"]) == ({"b": 3, "c": 2}, {"b": 3, "c": 4})
    assert (lines["d.b"], lines["e.c"]) == ("r.yaml:4", "r.yaml:7")
    assert lines["d.c"] == "r.yaml:1"  # what is merged is set, too
    assert not any("<<" in path for path in lines)


def test_scalars_of_the_command_line() -> None:
    texts = ("1e-4", "1:30", "[1, a]", "null", "x: [", DEEP)
    assert [parse_scalar(text) for text in texts] == [1e-4, "1:30", [1, "a"], None, "x: [", DEEP]
