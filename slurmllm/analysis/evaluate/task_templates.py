"""Jinja templates of tasks, rendered in a child process with hard limits.

A template is a program, and one operation of it (`a == b` of long lists, `a|sort`) can run in C for
hours, so nothing in its own process can stop it. The kernel ends a child that takes more than
`_RENDER_S` of processor time for one answer, and refuses it more than `_RENDER_BYTES`.

    stdin    options of the Jinja environment; then requests: JSON, one a line
    stdout   for each request {"value": …}, {"error": "…"} or {"limit": "…"}
    stderr   inherited from the parent

A child answers many requests, and exits at the end of stdin: when its parent has exited.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmllm.core.format import Json, Values
from slurmllm.core.slurm.processes import end_child

# Limits of one answer; a long prompt takes milliseconds and some kilobytes.
_RENDER_S = 5
_RENDER_BYTES = 1 << 29
# Signals to all processes of a job: a worker continues after them, and ends its child itself.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Sandbox:
    """A child process that renders templates, started when it is needed.

    Args:
        options: Of the Jinja environment, as JSON.
    """

    def __init__(self, options: Json) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process id: a fork must not use the pipes

    def render(self, template: str, values: Values) -> str:
        """Return the text of a template; after an error another child is started.

        A ValueError has the child's error message, an OverflowError the limit that it exceeds.
        """
        if self._process is None or self._owner != os.getpid():
            self._start()
        process = self._process
        assert process is not None
        try:
            _send(process, (template, values))
            return _receive(process)
        except BaseException:  # it may have ended, or still answer
            self._process = None
            end_child(process, self._owner)
            raise

    def _start(self) -> None:
        # -P: not the modules of the working directory, which may be another user's.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        weakref.finalize(self, end_child, process, os.getpid())
        _send(process, self._options)
        self._process = process
        self._owner = os.getpid()


def _send(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    line = json.dumps(value, ensure_ascii=False, default=str)
    with contextlib.suppress(BrokenPipeError):  # reading from it says why
        process.stdin.write(line.encode("utf-8", "surrogatepass") + b"\n")
        process.stdin.flush()


def _receive(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        code = process.wait()
        if code == -signal.SIGPROF:
            raise OverflowError(f"it runs for more than {_RENDER_S} s")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise OverflowError(f"the process that renders it ended with {how}")
    answer = json.loads(line.decode("utf-8", "surrogatepass"))
    if "limit" in answer:
        raise OverflowError(answer["limit"])
    if "error" in answer:
        raise ValueError(answer["error"])
    return str(answer["value"])


def _serve() -> None:
    """Answer requests from stdin to its end."""
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also inside an operation
    render = _renderer(json.loads(sys.stdin.buffer.readline()))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    for line in sys.stdin.buffer:
        if soft == hard == resource.RLIM_INFINITY:  # else the user has a limit
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + _RENDER_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        signal.setitimer(signal.ITIMER_PROF, _RENDER_S)
        try:
            template, values = json.loads(line.decode("utf-8", "surrogatepass"))
            reply = json.dumps({"value": render(template, values)}, ensure_ascii=False)
        except MemoryError:
            reason = f"its rendering exceeds the limit of {_RENDER_BYTES >> 20} MiB"
            reply = json.dumps({"limit": reason})
        except Exception as error:  # a template may fail in any way
            reply = json.dumps({"error": str(error) or type(error).__name__})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()


def _renderer(options: Json) -> Callable[[str, Values], str]:
    """Return the function that renders a template and its values, as lm-evaluation-harness does.

    Templates reach no Python objects but their values.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    undefined = getattr(jinja2, options.pop("undefined"))
    environment = ImmutableSandboxedEnvironment(undefined=undefined, **options)
    del environment.globals["lipsum"]  # makes any amount of text in one call
    environment.filters["regex_replace"] = lambda text, pattern, new, count=0: re.sub(
        pattern, new, text, count=count
    )
    compiled = functools.cache(environment.from_string)
    return lambda template, values: compiled(template).render(**values)


if __name__ == "__main__":
    _serve()
