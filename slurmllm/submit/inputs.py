"""The inputs of a run: corpus, tokenizer and initial weights, as checked absolute paths."""

from __future__ import annotations

from pathlib import Path

from slurmllm.config.resolve import RunConfig
from slurmllm.errors import ConfigError, DataError

STDLIB = "stdlib"  # the built-in corpus and its tokenizer


def resolve_weights(config: RunConfig) -> RunConfig:
    """Make `train.init_from` an absolute path and check the checkpoint there.

    Raises:
        RunError: it is no checkpoint, or one of another model.
        StorageError: it is damaged.
    """
    if config.recipe.train.init_from is None:
        return config
    from slurmllm.checkpoint.state import require_model

    source = Path(config.recipe.train.init_from).absolute()
    require_model(source, config.recipe.model)
    return config.with_init_from(str(source))


def resolve_inputs(config: RunConfig, root: Path, build: bool) -> RunConfig:
    """Make corpus and tokenizer absolute paths and check them.

    Args:
        config: The resolved configuration.
        root: The folder of all runs; built-in data is stored in its `.data`.
        build: Whether to build `stdlib` if it is missing. Without it, a configuration that names
            no corpus, or `stdlib`, is returned as it is.

    Raises:
        ConfigError: no corpus is set.
        DataError: an input is missing or unusable.
    """
    data = config.recipe.data
    if data.corpus is None:
        if not build:
            return config
        raise ConfigError(
            f"{config.recipe.name} has no training data",
            [
                f"data.{name}: not set; add --set data.{name}={example} ({maker})"
                for name, value, example, maker in (
                    ("corpus", data.corpus, "corpus.arrow", "made by `slurmllm data build`"),
                    (
                        "tokenizer",
                        data.tokenizer,
                        "tokenizer.json",
                        "or `slurmllm tokenizer train`",
                    ),
                )
                if value is None
            ],
        )
    builtin: tuple[Path, Path] | None = None
    if STDLIB in [*(share.path for share in data.corpora), data.tokenizer]:
        if not build:
            _require_files(config)
            return config
        from slurmllm.corpus.builtin import ensure_stdlib

        builtin = ensure_stdlib(root / ".data")

    def absolute(path: str, index: int) -> str:
        found = builtin[index] if builtin is not None and path == STDLIB else Path(path)
        return str(found.absolute())

    corpora = tuple(
        share.model_copy(update={"path": absolute(share.path, 0)}) for share in data.corpora
    )
    tokenizer = None if data.tokenizer is None else absolute(data.tokenizer, 1)
    from slurmllm.data.inspection import check_corpora

    check_corpora(
        [(Path(share.path), share.weight) for share in corpora],
        None if tokenizer is None else Path(tokenizer),
        config.recipe.model.vocab_size,
        config.recipe.model.seq_len,
        config.recipe.train.global_batch,
        data.validation,
        data.mask,
    )
    return config.with_data(corpora[0].path if isinstance(data.corpus, str) else corpora, tokenizer)


def _require_files(config: RunConfig) -> None:
    """Check that the inputs exist, except the built-in ones.

    Raises:
        DataError: one does not.
    """
    data = config.recipe.data
    for option, path in [
        *(("data.corpus", share.path) for share in data.corpora),
        ("data.tokenizer", data.tokenizer or STDLIB),
    ]:
        # A tokenized corpus may be named by the common prefix of its two files.
        files = (Path(path), Path(f"{path}.idx"))
        if path != STDLIB and not any(file.is_file() for file in files):
            raise DataError(f"{option}: {path!r} is no file; name one that exists")
