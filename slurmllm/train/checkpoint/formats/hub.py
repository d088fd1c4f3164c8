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
    page = f"{constants.ENDPOINT}/{name}"
    login = "log in with `hf auth login`, or set HF_TOKEN"
    # The first that fits: a gated model is also one that is not seen.
    refusals: dict[type[Exception], str] = {
        errors.HFValidationError: f" names no model; write {_PREFIX}ORG/NAME[@REVISION]",
        errors.GatedRepoError: f" is gated: accept its terms on {page}, then {login}",
        errors.RevisionNotFoundError: f": no such branch, tag or commit; see {page}/tree/main",
        errors.RepositoryNotFoundError: (
            f": no such model, or a private one; check the name on {constants.ENDPOINT}, and for a "
            f"private model {login}"
        ),
    }
    try:
        folder = Path(snapshot_download(name, revision=revision or None, allow_patterns=_PATTERNS))
    except tuple(refusals) as error:
        reason = next(hint for kind, hint in refusals.items() if isinstance(error, kind))
        raise UserError(f"{source}{reason}") from error
    except errors.LocalEntryNotFoundError as error:
        offline = constants.HF_HUB_OFFLINE
        silent = f"{constants.ENDPOINT} cannot be reached; try again"
        reason = "HF_HUB_OFFLINE is set; unset it" if offline else silent
        version = f" --revision {revision}" if revision else ""
        raise (DataError if offline else InfrastructureError)(
            f"{source} is not fully cached, and {reason}, or run `hf download {name}{version} "
            f"--exclude '*.bin'` on a machine with internet access and copy its cache to "
            f"{constants.HF_HUB_CACHE}"
        ) from error
    # The base of the errors of the hub's http library, which need not be OSErrors.
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        raise InfrastructureError(
            f"{source} cannot be downloaded to {constants.HF_HUB_CACHE}: {error}; run the same "
            "command again, if the disk is full with HF_HOME in another place"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise DataError(
            f"{source} has no safetensors, and pickled weights are not read; load the model in "
            "transformers and save it with save_pretrained, then import that folder"
        )
    return folder
