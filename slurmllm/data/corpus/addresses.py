"""Files at addresses (`hf://`, `s3://`, `https://` …): found, opened, and asked for again.

fsspec opens them; a connection that breaks is tried again.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import ipaddress
import socket
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from slurmllm.core.config.data_sources import known_address
from slurmllm.core.config.variables import hide_passwords
from slurmllm.core.errors import DataError, InfrastructureError
from slurmllm.core.format import Values

if TYPE_CHECKING:
    from aiohttp import TraceConfig
    from upath import UPath
    from yarl import URL

    AnyPath = Path | UPath

T = TypeVar("T")

DOWNLOAD = "download it and give its local path"
MIRROR = "set cluster.data_mirrors to a mirror (docs/data.md#published-data-sets)"
AGAIN = "run the same command again"
_TRIES = 5  # without a byte in between
_PAUSE_S = 1.0  # before the second try; doubled for each further one
_SILENCE_S = 60  # after which a connection counts as broken
_BLOCK = 8 << 20  # bytes of one request
_MAX_REASON = 300  # characters of a library's message, which may quote what a server sent
_VERSIONS = ("ETag", "etag", "blob_id", "LastModified", "mtime", "created")  # keys of fsspec's info
# Errors of connections that are not OSErrors, by module.
_ERRORS = (
    ("aiohttp", "ClientError"),
    ("huggingface_hub.errors", "HTTPError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
)
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


class Address(NamedTuple):
    """What fsspec opens."""

    url: str  # to be shown: without a password
    file_system: Any
    path: str


def address_of(url: str, anonymous: bool = False, alternative: str = MIRROR) -> Address:
    """Find the file system of an address; without s3fs, a public bucket is read over https.

    Args:
        anonymous: Whether another one wrote the address: no credentials are sent, and its server
            does not redirect into the network of this machine.
    """
    from fsspec.core import url_to_fs

    protocol, _, location = url.partition("://")
    if protocol == "s3" and anonymous and importlib.util.find_spec("s3fs") is None:
        bucket, _, key = location.partition("/")
        return address_of(f"https://{bucket}.s3.amazonaws.com/{key}", anonymous)
    options: dict[str, Any] = {"anon": True} if protocol == "s3" and anonymous else {}
    public_url = hide_passwords(url)
    try:
        known_address(url)
        file_system, path = url_to_fs(url, **options, **_http_options(protocol, anonymous))
    except (ImportError, ValueError) as error:
        package = _PACKAGES.get(protocol)
        fix = f"`pip install {package}`" if package else alternative
        raise DataError(f"{public_url} cannot be opened here: {error}; {fix}") from error
    return Address(public_url, file_system, str(path))


def _http_options(protocol: str, guarded: bool = False) -> dict[str, Any]:
    if protocol not in ("http", "https"):
        return {}
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S)
    options = {"timeout": timeout, "trust_env": True}
    if guarded:
        options["trace_configs"] = [_redirect_guard()]
    return {"client_kwargs": options}


@cache  # fsspec uses a file system again if its options are the same
def _redirect_guard() -> TraceConfig:
    from aiohttp import TraceConfig, TraceRequestRedirectParams
    from yarl import URL

    async def refuse(
        session: object, context: object, redirect: TraceRequestRedirectParams
    ) -> None:
        target = redirect.url.join(URL(redirect.response.headers.get("Location", "")))
        refusal = ""
        if target.scheme not in ("http", "https"):
            refusal = f"{target}, another protocol"
        elif await asyncio.to_thread(_enters_network, redirect.url, target):
            refusal = f"{target.host}, inside the network of this machine"
        if refusal:
            raise DataError(
                f"{hide_passwords(str(redirect.url))} redirects to {refusal}; if it is meant to, "
                f"{MIRROR}"
            )

    guard = TraceConfig()
    guard.on_request_redirect.append(refuse)
    return guard


def _enters_network(url: URL, target: URL) -> bool:
    """Whether a redirect leads to this machine, or to a private IP address."""
    if target.host is None or (target.host, target.port) in ((url.host, url.port), (url.host, 443)):
        return False
    try:
        entries = socket.getaddrinfo(target.host, None)
    except OSError:  # only the proxy knows it
        return False
    for entry in entries:
        address = ipaddress.ip_address(str(entry[4][0]).partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        if address.is_loopback or address.is_link_local or address.is_unspecified:
            return True
        if str(address) == target.host and not address.is_global:
            return True
    return False


def paths_of(url: str) -> list[UPath]:
    """Return the remote files that a URL names: a file, the matches of a glob, or a folder's files.

    They are sorted by path. Hidden files and those in hidden folders are ignored.

    Raises:
        DataError: There is none, it may not be read, or a package is missing.
        InfrastructureError: The connection breaks again and again.
    """
    from fsspec.core import has_magic
    from upath import UPath

    _, system, path = address_of(url, alternative=DOWNLOAD)
    options = _http_options(url.partition("://")[0])

    def find() -> list[str]:
        if has_magic(path):
            return [match for match in system.glob(path) if system.isfile(match)]
        if system.info(path)["type"] != "directory":  # `isfile` hides why it cannot be read
            return [path]
        return [
            entry
            for entry in system.find(path)
            if not any(name.startswith(".") for name in entry.removeprefix(path).split("/"))
        ]

    entries = sorted(map(str, retry(url, find, alternative=DOWNLOAD)))
    return [UPath(system.unstrip_protocol(entry), **options) for entry in entries]


def state_of(path: AnyPath, fresh: bool = False) -> tuple[int, str]:
    """Return a file's size in bytes, and a version tag that changes with its content.

    Args:
        fresh: Ask the server again, whatever it said before.

    Raises:
        OSError: A local file cannot be read.
        DataError, InfrastructureError: As `paths_of`.
    """
    if isinstance(path, Path):
        info = path.stat()
        return info.st_size, str(info.st_mtime_ns)
    if fresh:
        path.fs.invalidate_cache()
    entry = retry(str(path), partial(path.fs.info, path.path), alternative=DOWNLOAD)
    if entry.get("size") is None:
        raise DataError(f"{path}: the server does not report the file's size; {DOWNLOAD}")
    return int(entry["size"]), version_of(entry)


def version_of(info: Values) -> str:
    """Return a version tag (ETag, modification time, …) of fsspec's info; empty without one.

    It changes when the file's content changes, as far as the server reports that.
    """
    return str(next((info[key] for key in _VERSIONS if info.get(key)), ""))


class RemoteFile(io.RawIOBase):
    """A remote file open for reading; a failed read is retried from the same position."""

    def __init__(self, path: UPath) -> None:
        self._url = str(path)
        opened = partial(path.fs.open, path.path, "rb", block_size=_BLOCK)
        self._file = retry(self._url, opened, alternative=DOWNLOAD)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        def read() -> bytes:
            self._file.seek(self._position)
            data: bytes = self._file.read(size)
            return data

        data = retry(self._url, read, alternative=DOWNLOAD)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}
        self._position = begins[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self._file.close()
        super().close()


def open_input(path: AnyPath) -> io.RawIOBase:
    if isinstance(path, Path):
        return path.open("rb", buffering=0)
    return RemoteFile(path)


def _connection_errors() -> tuple[type[Exception], ...]:
    """Return what the file systems that are loaded raise if a connection breaks."""
    loaded = ((sys.modules.get(module), name) for module, name in _ERRORS)
    return (OSError, *(getattr(module, name, OSError) for module, name in loaded))


def retry(
    url: str,
    ask: Callable[[], T],
    arrived: Callable[[], int] = lambda: 0,
    alternative: str = MIRROR,
) -> T:
    """Return the answer of `ask`, which is asked again if the connection breaks.

    Args:
        arrived: The bytes that have arrived. Any progress starts the count of tries anew.
        alternative: What an error names as a way around the address.
    """
    failures = 0
    url = hide_passwords(url)
    while True:
        before = arrived()
        try:
            return ask()
        except _connection_errors() as error:
            _raise_refusal(url, error, alternative)
            failures = 0 if arrived() > before else failures + 1
            if failures >= _TRIES:
                note = f"; {arrived():,} bytes are kept" if arrived() else ""
                reason = error.__cause__ if isinstance(error, FileNotFoundError) else error
                raise InfrastructureError(
                    f"{url}: the connection failed {failures} times: "
                    f"{_reason(reason or error)}{note}; {AGAIN} later; without direct "
                    f"internet access, set HTTPS_PROXY, or {alternative}"
                ) from error
        except (ValueError, NotImplementedError) as error:  # an address of another form
            raise DataError(f"{url} cannot be read: {_reason(error)}; {alternative}") from error
        time.sleep(_PAUSE_S * 2**failures)


def _reason(error: BaseException) -> str:
    """Return a library's message on one short line."""
    message = " ".join(hide_passwords(str(error)).split()) or type(error).__name__
    return message if len(message) <= _MAX_REASON else f"{message[:_MAX_REASON]}…"


def _raise_refusal(url: str, error: Exception, alternative: str) -> None:
    """Raise DataError if a server answered, and another try will have the same answer."""
    # A FileNotFoundError hides why: an answer, no connection, or the form of the address.
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    response = getattr(cause or error, "response", None)
    status = getattr(cause or error, "status", None) or getattr(response, "status_code", None)
    if status in (401, 403) or isinstance(error, PermissionError):
        raise DataError(
            f"{url} may not be read ({status or 'access denied'}): Hugging Face: accept the terms "
            "on its page, and set HF_TOKEN; S3: `pip install s3fs` and credentials; or "
            f"{alternative}"
        ) from error
    is_missing = isinstance(error, FileNotFoundError) and not isinstance(
        cause, _connection_errors()
    )
    if status in (404, 410) or is_missing:
        raise DataError(f"{url} does not exist (404); {alternative}") from error
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429):
        raise DataError(f"{url} is refused ({status}): {_reason(error)}; {alternative}") from error
