"""Models of the Hugging Face hub, downloaded into its cache; no torch."""

from __future__ import annotations

from pathlib import Path

from slurmllm.core.errors import DataError, InfrastructureError, UserError
from slurmllm.train.checkpoint.formats.tokenizer_files import FILES

_PREFIX = "hf://"
# The tokenizer, configuration and safetensors of a model: no pickles, nor other programs' weights.
_WEIGHTS = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
_PATTERNS = ["config.json", *_WEIGHTS, *FILES]


def model_folder(source: str) -> Path:
    """Return the folder of a model: `source` itself, or that of `hf://ORG/NAME[@REVISION]`.

    As for other users of the hub, HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE apply. Raises a
    UserError for the name or its rights, an InfrastructureError for the hub or the cache.
    """
    if not source.startswith(_PREFIX):
        return Path(source)
    from huggingface_hub import constants, errors, snapshot_download  # 0.3 s of imports

    name, _, revision = source.removeprefix(_PREFIX).partition("@")
    try:
        folder = Path(snapshot_download(name, revision=revision or None, allow_patterns=_PATTERNS))
    except (errors.HFValidationError, errors.RepositoryNotFoundError) as error:
        raise UserError(
            f"{source} cannot be downloaded: {error}; write {_PREFIX}ORG/NAME[@REVISION], and for "
            "a private or gated model log in with `hf auth login`, or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{source}: no such branch, tag or commit: {error}") from error
    # The base of the errors of the hub's http library need not be an OSError.
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        offline = constants.HF_HUB_OFFLINE
        reason = "HF_HUB_OFFLINE is set; unset it" if offline else f"{error}; try again"
        raise (DataError if offline else InfrastructureError)(
            f"{source} cannot be downloaded to {constants.HF_HUB_CACHE}: {reason}, or copy there "
            f"what `hf download {name}` caches on a machine with internet access"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise DataError(
            f"{source} has no safetensors, and pickled weights are not read; load the model in "
            "transformers and save it with save_pretrained, then import that folder"
        )
    return folder
