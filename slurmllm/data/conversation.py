"""Conversations for fine-tuning: their form in a corpus, as text, and what of them is trained.

A record has `messages` as OpenAI, TRL and transformers write them (`role` and `content`), or
ShareGPT's `conversations` (`from` and `value`). The tokenizer's chat template renders all of it at
once, as transformers does (`utils/chat_template_utils.py`); the assistant's turns in that text are
what is trained.

CAUTION: a template is somebody's program; it is rendered in a child (`sandbox.py`). Run as a
module, this is the child of `ChatFormat`.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

from slurmllm.data.sandbox import LARGEST, limited_environment, serve
from slurmllm.errors import DataError

# A turn of a conversation: `role`, `content` and what else the template reads.
Message = dict[str, Any]
# Begin and end of a part of a text, in characters.
Span = tuple[int, int]

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# Names of a message's reasoning, as transformers' `_alias_reasoning_fields` has them.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# The default date of Llama 3.1's template. With the current date, tokens would change every day.
_DATE = datetime(2024, 7, 26)
SHOWN = 40  # characters of a text in a message


class Conversation(NamedTuple):
    """Messages, and the definitions of the tools that the assistant may call."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    def to_json(self) -> str:
        """Return compact JSON; equal conversations have equal bytes."""
        fields = {"messages": self.messages, **({"tools": self.tools} if self.tools else {})}
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))

    @property
    def trains(self) -> bool:
        """Whether the assistant has written anything."""
        return any(
            message["role"] == "assistant"
            and (
                message.get("content", "").strip()
                or message.get("tool_calls")
                or any(message.get(name) for name in _REASONING)
            )
            for message in self.messages
        )


def read_conversation(row: Mapping[str, Any], key: str) -> Conversation:
    """Read the conversation of a record with its messages in the field `key`.

    Fields that are JSON in a string are parsed. A ValueError says why it cannot be used.
    """
    if key not in row:
        fields = ", ".join(sorted(row)[:10]) or "none"
        raise ValueError(f"no field {key!r} (fields: {fields}); see --messages-key")
    value: Any = _parsed(row[key], key)
    tools: Any = _parsed(row.get("tools"), "tools")
    if isinstance(value, dict):  # as `to_json` writes it
        value, tools = value.get("messages"), value.get("tools")
    if not isinstance(value, list):
        raise ValueError(f"field {key!r} is {_shown(value)}, not a list of messages")
    if not value:
        raise ValueError(f"field {key!r} has no messages")
    if tools and not _is_objects(tools):
        raise ValueError(f"field 'tools' is {_shown(tools)}, not a list of objects")
    return Conversation([_read_message(m, n) for n, m in enumerate(value, start=1)], tools or None)


def _is_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _parsed(value: Any, key: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"field {key!r} is text and not JSON: {_shown(value)}") from error


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:SHOWN]


def _read_message(message: Any, number: int) -> Message:
    if not isinstance(message, dict):
        raise ValueError(
            f"message {number} is {_shown(message)}, not an object with `role` and `content`"
        )
    # Without nulls, as transformers: tables have them for the fields of other messages.
    fields = {name: value for name, value in message.items() if value is not None}
    if "role" not in fields and "from" in fields:
        role, content = fields.pop("from"), fields.pop("value", None)
        role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        fields = {"role": role, **({} if content is None else {"content": content}), **fields}
    if fields.get("role") not in ROLES:
        raise ValueError(
            f"message {number} has the role {_shown(fields.get('role'))}; roles are "
            f"{', '.join(ROLES)} (`from`: human, gpt, system)"
        )
    if fields.pop("weight", 1) != 1:  # OpenAI's
        raise ValueError(
            f"message {number} has a `weight` other than 1, and every turn of the assistant is "
            "trained alike; remove the field, or the conversation from this message on"
        )
    content = fields.get("content")
    if isinstance(content, list):
        content = fields["content"] = "".join(_text_of(part, number) for part in content)
    calls = fields.get("tool_calls")
    if calls is not None and not _is_objects(calls):
        raise ValueError(f"message {number} has the `tool_calls` {_shown(calls)}, not objects")
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError(f"message {number} has the content {_shown(content)}, not a string")
    return fields


def _text_of(part: Any, number: int) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ValueError(
            f"message {number} has a part that is not text, {_shown(part)}; only text is trained"
        )
    return text


class ChatTemplate:
    """A compiled template of the file `source`; a DataError if it is invalid or fails.

    Attributes:
        mark: A text that no message has.
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
        """Render messages; `marks` are added around what the template marks as generation."""
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
    ) -> list[Span] | None:
        """Locate what the template marks by `{% generation %}` in `text`, the rendered messages.

        None if it has no such marks; a DataError if it changes what it marks, as filters do.
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

        A DataError if the template's output for the prompt is not a prefix.
        """
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        before = self.render(turns[:1], add_generation_prompt=True)
        whole = self.render(turns)
        if whole.startswith(before):
            return before, whole[len(before) :]
        differs = _first_difference(before, whole)
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


# With transformers' parameters, also by position. jinja2's own `tojson` escapes HTML characters.
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


def _first_difference(a: str, b: str) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


def template_error(source: str, error: Exception) -> DataError:
    return DataError(
        f"the chat template of {source} fails: {error}; fix it, or the text that it refuses, or "
        "remove it: prompts and completions are then read as plain text"
    )


def render_conversation(chat: ChatTemplate, conversation: Conversation) -> tuple[str, list[Span]]:
    """Render a conversation as transformers does, and find the assistant's turns in the text.

    If the template marks them with `{% generation %}`, these are what it marks, as in
    transformers' `return_assistant_tokens_mask`. Otherwise a turn is what it adds to the prompt
    for it, the generation prompt excluded and the end of the turn included. A DataError if its
    output does not show where that is, or omits tools or their calls.
    """
    messages = [_with_reasoning(message) for message in conversation.messages]
    tools = conversation.tools
    text = chat.render(messages, tools=tools)
    if tools and chat.render(messages) == text:
        raise DataError(
            f"the chat template of {chat.source} renders no tools, and the conversation has some; "
            "use a template that does, or remove the field `tools`"
        )
    if any(message.get("tool_calls") for message in messages):
        plain = [{"content": "", **message, "tool_calls": []} for message in messages]
        without_calls = None
        with contextlib.suppress(DataError):  # it refuses them
            without_calls = chat.render(plain, tools=tools)
        if without_calls == text:
            raise DataError(
                f"the chat template of {chat.source} renders no tool calls, and the conversation "
                "has some; use a template that does, or remove the field `tool_calls`"
            )
    spans = chat.generation_spans(messages, text, tools)
    if spans is None:
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [_turn_span(chat, messages, turn, text, tools) for turn in turns]
    return text, spans


def _with_reasoning(message: Message) -> Message:
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _turn_span(
    chat: ChatTemplate, messages: list[Message], turn: int, text: str, tools: Any
) -> Span:
    """Locate an assistant's turn in `text`, the rendering of all messages."""
    before = chat.render(messages[:turn], add_generation_prompt=True, tools=tools)
    after = chat.render(messages[: turn + 1], tools=tools)
    if text.startswith(before):
        if after.startswith(before) and text.startswith(after):
            return len(before), len(after)
        # The last turn may be rendered differently from the same turn with others after it:
        # Qwen3's template removes the reasoning of all but the last. So the turn's end is located
        # by a mark inside the message; what follows the mark ends the turn.
        marked = [*messages[:turn], _marked(messages[turn], chat.mark), *messages[turn + 1 :]]
        head, mark, tail = chat.render(marked, tools=tools).partition(chat.mark)
        last = chat.render(marked[: turn + 1], tools=tools)
        rest, last_mark, end = last.partition(chat.mark)
        # The mark itself must not change what is rendered.
        unchanged = mark and last_mark and (head + tail, rest + end) == (text, after)
        if unchanged and tail.startswith(end) and len(before) <= len(head) + len(end):
            return len(before), len(head) + len(end)
    part = after if text.startswith(before) else before
    differs = _first_difference(part, text)
    raise DataError(
        f"the chat template of {chat.source} does not show where message {turn + 1}, the "
        "assistant's, begins and ends: rendered up to there, the conversation is "
        f"{part[differs : differs + SHOWN]!r} from character {differs}, and as a whole "
        f"{text[differs : differs + SHOWN]!r}; mark the assistant's text in the template with "
        "{% generation %} and {% endgeneration %}"
    )


def _marked(message: Message, mark: str) -> Message:
    """Return a message with the mark where its content ends, or in its last tool call."""
    calls: Sequence[Any] = message.get("tool_calls", ())
    if calls:
        call = calls[-1]
        function = call.get("function", call)
        if not isinstance(function, dict):
            return message
        function = {**function, "name": f"{function.get('name', '')}{mark}"}
        last = {**call, "function": function} if "function" in call else function
        return {**message, "tool_calls": [*calls[:-1], last]}
    content = message["content"]
    # Before white space at the end and after white space at the begin, which templates trim.
    at = len(content.rstrip()) or len(content)
    return {**message, "content": content[:at] + mark + content[at:]}


def _answers(settings: dict[str, Any]) -> Callable[[list[str]], tuple[Any, ...]]:
    """Return the function that renders a pair of texts, or the JSON of a conversation."""
    chat = ChatTemplate(**settings)

    def answer(texts: list[str]) -> tuple[Any, ...]:
        if len(texts) == 2:
            return chat.texts(*texts)
        conversation = read_conversation({"messages": texts[0]}, "messages")
        return render_conversation(chat, conversation)

    return answer


if __name__ == "__main__":
    serve(_answers)
