"""Models of the Hugging Face hub, downloaded into its cache; no torch."""

from __future__ import annotations

from pathlib import Path

from slurmllm.checkpoint.formats.tokenizer_files import FILES
from slurmllm.errors import DataError, InfrastructureError, UserError

_PREFIX = "hf://"
# The tokenizer, configuration and safetensors of a model: no pickles, nor other programs' weights.
_PATTERNS = ("config.json", "model.safetensors", "model-*.safetensors",
             "model.safetensors.index.json", *FILES)  # fmt: skip


def model_folder(source: str) -> Path:
    """Return the folder of a model: `source` itself, or that of `hf://ORG/NAME[@REVISION]`.

    The environment decides where from and where to, as for other users of the hub: HF_HOME,
    HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.

    Raises:
        UserError: the model cannot be named, seen or used like this.
        InfrastructureError: the hub does not answer, or the cache cannot be written.
    """
    if not source.startswith(_PREFIX):
        return Path(source)
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise UserError(
            f"{source} needs the package huggingface_hub: pip install huggingface_hub"
        ) from error
    name, _, revision = source.removeprefix(_PREFIX).partition("@")
    page = f"{constants.ENDPOINT}/{name}"
    try:
        folder = Path(
            snapshot_download(name, revision=revision or None, allow_patterns=[*_PATTERNS])
        )
    except errors.HFValidationError as error:
        raise UserError(f"{source} names no model; write {_PREFIX}ORG/NAME[@REVISION]") from error
    except errors.GatedRepoError as error:
        raise UserError(
            f"{source} is gated: accept its terms on {page}, then log in with `hf auth login`, or "
            "set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{source}: no such branch, tag or commit; see {page}/tree/main") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{source}: no such model, or a private one; check the name on {constants.ENDPOINT}, "
            "and for a private model log in with `hf auth login`, or set HF_TOKEN"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        offline = constants.HF_HUB_OFFLINE
        reason = (
            "HF_HUB_OFFLINE is set; unset it" if offline
            else f"{constants.ENDPOINT} does not answer; try again"
        )  # fmt: skip
        version = f" --revision {revision}" if revision else ""
        raise (DataError if offline else InfrastructureError)(
            f"{source} is not in the cache as a whole, and {reason}, or run `hf download "
            f"{name}{version} --exclude '*.bin'` where there is a network, and copy the cache "
            f"{constants.HF_HUB_CACHE}"
        ) from error
    except OSError as error:  # also of the hub; a download continues where it ended
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
