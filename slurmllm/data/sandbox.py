"""Jinja templates that came with somebody's files, rendered in a child process with hard limits.

A template is a program, and one operation of it (`a == b` of long lists, `a|sort`) can run in C for
hours, so nothing in its own process can stop it. The kernel ends a child that takes more than
`RENDER_S` of processor time for one answer, and refuses it more than `_RENDER_BYTES`.

    stdin    the settings; then requests: JSON, one a line
    stdout   for the settings and for each request {"value": …}, {"error": "…"} or {"limit": "…"}
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

# Limits of one answer; a long chat takes milliseconds and some kilobytes.
RENDER_S = 5
_RENDER_BYTES = 1 << 29
LARGEST = 1 << 24  # characters of a rendered text
# Signals to all processes of a job: a worker still trains after them, and ends its child itself.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Sandbox:
    """A child process that renders templates, started when it is needed.

    It runs `module`, which calls `serve`, with `settings` as JSON.
    """

    def __init__(self, module: str, settings: Any) -> None:
        self._module, self._settings = module, settings
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process id: a fork must not use the pipes

    def ask(self, requests: Iterable[Any]) -> Iterator[Any]:
        """Yield the answer to each request; after an error another child is started.

        A ValueError has the child's error message, an OverflowError the limit that it exceeds.
        """
        self._started()  # without a request too: invalid settings are an error at once
        for request in requests:
            process = self._started()
            try:
                _send(process, request)
                answer = _receive(process)
            except BaseException:  # it may have ended, or still answer
                self._process = None
                end_child(process, self._owner)
                raise
            yield answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():
            # -P: not the modules of the working directory, which may be another user's.
            command = [sys.executable, "-P", "-m", self._module]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            weakref.finalize(self, end_child, process, os.getpid())
            _send(process, self._settings)
            _receive(process)
            self._process, self._owner = process, os.getpid()
        return self._process


def _send(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    line = json.dumps(value, ensure_ascii=False, default=str)
    with contextlib.suppress(BrokenPipeError):  # reading from it says why
        process.stdin.write(line.encode("utf-8", "surrogatepass") + b"\n")
        process.stdin.flush()


def _receive(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        code = process.wait()
        if code == -signal.SIGPROF:
            raise OverflowError(f"it runs for more than {RENDER_S} s")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise OverflowError(f"the process that renders it ended with {how}")
    answer = json.loads(line.decode("utf-8", "surrogatepass"))
    if "limit" in answer:
        raise OverflowError(answer["limit"])
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["value"]


def end_child(process: subprocess.Popen[bytes], owner: int) -> None:
    """Kill a child process and close its pipes, unless this is a fork of its owner."""
    if owner != os.getpid():
        return
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def serve(build: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Answer requests from stdin to its end; `build` makes the function of some settings."""
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also inside an operation
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    answer: Callable[[Any], Any] | None = None
    for line in sys.stdin.buffer:
        if soft == hard == resource.RLIM_INFINITY:  # else the user has a limit
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + _RENDER_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        signal.setitimer(signal.ITIMER_PROF, RENDER_S)
        try:
            request, value = json.loads(line.decode("utf-8", "surrogatepass")), None
            if answer is None:
                answer = build(request)
            else:
                value = answer(request)
            reply = json.dumps({"value": value}, ensure_ascii=False)
        except MemoryError:
            reason = f"its rendering exceeds the limit of {_RENDER_BYTES >> 20} MiB"
            reply = json.dumps({"limit": reason})
        except Exception as error:  # a template may fail in any way
            reply = json.dumps({"error": str(error) or type(error).__name__})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()


def task_templates(settings: dict[str, Any]) -> Callable[[tuple[str, Any]], str]:
    """Return the function that renders a template and its values, as lm-evaluation-harness does."""
    import jinja2

    undefined = getattr(jinja2, settings.pop("undefined"))
    environment = limited_environment(undefined=undefined, **settings)
    environment.filters["regex_replace"] = lambda text, pattern, new, count=0: re.sub(
        pattern, new, text, count=count
    )
    compiled = functools.cache(environment.from_string)
    return lambda request: compiled(request[0]).render(**request[1])


def limited_environment(**options: Any) -> Any:
    """Return a Jinja environment whose templates reach no Python objects but their values."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(**options)
    del environment.globals["lipsum"]  # makes any amount of text in one call
    return environment


if __name__ == "__main__":
    serve(task_templates)
