"""Parts from other packages: hooks, optimizers, model families and data sources (docs/plugins.md).

A part has a name within its kind. It is an entry point of an installed package, or a module that
the recipe lists in `plugins` registers it. A module is imported only when a recipe names the part
or the module: never everything that is installed.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from slurmllm.core.errors import ConfigError, SlurmllmError
from slurmllm.core.format import Values

Kind = Literal["hooks", "optimizers", "models", "data_sources"]
OPTIMIZERS = ("adamw", "muon")  # that are no plugins
KINDS: tuple[str, ...] = typing.get_args(Kind)
T = TypeVar("T")

# Kinds whose parts commands on the login node use themselves, which must not load torch.
_WITHOUT_TORCH = ("models", "data_sources")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_BUILT_IN = {("optimizers", name) for name in OPTIMIZERS}
_registered: dict[tuple[Kind, str], object] = {}
_torch_loaders: set[tuple[Kind, str]] = set()  # parts whose import loaded torch


class PluginRef(NamedTuple):
    """A hook, optimizer, model family or data source of a plugin, as a recipe names it."""

    kind: Kind
    name: str
    path: str  # dotted path of the setting that names it


def register(kind: Kind, name: str) -> Callable[[T], T]:
    """Decorate a part, to register it by a name when its module is imported.

    Args:
        kind: `hooks`, `optimizers`, `models` or `data_sources`.
        name: The name by which a recipe chooses it.

    Raises:
        ConfigError: the kind is unknown, or the name is taken.
    """
    if kind not in KINDS:
        raise ConfigError(f"register({kind!r}, {name!r}): unknown kind; choose {', '.join(KINDS)}")
    if (kind, name) in _BUILT_IN:
        raise ConfigError(f"register({kind!r}, {name!r}): slurmllm has one of this name; rename it")

    def decorate(plugin: T) -> T:
        if _registered.setdefault((kind, name), plugin) is not plugin:
            raise ConfigError(f"two {kind} are called {name!r}; rename one of them")
        return plugin

    return decorate


def import_modules(names: Sequence[str]) -> None:
    """Import the modules of `plugins`, which register their parts.

    Raises:
        ConfigError: a module cannot be imported.
    """
    for name in names:
        _load(partial(importlib.import_module, name), f"plugins: {name}")


def find(kind: Kind, name: str, path: str, modules: Sequence[str] = ()) -> object:
    """Return a part, which is imported now if it was not before.

    Args:
        path: The setting that names it, for messages.
        modules: The recipe's `plugins`, imported if no other part has the name.

    Raises:
        ConfigError: there is no such part, or it cannot be imported.
    """
    key = (kind, name)
    label = f"{path}: {name!r}"
    had_torch = "torch" in sys.modules
    entry = None if key in _registered else entry_point(kind, name)
    if entry is not None:
        package = "a package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        _registered[key] = _load(entry.load, f"{label} of {package}")
    elif key not in _registered:
        import_modules(modules)
    if key not in _registered:
        names = {other for of_kind, other in [*_registered, *_BUILT_IN] if of_kind == kind}
        names |= entry_points(group=group(kind)).names
        raise ConfigError(
            f"{label} is unknown: no installed package has it in entry-point group {group(kind)} "
            f"(known: {', '.join(sorted(names)) or 'none'}), and no module in plugins registers "
            "it; install its package where slurmllm is installed, or add its module to plugins"
        )
    if not had_torch and "torch" in sys.modules:
        _torch_loaders.add(key)
    if kind in _WITHOUT_TORCH and key in _torch_loaders:
        raise ConfigError(
            f"{label}: its module imports torch, and commands on the login node use {group(kind)} "
            "without; import torch inside functions, or move the part to a module of its own"
        )
    return _registered[key]


def build(
    kind: Kind,
    name: str,
    path: str,
    expected: type[T],
    settings: Values,
    *arguments: Any,
) -> T:
    """Call a part with arguments and the recipe's settings; returns what it makes.

    The settings are the part's keyword-only parameters, validated by their annotations.

    Raises:
        ConfigError: there is no such part, its settings are wrong, it fails, or it makes something
            that is no `expected`.
    """
    plugin = find(kind, name, path)
    label = f"{path}: {name!r}"
    checked = check_settings(plugin, label, settings, len(arguments))
    try:
        result = plugin(*arguments, **checked)  # type: ignore[operator]
    except SlurmllmError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{label} fails with these settings: {type(error).__name__}: {error}; correct them, or "
            "the plugin"
        ) from error
    if not isinstance(result, expected):
        raise ConfigError(
            f"{label} returned a {_qualified_name(type(result))}, not a "
            f"{_qualified_name(expected)}; correct the plugin"
        )
    return result


def check_settings(
    plugin: object, label: str, settings: Values, num_arguments: int
) -> dict[str, Any]:
    """Return the settings, validated by the annotations of the keyword-only parameters.

    Args:
        label: The plugin, for messages.
        num_arguments: Number of positional arguments that the plugin is called with.

    Raises:
        ConfigError: with all faults, or the plugin cannot be called so.
    """
    # Here: a data worker, of which each worker starts some, needs no pydantic else.
    from pydantic import ValidationError, create_model

    if not callable(plugin):
        raise ConfigError(
            f"{label} is {plugin!r}, not a class or function; correct its entry point or `register`"
        )
    try:
        signature = inspect.signature(plugin)
        keywords = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
        names = [parameter.name for parameter in keywords]
        signature.bind(*[None] * num_arguments, **dict.fromkeys(names))
        annotated = plugin.__init__ if inspect.isclass(plugin) else plugin
        hints = typing.get_type_hints(annotated, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(
            f"{label} cannot be called with {num_arguments} positional arguments and its settings "
            f"as keywords: {error}; see docs/plugins.md for its interface"
        ) from error
    fields: dict[str, Any] = {
        p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default)
        for p in keywords
    }
    model = create_model("Settings", __config__={"extra": "forbid"}, **fields)
    try:
        checked = model.model_validate(dict(settings))
    except ValidationError as error:
        messages = {
            "extra_forbidden": f"unknown setting; known: {', '.join(names) or 'none'}",
            "missing": "missing; it has no default",
        }
        faults = []
        for fault in error.errors():
            name = ".".join(map(str, fault["loc"]))
            message = messages.get(fault["type"], f"{fault['input']!r}: {fault['msg']}")
            faults.append(f"{name}: {message}")
        raise ConfigError(f"{label}: {len(faults)} invalid setting(s)", faults) from error
    return dict(checked)


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_known(kind: Kind, name: str) -> bool:
    """Return whether a part is registered or installed; imports nothing."""
    return (kind, name) in _registered or entry_point(kind, name) is not None


def split_prefix(corpus: str) -> tuple[str | None, str]:
    """Split `name:path` into the name of a data source, None without one, and the path."""
    name, colon, path = corpus.partition(":")
    if colon and path and _NAME.fullmatch(name) and not Path(corpus).exists():
        return name, path
    return None, corpus


def absolute(corpus: str | Path) -> str:
    """Return a corpus with an absolute path, its prefix kept."""
    name, path = split_prefix(str(corpus))
    whole = str(Path(path).absolute())
    return whole if name is None else f"{name}:{whole}"


def group(kind: Kind) -> str:
    return f"slurmllm.{kind}"


def entry_point(kind: Kind, name: str) -> EntryPoint | None:
    return next(iter(entry_points(group=group(kind), name=name)), None)


def versions(plugins: Iterable[PluginRef], modules: Sequence[str]) -> dict[str, str]:
    """Return the versions of the plugins' packages, and digests of the modules' files.

    Nothing is imported; what is not installed here is left out.
    """
    by_name = {}
    for plugin in plugins:
        entry = entry_point(plugin.kind, plugin.name)
        if entry is not None and entry.dist is not None:
            by_name[entry.dist.name] = entry.dist.version
    for name in modules:
        if (file := module_file(name)) is not None:
            with suppress(OSError):
                by_name[name] = f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    return by_name


def module_file(name: str) -> Path | None:
    """Return a module's file; unlike importlib.util.find_spec, this imports no parent package."""
    folders: Sequence[str] | None = None
    spec = None
    for package in accumulate(name.split("."), "{}.{}".format):
        spec = PathFinder.find_spec(package, folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _load(load: Callable[[], T], label: str) -> T:
    try:
        return load()
    except SlurmllmError:
        raise
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise ConfigError(
            f"{label} cannot be imported: {type(error).__name__}: {error}; install what is missing "
            "in this Python environment (a module: on PYTHONPATH), or correct the name"
        ) from error
