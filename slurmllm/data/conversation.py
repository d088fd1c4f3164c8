"""Conversations for fine-tuning: their form in a corpus, and which parts of them are trained.

A record has `messages` as OpenAI, TRL and transformers write them (`role` and `content`), or
ShareGPT's `conversations` (`from` and `value`). The tokenizer's chat template renders all of it at
once; the assistant's turns in that text are what is trained. Run as a module, it is the child of
`ChatFormat`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from slurmllm.data.sandbox import serve
from slurmllm.data.template import SHOWN, ChatTemplate, Message, first_difference
from slurmllm.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# Names of a message's reasoning, as transformers' `_alias_reasoning_fields` has them.
_REASONING = ("reasoning_content", "thinking", "reasoning")


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


class Rendered(NamedTuple):
    """A conversation as text; of its characters the spans (begin, end) are trained."""

    text: str
    spans: list[tuple[int, int]]


def read_conversation(row: Mapping[str, Any], key: str) -> Conversation:
    """Read the conversation of a record with its messages in the field `key`.

    Fields that are JSON in a string are parsed.

    Raises:
        ValueError: the reason why it cannot be used.
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


def render_conversation(chat: ChatTemplate, conversation: Conversation) -> Rendered:
    """Render a conversation as transformers does, and find the assistant's turns in the text.

    If the template marks them with `{% generation %}`, these are what it marks, as in
    transformers' `return_assistant_tokens_mask`. Otherwise a turn is what it adds to the prompt
    for it, the generation prompt excluded and the end of the turn included.

    Raises:
        DataError: the template fails, omits tools or their calls, or its output does not show
            where a turn begins and ends.
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
        if _renders(chat, plain, tools) == text:
            raise DataError(
                f"the chat template of {chat.source} renders no tool calls, and the conversation "
                "has some; use a template that does, or remove the field `tool_calls`"
            )
    spans = chat.generation_spans(messages, text, tools)
    if spans is None:
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [_turn_span(chat, messages, turn, text, tools) for turn in turns]
    return Rendered(text, spans)


def _renders(chat: ChatTemplate, messages: list[Message], tools: Any) -> str | None:
    """Return the text of messages, None if the template refuses them."""
    try:
        return chat.render(messages, tools=tools)
    except DataError:
        return None


def _with_reasoning(message: Message) -> Message:
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _turn_span(
    chat: ChatTemplate, messages: list[Message], turn: int, text: str, tools: Any
) -> tuple[int, int]:
    """Return begin and end of an assistant's turn in `text`, the rendering of all messages."""
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
    differs = first_difference(part, text)
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
