"""Jinja templates of tasks, rendered in a child process with hard limits.

A template is a program, and one operation of it (`a == b` of long lists, `a|sort`) can run in C for
hours, so nothing in its own process can stop it. The kernel ends a child that takes more than
`_RENDER_S` of processor time for one answer, and refuses it more than `_RENDER_BYTES`.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import resource
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slurmllm.train.control.rendezvous import die_with_parent

# Limits of one answer; a long prompt takes milliseconds and some kilobytes.
_RENDER_S = 5
_RENDER_BYTES = 1 << 29
# Signals to all processes of a job: a worker continues after them, and ends its child itself.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class TaskTemplates:
    """The harness's Jinja environment, in a child process that is started when it is needed.

    Args:
        undefined: Jinja's class of undefined variables.
    """

    def __init__(self, undefined: str, keep_trailing_newline: bool) -> None:
        self._options = undefined, keep_trailing_newline
        self._pool: ProcessPoolExecutor | None = None
        self._owner = 0  # process id: a fork must not use the pipes

    def from_string(self, template: str) -> Any:
        """Return a template; its `render` raises a ValueError, an OverflowError beyond a limit."""
        return SimpleNamespace(render=functools.partial(self._render, template))

    def _render(self, template: str, /, **values: Any) -> str:
        if self._pool is None or self._owner != os.getpid():
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, _start)
            self._owner = os.getpid()
        try:
            return self._pool.submit(_render_here, template, values, *self._options).result()
        except BrokenProcessPool as error:
            self._pool = None  # the next template gets another child
            raise OverflowError(f"it takes more than {_RENDER_S} s to render") from error


def _start() -> None:
    """Set the limits of the child process."""
    import jinja2.sandbox  # noqa: F401 (its memory is not part of the limit)

    die_with_parent()
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also inside an operation
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == hard == resource.RLIM_INFINITY:  # else the user has a limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _RENDER_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _render_here(template: str, values: dict[str, Any], *options: Any) -> str:
    signal.setitimer(signal.ITIMER_PROF, _RENDER_S)
    try:
        rendered: str = _compile(template, *options).render(**values)
        return rendered
    except MemoryError:
        raise OverflowError(f"it takes more than {_RENDER_BYTES >> 20} MiB to render") from None
    except Exception as error:  # a template may fail in any way; not all errors can be pickled
        raise ValueError(str(error) or type(error).__name__) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@functools.cache
def _compile(template: str, undefined: str, keep_trailing_newline: bool) -> Any:
    """Compile a template as lm-evaluation-harness does; it reaches no Python objects but values."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        undefined=getattr(jinja2, undefined), keep_trailing_newline=keep_trailing_newline
    )
    del environment.globals["lipsum"]  # makes any amount of text in one call
    environment.filters["regex_replace"] = lambda text, pattern, new, count=0: re.sub(
        pattern, new, text, count=count
    )
    return environment.from_string(template)
