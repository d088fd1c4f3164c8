"""How a prompt and its completion become text: by the tokenizer's chat template, if it has one.

Templates are those of Hugging Face: Jinja, in `chat_template.jinja` or the `chat_template` of
`tokenizer_config.json` beside a `tokenizer.json`, rendered as transformers does
(`utils/chat_template_utils.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from slurmllm.errors import DataError

# Llama 3.1's template falls back on this day. Today's would give other tokens tomorrow.
_DATE = datetime(2024, 7, 26)
_SHOWN = 40


class ChatFormat:
    """Prompt and completion → the text that is read and the text that is learnt.

    Args:
        tokenizer: A tokenizer.json. Only beside a file of this very name does a template belong
            to it.

    Attributes:
        end_token: The tokenizer config's `eos_token`, None where it has none.
        fingerprint: Hex digest of template and special tokens; empty where there are none.

    Raises:
        DataError: a file cannot be read, or its template is none.
    """

    def __init__(self, tokenizer: Path) -> None:
        self._source = tokenizer.with_name("tokenizer_config.json")
        self._tokens: dict[str, str] = {}
        template = None
        if tokenizer.name == "tokenizer.json":
            config = _read_config(self._source)
            self._tokens = _tokens(config)
            template = _default(config.get("chat_template"), self._source)
            beside = tokenizer.with_name("chat_template.jinja")
            if beside.is_file():
                self._source, template = beside, _read(beside)
        self.end_token = self._tokens.get("eos_token")
        identity = json.dumps([template, sorted(self._tokens.items())])
        self.fingerprint = ""
        if template is not None or self._tokens:
            self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._render = None if template is None else self._compiled(template)

    @property
    def has_template(self) -> bool:
        """Whether texts are rendered, special tokens included."""
        return self._render is not None

    def texts(self, prompt: str, completion: str) -> tuple[str, str]:
        """The text up to the completion, as generation would see it, and the text after that.

        Raises:
            DataError: the template fails, or does not put one after the other.
        """
        if self._render is None:
            return prompt, completion
        turns = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": completion},
        ]
        before = self._render(turns[:1], add_generation_prompt=True)
        whole = self._render(turns, add_generation_prompt=False)
        if whole.startswith(before):
            return before, whole[len(before) :]
        place = next(
            (i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(whole)
        )
        raise DataError(
            f"the chat template of {self._source} cannot be split into prompt and completion: "
            "what it makes of a prompt alone must begin what it makes of prompt and completion, "
            f"but from character {place} they are {before[place : place + _SHOWN]!r} and "
            f"{whole[place : place + _SHOWN]!r}; change the template, or take it away"
        )

    def try_out(self) -> None:
        """Find a template that cannot serve before anything is queued.

        Raises:
            DataError: it fails, cannot be split, or leaves out what it is given.
        """
        prompt, completion = "What is it?", "It is nothing."
        before, after = self.texts(prompt, completion)
        if prompt not in before or completion not in after:
            raise DataError(
                f"the chat template of {self._source} makes {before[:_SHOWN]!r} of a prompt and "
                f"{after[:_SHOWN]!r} of its completion, and leaves out what they say; change the "
                "template, or take it away"
            )

    def _compiled(self, template: str) -> Callable[..., str]:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}` marks what an assistant said; here it changes nothing."""

            tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

            def parse(self, parser: Parser) -> list[nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = _DATE.strftime
        try:
            compiled = environment.from_string(template)
        except TemplateError as error:
            raise self._broken(error) from error

        def render(turns: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
            try:
                return compiled.render(
                    messages=turns,
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._tokens,
                )
            except Exception as error:  # a template is a program, and may fail in any way
                raise self._broken(error) from error

        return render

    def _broken(self, error: Exception) -> DataError:
        return DataError(
            f"the chat template of {self._source} fails: {error}; mend it, or take it away: "
            "prompts and completions are then read as they are"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}; mend it or take it away") from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}; mend it or take it away") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} holds no JSON object; mend it or take it away")
    return config


def configured_eos_token(tokenizer: Path) -> str | None:
    """The `eos_token` of the tokenizer_config.json beside a tokenizer.json; None: there is none.

    Raises:
        DataError: that file cannot be read.
    """
    if tokenizer.name != "tokenizer.json":
        return None
    return _tokens(_read_config(tokenizer.with_name("tokenizer_config.json"))).get("eos_token")


def _tokens(config: dict[str, Any]) -> dict[str, str]:
    return {
        name: token
        for name, value in config.items()
        if name.endswith("_token") and (token := _token(value)) is not None
    }


def _token(value: Any) -> str | None:
    """A token as tokenizer_config.json gives it: its text, or an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _default(templates: Any, path: Path) -> str | None:
    """The template, or of several that named `default`."""
    found = templates
    if isinstance(templates, list):
        entries = [entry for entry in templates if isinstance(entry, dict)]
        found = {entry.get("name"): entry.get("template") for entry in entries}.get("default")
        if found is None:
            raise DataError(
                f"chat_template of {path} is a list in which no template is named `default`; "
                "name one so, or put the template itself there"
            )
    if found is not None and not isinstance(found, str):
        raise DataError(f"chat_template of {path} is {type(found).__name__}, not a text; mend it")
    return found


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
