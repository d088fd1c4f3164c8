"""A chat template: messages as text, as transformers renders them (`utils/chat_template_utils.py`).

CAUTION: a template is somebody's program; it is rendered in a child (`sandbox.py`).
"""

from __future__ import annotations

import json
import re
import secrets
from datetime import datetime
from typing import Any, NoReturn

from slurmllm.data.sandbox import LARGEST, limited_environment
from slurmllm.errors import DataError

# A turn of a conversation: `role`, `content` and what else the template reads.
Message = dict[str, Any]

# The default date of Llama 3.1's template. With the current date, tokens would change every day.
_DATE = datetime(2024, 7, 26)
SHOWN = 40  # characters of a text in a message


class ChatTemplate:
    """A compiled template.

    Args:
        template: Jinja.
        tokens: Special tokens that it may use, by name.
        source: Its file, for messages.

    Attributes:
        mark: A text that no message has.

    Raises:
        DataError: it is invalid.
    """

    def __init__(self, template: str, tokens: dict[str, str], source: str) -> None:
        self.source, self._tokens = source, tokens
        self.mark = f"mark{secrets.token_hex(8)}"
        self._marks_generation = False
        self._template = self._compile(template)

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
            DataError: it fails.
        """
        try:
            text: str = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                _generation=marks,
                **self._tokens,
            )
            if len(text) > LARGEST:
                raise OverflowError(f"it makes a text of more than {LARGEST:,} characters")
            return text
        except MemoryError:
            raise
        except Exception as error:  # a template may fail in any way
            raise template_error(self.source, error) from error

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

    def _compile(self, template: str) -> Any:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser

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

        environment = limited_environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        # The options and functions of transformers; any difference would change the tokens.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = _DATE.strftime
        try:
            return environment.from_string(template)
        # SyntaxError: Python's parser nests less deeply than jinja2's.
        except (TemplateError, RecursionError, SyntaxError, OverflowError, ValueError) as error:
            raise template_error(self.source, error) from error


def template_error(source: str, error: Exception) -> DataError:
    return DataError(
        f"the chat template of {source} fails: {error}; fix it, or the text that it refuses, or "
        "remove it: prompts and completions are then read as plain text"
    )


def first_difference(a: str, b: str) -> int:
    """Return the index of the first character that differs; the shorter length if none does."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


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
