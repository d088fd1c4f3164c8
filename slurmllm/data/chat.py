"""The chat template of a tokenizer, and what it renders.

Templates are Hugging Face's: Jinja, in `chat_template.jinja` or in the field `chat_template` of
`tokenizer_config.json`, in the folder of a `tokenizer.json`.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slurmllm.data.conversation import SHOWN, Span, template_error
from slurmllm.data.sandbox import Sandbox
from slurmllm.errors import DataError
from slurmllm.run.safe_files import read_limited

# A conversation as text, and the spans (begin, end) of its characters that are trained.
Rendered = tuple[str, list[Span]]


class ChatFormat:
    """Renders conversations, prompts and completions by a tokenizer's chat template; without one,
    prompts and completions are unchanged.

    A child process (`sandbox.py`) renders many documents. A template and special tokens are read
    only if `tokenizer` is named tokenizer.json.

    Attributes:
        end_token: The tokenizer config's `eos_token`, None if it has none.
        has_template: Whether texts are rendered, with special tokens.
        fingerprint: Hex digest of template and special tokens; empty if there are none.
        source: The file of the template.
    """

    def __init__(self, tokenizer: Path) -> None:
        self.source = tokenizer.with_name("tokenizer_config.json")
        self._tokens: dict[str, str] = {}
        template = None
        if tokenizer.name == "tokenizer.json":
            config = _read_config(self.source)
            self._tokens = _special_tokens(config)
            template = _default_template(config.get("chat_template"), self.source)
            jinja_file = tokenizer.with_name("chat_template.jinja")
            if jinja_file.is_file():
                self.source, template = jinja_file, _read(jinja_file)
        self.end_token = self._tokens.get("eos_token")
        self.fingerprint = ""
        if template is not None or self._tokens:
            identity = json.dumps([template, sorted(self._tokens.items())])
            self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._sandbox: Sandbox | None = None
        self.has_template = template is not None
        if template is not None:
            settings = {"template": template, "tokens": self._tokens, "source": str(self.source)}
            self._sandbox = Sandbox("slurmllm.data.conversation", settings)
            list(self._ask([]))  # starts the child: an invalid template is an error at once

    def conversations(self, texts: Sequence[str]) -> Iterator[Rendered]:
        """Yield text and trained spans of conversations, each a row's `messages` in JSON."""
        self.require_template()
        yield from self._ask([[text] for text in texts])

    def require_template(self) -> None:
        if self._sandbox is None:
            raise DataError(
                f"{self.source} has no chat_template, which conversations need; put "
                "chat_template.jinja, or the tokenizer_config.json of a model that was trained on "
                "conversations, next to a file named tokenizer.json"
            )

    def texts(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return for each (prompt, completion) the text up to the completion, and that after it."""
        if self._sandbox is None:
            return list(pairs)
        return [(before, after) for before, after in self._ask(pairs)]

    def validate(self) -> None:
        """Check with an example that the template can be split and omits nothing."""
        prompt, completion = "What is it?", "It is nothing."
        ((before, after),) = self.texts([(prompt, completion)])
        if prompt not in before or completion not in after:
            raise DataError(
                f"the chat template of {self.source} omits the text of a prompt or completion: it "
                f"renders them as {before[:SHOWN]!r} and {after[:SHOWN]!r}; change the template, "
                "or remove it"
            )

    def _ask(self, requests: Sequence[Sequence[str]]) -> Iterator[Any]:
        assert self._sandbox is not None
        try:
            yield from self._sandbox.ask(requests)
        except OverflowError as error:  # a limit of the sandbox
            raise template_error(str(self.source), error) from error
        except ValueError as error:
            raise DataError(str(error)) from error


def _read(path: Path) -> str:
    try:
        return io.TextIOWrapper(io.BytesIO(read_limited(path)), "utf-8").read()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}; fix it or remove it") from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}; fix it or remove it") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} is not a JSON object; fix it or remove it")
    return config


def configured_eos_token(tokenizer: Path) -> str | None:
    """Return `eos_token` of the tokenizer_config.json next to a tokenizer.json, None if absent."""
    if tokenizer.name != "tokenizer.json":
        return None
    config = _read_config(tokenizer.with_name("tokenizer_config.json"))
    return _special_tokens(config).get("eos_token")


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the fields `…_token`: each a text, or an object with the text as `content`."""
    tokens = {}
    for name, value in config.items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    return tokens


def _default_template(templates: Any, path: Path) -> str | None:
    """Return the template, or of several the one named `default`."""
    template = templates
    if isinstance(templates, list):
        entries = [entry for entry in templates if isinstance(entry, dict)]
        template = {entry.get("name"): entry.get("template") for entry in entries}.get("default")
        if template is None:
            raise DataError(
                f"chat_template of {path} is a list without a template named `default`; name one "
                "so, or replace the list by the template"
            )
    if template is not None and not isinstance(template, str):
        raise DataError(f"chat_template of {path} is {type(template).__name__}, not text; fix it")
    return template
