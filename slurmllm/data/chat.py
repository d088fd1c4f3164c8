"""Messages as text, rendered by the tokenizer's chat template.

Templates are Hugging Face's: Jinja, in `chat_template.jinja` or in the field `chat_template` of
`tokenizer_config.json`, in the folder of a `tokenizer.json`, rendered as transformers does
(`utils/chat_template_utils.py`).
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import secrets
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from slurmllm.errors import DataError
from slurmllm.run.safe_files import read_limited
from slurmllm.run.staged_files import local_copy

# A turn of a conversation: `role`, `content` and what else the template reads.
Message = dict[str, Any]

# The default date of Llama 3.1's template. With the current date, tokens would change every day.
_DATE = datetime(2024, 7, 26)
SHOWN = 40  # characters of a text in a message


class ChatFormat:
    """The chat template of a tokenizer, and prompt and completion as text with or without one.

    Args:
        tokenizer: A tokenizer.json. Only a file of exactly this name has a template.

    Attributes:
        end_token: The tokenizer config's `eos_token`, None if it has none.
        fingerprint: Hex digest of template and special tokens; empty if there are none.
        source: The file of the template.
        mark: A text that no message has.

    Raises:
        DataError: a file cannot be read, or its template is invalid.
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
        self.mark = f"mark{secrets.token_hex(8)}"
        self._marks_generation = False
        self._template = None if template is None else self._compile(template)

    @property
    def has_template(self) -> bool:
        """Whether texts are rendered, with special tokens."""
        return self._template is not None

    def require_template(self) -> Any:
        """Return the compiled template; a DataError if there is none."""
        if self._template is None:
            raise DataError(
                f"{self.source} has no chat_template, which conversations need; put "
                "chat_template.jinja, or the tokenizer_config.json of a model that was trained on "
                "conversations, next to a file named tokenizer.json"
            )
        return self._template

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Any = None,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """Render messages; `marks` are added around what the template marks as generation.

        Raises:
            DataError: there is no template, or it fails.
        """
        template = self.require_template()
        try:
            text: str = template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                _generation=marks,
                **self._tokens,
            )
            return text
        except Exception as error:  # a template may fail in any way
            raise self._template_error(error) from error

    def generation_spans(
        self, messages: list[Message], text: str, tools: Any = None
    ) -> list[tuple[int, int]] | None:
        """Find what the template marks by `{% generation %}` in `text`, the rendered messages.

        Returns:
            Begin and end of each part; None if the template has no such marks.

        Raises:
            DataError: the template changes what it has marked, such as by a filter.
        """
        if not self._marks_generation:
            return None
        begin, end = f"{self.mark}b", f"{self.mark}e"
        parts = re.split(f"({begin}|{end})", self.render(messages, tools=tools, marks=(begin, end)))
        spans, begins, position = [], [], 0
        for part in parts:
            if part == begin:
                begins.append(position)
            elif part == end and begins:
                spans.append((begins.pop(), position))
            else:
                position += len(part)
        if begins or "".join(part for part in parts if part not in (begin, end)) != text:
            raise DataError(
                f"the chat template of {self.source} changes what it marks by "
                "{% generation %}, so that its place in the text is unknown; mark what is "
                "rendered without filters"
            )
        return spans

    def texts(self, prompt: str, completion: str) -> tuple[str, str]:
        """Return the text up to the completion, as for generation, and the text after that.

        Raises:
            DataError: the template fails, or its output for the prompt is not a prefix.
        """
        if self._template is None:
            return prompt, completion
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        before = self.render(turns[:1], add_generation_prompt=True)
        whole = self.render(turns)
        if whole.startswith(before):
            return before, whole[len(before) :]
        differs = first_difference(before, whole)
        raise DataError(
            f"the chat template of {self.source} cannot be split into prompt and completion: "
            "its output for the prompt must be a prefix of its output for prompt and completion, "
            f"but from character {differs} they are {before[differs : differs + SHOWN]!r} and "
            f"{whole[differs : differs + SHOWN]!r}; change the template, or remove it"
        )

    def validate(self) -> None:
        """Check the template with an example, before anything is queued.

        Raises:
            DataError: it fails, cannot be split, or omits the prompt or the completion.
        """
        prompt, completion = "What is it?", "It is nothing."
        before, after = self.texts(prompt, completion)
        if prompt not in before or completion not in after:
            raise DataError(
                f"the chat template of {self.source} omits the text of a prompt or completion: it "
                f"renders them as {before[:SHOWN]!r} and {after[:SHOWN]!r}; change the template, "
                "or remove it"
            )

    def _compile(self, template: str) -> Any:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser

        from slurmllm.data.sandbox import Sandbox

        chat = self

        class Generation(Extension):
            """`{% generation %}`, which marks the assistant's text and renders it unchanged."""

            tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

            def parse(self, parser: Parser) -> nodes.Node:
                line = next(parser.stream).lineno
                chat._marks_generation = True
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                marks = nodes.Name("_generation", "load")
                begin, end = (
                    nodes.Output([nodes.Getitem(marks, nodes.Const(index), "load")])
                    for index in (0, 1)
                )
                # transformers' body is a scope too.
                return nodes.Scope([begin, *body, end], lineno=line)

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        # The options and functions of transformers; any difference would change the tokens.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = _DATE.strftime
        try:
            return environment.from_string(template)
        # SyntaxError: Python's parser nests less deeply than jinja2's.
        except (TemplateError, RecursionError, SyntaxError, OverflowError) as error:
            raise self._template_error(error) from error

    def _template_error(self, error: Exception) -> DataError:
        return DataError(
            f"the chat template of {self.source} fails: {error}; fix it, or the text that "
            "it refuses, or remove it: prompts and completions are then read as plain text"
        )


def first_difference(a: str, b: str) -> int:
    """Return the index of the first character that differs; the shorter length if none does."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


def _read(path: Path) -> str:
    try:
        return io.TextIOWrapper(io.BytesIO(read_limited(local_copy(path))), "utf-8").read()
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


# jinja2's own `tojson` escapes HTML characters, which transformers' does not.
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
