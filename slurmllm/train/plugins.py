"""The check of a recipe's parts of other packages, at submit and on the workers.

`python -m slurmllm.train.plugins` reads a configuration as JSON and prints the faults as JSON.
"""

from __future__ import annotations

import inspect
import json
import sys

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.validate import validate
from slurmllm.core.errors import ConfigError, SlurmllmError
from slurmllm.core.plugins import OPTIMIZERS, check_settings, find, import_modules
from slurmllm.train.hooks import Hook

_SIZE = 4  # of each dimension of the parameters that an optimizer is tried with


def import_plugins(config: RunConfig) -> None:
    """Import modules and hooks before the first step; ConfigError if one is missing or wrong."""
    import_modules(config.recipe.plugins)
    for name, settings in config.recipe.hooks.items():
        path = f"hooks.{name}"
        hook = find("hooks", name, path)
        if not inspect.isclass(hook) or not issubclass(hook, Hook):
            raise ConfigError(
                f"{path}: {name!r} is {hook!r}, and must be a subclass of slurmllm.train.hooks.Hook"
            )
        check_settings(hook, f"{path}: {name!r}", settings, 1)
        if hook.backends and config.backend not in hook.backends:
            raise ConfigError(
                f"{path}: works with backend {' and '.join(hook.backends)}, and this run has "
                f"{config.backend}; --set backend={hook.backends[0]}, or leave the hook out"
            )


def try_optimizer(config: RunConfig) -> None:
    """Make another package's optimizer from small parameters; ConfigError if that fails."""
    if config.recipe.optim.name in OPTIMIZERS or config.backend != "native":
        return
    import torch

    from slurmllm.train.backends.native.precision import make_optimizer
    from slurmllm.train.model.decoder import build_model

    with torch.device("meta"):
        model = build_model(config.recipe.model)
    named = [
        (name, torch.nn.Parameter(torch.zeros([min(size, _SIZE) for size in whole.shape])))
        for name, whole in model.named_parameters()
    ]
    make_optimizer(named, config.recipe)


def faults(config: RunConfig) -> list[str]:
    """Return what is wrong with the parts of other packages that a recipe names."""
    messages = []
    for check in (import_plugins, try_optimizer):
        try:
            check(config)
        except SlurmllmError as error:
            messages.append(str(error))
    return list(dict.fromkeys(messages))


def main() -> None:
    """Check the configuration on standard input."""
    tree = json.load(sys.stdin)
    output, sys.stdout = sys.stdout, sys.stderr  # a module may print when it is imported
    try:
        messages = faults(RunConfig(*validate(tree, {}, [], "the run")))
    except SlurmllmError as error:
        messages = [str(error)]
    json.dump(messages, output)


if __name__ == "__main__":
    main()
