"""The Jinja environment of templates that came with somebody's files, with limits."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Limits of one rendering of a template; a long chat takes milliseconds and some kilobytes.
_RENDER_S = 5.0
_LARGEST = 1 << 24  # characters, elements or bits
_RENDER_BYTES = 1 << 29
# One at a time: the limit is the process's, and each restores it. Rendering compiles.
_limiting = threading.RLock()


class _TimedContext(Context):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.deadline = time.monotonic() + _RENDER_S


@pass_context
def _checked(context: _TimedContext, value: Any) -> Any:
    if time.monotonic() > context.deadline:
        raise OverflowError(f"it runs for more than {_RENDER_S:.0f} s")
    _check_size(_size(value))
    return value


@pass_context
def _each(context: _TimedContext, values: Iterable[Any]) -> Iterator[Any]:
    return (_checked(context, value) for value in values)


class _LimitedTemplate(Template):
    def render(self, *values: Any, **named: Any) -> str:
        with _limited_memory():
            return super().render(*values, **named)


class Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment for templates that came with somebody's files.

    A template is a program: it reaches no Python objects but its values, cannot change them, and
    fails after `_RENDER_S` or with a value of more than `_LARGEST`. Both are checked at iterations,
    calls, filters and assignments, so that no signal or thread is needed. What a single one of
    these allocates is limited to `_RENDER_BYTES`.
    """

    context_class = _TimedContext
    template_class = _LimitedTemplate
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters |= {"_checked": _checked, "_each": _each}
        del self.globals["lipsum"]  # makes any amount of text in one call

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
        return _checked(context, super().call(context, function, *arguments, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        times, value = (left, right) if isinstance(left, int) else (right, left)
        if operator == "**":
            _check_size(_size(left) * right)
        elif not isinstance(value, int | float):  # a text or list
            _check_size(_size(value) * times)
        return _checked(context, super().call_binop(context, operator, left, right))


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
    """Return the length of a text or list, the bits of a whole number; 0 of anything else."""
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def _check_size(size: float) -> None:
    if size > _LARGEST:
        raise OverflowError(f"it makes a value of more than {_LARGEST:,} characters or elements")
