"""Prompt and completion as text, rendered by the tokenizer's chat template if it has one.

Templates are Hugging Face's: Jinja, in `chat_template.jinja` or in the field `chat_template` of
`tokenizer_config.json`, in the folder of a `tokenizer.json`, rendered as transformers does
(`utils/chat_template_utils.py`).
"""

from __future__ import annotations

import hashlib
import io
import json
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from slurmllm.errors import DataError
from slurmllm.safe_files import read_limited
from slurmllm.staged_files import local_copy

# The default date of Llama 3.1's template. With the current date, tokens would change every day.
_DATE = datetime(2024, 7, 26)
_SHOWN = 40
# Limits of one rendering of a template; a long chat takes milliseconds and some kilobytes.
_RENDER_S = 5.0
_LARGEST = 1 << 24  # characters, elements or bits
_RENDER_BYTES = 1 << 29
# One at a time: the limit is the process's, and each restores what it found. Rendering compiles.
_limiting = threading.RLock()


def sandbox(**options: Any) -> Any:
    """A Jinja environment for templates that came with somebody's files.

    A template is a program: it reaches no Python objects but its values, cannot change them, and
    fails after `_RENDER_S` or with a value of more than `_LARGEST`. Both are checked at iterations,
    calls, filters and assignments, so that no signal or thread is needed. What a single one of
    these allocates is limited to `_RENDER_BYTES`.
    """
    from jinja2 import Template, nodes, pass_context
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class TimedContext(Context):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.deadline = time.monotonic() + _RENDER_S

    @pass_context
    def checked(context: TimedContext, value: Any) -> Any:
        if time.monotonic() > context.deadline:
            raise OverflowError(f"it runs for more than {_RENDER_S:.0f} s")
        _check_size(_size(value))
        return value

    @pass_context
    def each(context: TimedContext, values: Iterable[Any]) -> Iterator[Any]:
        return (checked(context, value) for value in values)

    class LimitedTemplate(Template):
        def render(self, *values: Any, **named: Any) -> str:
            with _limited_memory():
                return super().render(*values, **named)

    class Sandbox(ImmutableSandboxedEnvironment):
        context_class = TimedContext
        template_class = LimitedTemplate
        intercepted_binops = frozenset({"*", "**"})

        @staticmethod
        def concat(parts: Iterable[str]) -> str:
            parts = list(parts)
            _check_size(sum(map(len, parts)))
            return "".join(parts)

        def compile(self, *source: Any, **named: Any) -> Any:
            with _limited_memory():  # constant expressions are evaluated here
                return super().compile(*source, **named)

        def _parse(self, *source: Any) -> nodes.Template:
            template = super()._parse(*source)
            fields: dict[Any, str] = {nodes.For: "iter", nodes.AssignBlock: "filter"}
            kinds = (nodes.For, nodes.AssignBlock, nodes.Assign, nodes.Filter)
            for node in list(template.find_all(kinds)):
                field = fields.get(type(node), "node")
                inner, name = getattr(node, field), "_each" if field == "iter" else "_checked"
                if inner is not None or field == "filter":
                    check = nodes.Filter(inner, name, [], [], None, None, lineno=node.lineno)
                    setattr(node, field, check)
            return template

        def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
            for value in (*arguments, *named.values()):
                _check_size(abs(value) if isinstance(value, int) else 0)
            return checked(context, super().call(context, function, *arguments, **named))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            times, value = (left, right) if isinstance(left, int) else (right, left)
            if operator == "**":
                _check_size(_size(left) * right)
            elif not isinstance(value, int | float):  # a text or list
                _check_size(_size(value) * times)
            return checked(context, super().call_binop(context, operator, left, right))

    environment = Sandbox(**options)
    environment.filters |= {"_checked": checked, "_each": each}
    del environment.globals["lipsum"]  # makes any amount of text in one call
    return environment


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Limit memory to `_RENDER_BYTES` more than now; the limit also applies to other threads."""
    with _limiting:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _RENDER_BYTES
        if soft == resource.RLIM_INFINITY or limit < soft:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        try:
            yield
        except MemoryError as error:
            raise OverflowError(
                f"its rendering exceeds the limit of {_RENDER_BYTES >> 20} MiB"
            ) from error
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _size(value: Any) -> int:
    """Length of a text or list, bits of a whole number; 0 of anything else."""
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def _check_size(size: float) -> None:
    if size > _LARGEST:
        raise OverflowError(f"it makes a value of more than {_LARGEST:,} characters or elements")


class ChatFormat:
    """Prompt and completion → the text that is only read and the text that is trained.

    Args:
        tokenizer: A tokenizer.json. Only a file of exactly this name has a template.

    Attributes:
        end_token: The tokenizer config's `eos_token`, None if it has none.
        fingerprint: Hex digest of template and special tokens; empty if there are none.

    Raises:
        DataError: a file cannot be read, or its template is invalid.
    """

    def __init__(self, tokenizer: Path) -> None:
        self._source = tokenizer.with_name("tokenizer_config.json")
        self._tokens: dict[str, str] = {}
        template = None
        if tokenizer.name == "tokenizer.json":
            config = _read_config(self._source)
            self._tokens = _special_tokens(config)
            template = _default_template(config.get("chat_template"), self._source)
            jinja_file = tokenizer.with_name("chat_template.jinja")
            if jinja_file.is_file():
                self._source, template = jinja_file, _read(jinja_file)
        self.end_token = self._tokens.get("eos_token")
        self.fingerprint = ""
        if template is not None or self._tokens:
            identity = json.dumps([template, sorted(self._tokens.items())])
            self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._render = None if template is None else self._compile(template)

    @property
    def has_template(self) -> bool:
        """Whether texts are rendered, with special tokens."""
        return self._render is not None

    def texts(self, prompt: str, completion: str) -> tuple[str, str]:
        """The text up to the completion, as for generation, and the text after that.

        Raises:
            DataError: the template fails, or its output for the prompt is not a prefix.
        """
        if self._render is None:
            return prompt, completion
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        before = self._render(turns[:1], add_generation_prompt=True)
        whole = self._render(turns, add_generation_prompt=False)
        if whole.startswith(before):
            return before, whole[len(before) :]
        differs = next(
            (i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(whole)
        )
        raise DataError(
            f"the chat template of {self._source} cannot be split into prompt and completion: "
            "its output for the prompt must be a prefix of its output for prompt and completion, "
            f"but from character {differs} they are {before[differs : differs + _SHOWN]!r} and "
            f"{whole[differs : differs + _SHOWN]!r}; change the template, or remove it"
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
                f"the chat template of {self._source} omits the text of a prompt or completion: it "
                f"renders them as {before[:_SHOWN]!r} and {after[:_SHOWN]!r}; change the template, "
                "or remove it"
            )

    def _compile(self, template: str) -> Callable[..., str]:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser

        class Generation(Extension):
            """`{% generation %}`, which marks the assistant's text and renders it unchanged."""

            tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

            def parse(self, parser: Parser) -> list[nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        # The options and functions of transformers; any difference would change the tokens.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = _DATE.strftime
        try:
            compiled = environment.from_string(template)
        # SyntaxError: Python's parser nests less deeply than jinja2's.
        except (TemplateError, RecursionError, SyntaxError, OverflowError) as error:
            raise self._template_error(error) from error

        def render(turns: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
            try:
                text: str = compiled.render(
                    messages=turns,
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._tokens,
                )
                return text
            except Exception as error:  # a template may fail in any way
                raise self._template_error(error) from error

        return render

    def _template_error(self, error: Exception) -> DataError:
        return DataError(
            f"the chat template of {self._source} fails: {error}; fix it, or remove it: prompts "
            "and completions are then read as plain text"
        )


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
    """The `eos_token` of the tokenizer_config.json next to a tokenizer.json, None if absent."""
    if tokenizer.name != "tokenizer.json":
        return None
    config = _read_config(tokenizer.with_name("tokenizer_config.json"))
    return _special_tokens(config).get("eos_token")


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The fields `…_token`: each a text, or an object with the text as `content`."""
    tokens = {}
    for name, value in config.items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    return tokens


def _default_template(templates: Any, path: Path) -> str | None:
    """The template, or of several the one named `default`."""
    found = templates
    if isinstance(templates, list):
        entries = [entry for entry in templates if isinstance(entry, dict)]
        found = {entry.get("name"): entry.get("template") for entry in entries}.get("default")
        if found is None:
            raise DataError(
                f"chat_template of {path} is a list without a template named `default`; name one "
                "so, or replace the list by the template"
            )
    if found is not None and not isinstance(found, str):
        raise DataError(f"chat_template of {path} is {type(found).__name__}, not text; fix it")
    return found


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
