"""Recipe + cluster profile + overrides → one validated configuration with each value's origin."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurmllm.core.config.cluster import Cluster
from slurmllm.core.config.command import REFUSED
from slurmllm.core.config.directives import parse_options, user_defaults
from slurmllm.core.config.huggingface import read_model
from slurmllm.core.config.layers import (
    DEFAULT,
    Tree,
    Value,
    as_section,
    is_section,
    leaves,
    make_node,
    make_tree,
    plain,
    sources,
    value_at,
)
from slurmllm.core.config.profiles import (
    available,
    choose_cluster,
    find_yaml,
    read_profile,
    shipped_dir,
    user_configuration,
    with_user_configuration,
)
from slurmllm.core.config.recipe import ParallelConfig, Recipe
from slurmllm.core.config.recipe_file import (
    AUTO,
    LAYOUT,
    apply_layouts,
    default_cluster,
    read_recipe,
    untrusted_fault,
)
from slurmllm.core.config.validate import KEEP, OF_OUR_TRAINERS, OPEN, Origins, is_set, validate
from slurmllm.core.config.variables import MASK, hide_passwords, is_secret_at, mask
from slurmllm.core.config.yaml_source import Values, flatten, parse_scalar, write_yaml
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import Texts, format_plural

SMOKE_STEPS = 20  # of --smoke
TRIAL = "--data builtin"  # origin of the corpus of a first trial
_NO_RECIPE = "`slurmllm recipes` lists the shipped ones, `init --recipe FILE` writes one"
# Dotted path → the option's name, and its value; None if it was not given.
Settings = Mapping[str, tuple[str, Any]]
Options = Settings | None
# Mappings by name that `--set section.name=null` removes an entry from.
_REMOVED_BY_NULL = ("hooks", "eval.corpora")


def recipes_dir() -> Path:
    return shipped_dir() / "configs" / "recipes"


def clusters_dir() -> Path:
    return shipped_dir() / "configs" / "clusters"


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run."""

    recipe: Recipe
    cluster: Cluster
    # Dotted path → source of the value; paths left out are defaults.
    origins: Origins = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<RunConfig {self.recipe.name} on {self.cluster.name}>"

    @property
    def backend(self) -> str:
        """The backend's name, `auto` resolved; `command` for a trainer of another project."""
        if not self.recipe.worker.has_model:
            return "command"
        if self.recipe.backend != "auto":
            return self.recipe.backend
        return "nxd" if self.cluster.device == "neuron" else "native"

    @property
    def is_beta(self) -> bool:
        """Whether a Trainium is used through TorchNeuron, a public beta."""
        return self.backend == "native" and self.cluster.device == "neuron"

    @property
    def planning_only(self) -> str | None:
        """Why no job may run: what the profile says of nxd does not hold for TorchNeuron."""
        return None if self.is_beta else self.cluster.planning_only

    @property
    def workers_per_node(self) -> int:
        """Processes that a launcher starts: one for each device, or one that starts the others."""
        return 1 if self.recipe.worker.one_per_node else self.cluster.devices_per_node

    def rows(self) -> list[tuple[str, Any, str]]:
        """Return (dotted path, value, source) of every value, in the models' order."""
        return [
            (path, value, self.origins.get(path, "default"))
            for path, value in flatten(self.values()).items()
        ]

    def values(self) -> Values:
        """Return the nested values, as stored in config.yaml: secrets are masked."""
        has_model = self.recipe.worker.has_model
        recipe = self.recipe.model_dump(
            mode="json", exclude={"command"} if has_model else {*REFUSED, *OF_OUR_TRAINERS}
        )
        # Not its default, which would be set for whoever reads it: a trainer's files are kept.
        if not has_model and self.is_set(KEEP):
            recipe["checkpoint"] = {"keep": self.recipe.checkpoint.keep}
        cluster = {
            **self.cluster.model_dump(mode="json"),
            "env": mask(self.cluster.env),
            "data_mirrors": {
                begin: hide_passwords(url) for begin, url in self.cluster.data_mirrors.items()
            },
        }
        return {**recipe, "env": mask(self.recipe.env), "cluster": cluster}

    to_dict = values  # as other public records name it

    def secrets(self) -> dict[str, str]:
        """Return dotted path → value of the variables that hold secrets."""
        variables = flatten({"cluster": {"env": self.cluster.env}, "env": self.recipe.env})
        return {path: value for path, value in variables.items() if is_secret_at(path, value)}

    def worker_secrets(self) -> dict[str, str]:
        """Return name → value of them, the recipe's win; ConfigError if one is missing."""
        secrets = self.secrets()
        missing = [
            f"{path}: a secret, and its value is not in secrets.json of the run's directory; give "
            f"it again with `slurmllm resume RUN --set {path}=…`"
            for path, value in secrets.items()
            if value == MASK
        ]
        if missing:
            raise ConfigError(
                f"{self.recipe.name}: {format_plural(len(missing), 'secret')} missing", missing
            )
        return {path.rpartition(".")[2]: value for path, value in secrets.items()}

    def variable(self, name: str) -> str | None:
        """Return a variable as recipe or profile set it, else of this process's environment."""
        value = {**self.cluster.env, **self.recipe.env}.get(name, MASK)
        return os.environ.get(name) if value == MASK else value

    def is_set(self, path: str) -> bool:
        return is_set(path, self.origins)

    @property
    def is_trial(self) -> bool:
        """Whether it reads the built-in texts in place of the recipe's data."""
        return self.origins.get("data.corpus") == TRIAL

    def open_settings(self) -> list[str]:
        """Return the dotted paths that the planner is to choose, at submit.

        With `parallel.auto` they are the degrees and settings of `OPEN` that are not set; without,
        the micro batch alone.
        """
        if not self.recipe.worker.has_model:
            return []
        degrees = (f"parallel.{name}" for name in ParallelConfig.model_fields if name != "auto")
        paths: Texts = ()
        if self.recipe.parallel.auto:
            paths = (*degrees, *OPEN)
        elif self.recipe.train.micro_batch == "auto":
            paths = ("train.micro_batch",)
        return [path for path in paths if not self.is_set(path)]

    def with_settings(
        self, section: str, origins: Origins | None = None, /, **values: Any
    ) -> RunConfig:
        """Return a copy with other values of a section of the recipe, which are not validated.

        Args:
            origins: Their sources; those of other values are kept.
        """
        recipe = self.recipe.model_copy(
            update={section: getattr(self.recipe, section).model_copy(update=values)}
        )
        return replace(self, recipe=recipe, origins={**self.origins, **(origins or {})})

    def to_yaml(self) -> str:
        return "# Resolved by slurmllm; `origin` names each value's source.\n" + write_yaml(
            {**self.values(), "origin": {path: source for path, _, source in self.rows()}}
        )


def local_cluster(cluster: str | None, local: bool) -> str | None:
    """Return the profile's name; with --local not that of config.yaml, which is the cluster's."""
    of_slurm = local and choose_cluster(cluster)[1] == str(user_configuration())
    return "local" if of_slurm else cluster


def resolve(
    recipe: str,
    cluster: str | None = None,
    overrides: Iterable[str] = (),
    options: Options = None,
) -> RunConfig:
    """Merge recipe, cluster profile and overrides into one configuration.

    Args:
        recipe: Name of a shipped recipe, or path of a YAML file.
        cluster: Name of a shipped profile, or path of a YAML file; if None, $SLURMLLM_CLUSTER,
            else that of the user's config.yaml, else the recipe's `default_cluster`.
        overrides: `a.b=value`, as given to --set; later ones win.
        options: Dotted path → (option's name, value), from options such as --partition.

    Raises:
        ConfigError: with all faults of recipe, profile and overrides.
    """
    if recipe in available(clusters_dir()):
        fix = f"`slurmllm recipes tiny_neox --cluster {recipe} --explain` shows its values"
        raise ConfigError(f"{recipe} is a cluster profile, not a recipe; {fix}")
    recipe_path = find_yaml(recipe, recipes_dir(), "recipe", _NO_RECIPE)
    tree = read_recipe(recipe_path, recipes_dir())
    chosen, source = choose_cluster(cluster)
    fix = "--cluster FILE.yaml" if chosen == cluster else f"correct {source}, which names it"
    chosen = chosen or default_cluster(tree)
    cluster_path = find_yaml(chosen, clusters_dir(), "cluster profile", fix)
    profile = with_user_configuration(read_profile(cluster_path, clusters_dir()))
    apply_layouts(tree, profile)
    faults = []
    if "cluster" in tree:
        faults.append("cluster: belongs in a profile, not in a recipe; see --cluster")
    layouts = tree.pop("layouts", {})
    tree["cluster"] = profile
    of_files = dict(leaves(tree))
    _override(tree, overrides, faults)
    if "layouts" in tree:
        faults.append("layouts: only in a recipe's file; --set parallel.tensor=… has precedence")
    tree["layouts"] = layouts
    of_files |= leaves({"layouts": layouts})
    for path, leaf in leaves(tree):
        if leaf.source == DEFAULT or of_files.get(path) != leaf:  # an empty section, or an option's
            continue
        if fault := untrusted_fault(path, leaf.value, leaf.source):
            faults.append(fault)
    _assign_options(tree, options, faults)
    _assign_user_defaults(tree, faults)
    title = f"{recipe_path.name} with {cluster_path.name}"
    config = RunConfig(*validate(plain(tree), sources(tree), faults, title))
    # The layouts of other clusters are no part of the run.
    return replace(config, recipe=config.recipe.model_copy(update={"layouts": {}}))


def _assign_options(tree: Tree, options: Options, faults: list[str]) -> None:
    for path, (option, value) in (options or {}).items():
        if value is not None:
            _assign(tree, path, value, option, faults)


def _assign_user_defaults(tree: Tree, faults: list[str]) -> None:
    """Set the options of sbatch that the user's shell has and nothing else sets."""
    origins = sources(tree)
    of_profile = {"partition"} if value_at(tree, "cluster.partition") else set[str]()
    with suppress(TypeError, ValueError):  # a fault that the validation reports
        of_profile |= parse_options(value_at(tree, "cluster.directives") or ()).keys()
    for name, value in user_defaults().items():
        path = f"slurm.{name}"
        # A null in a file, such as `slurmllm recipes NAME` prints it, leaves the choice open.
        is_open = value_at(tree, path) is None and not origins.get(path, "").startswith("--set")
        if is_open and name not in of_profile:
            _assign(tree, path, value, f"SBATCH_{name.upper()}", faults)


def change(
    config: RunConfig,
    cluster: str | None,
    overrides: Iterable[str],
    options: Options = None,
) -> RunConfig:
    """Replace the cluster profile or single values of a run's configuration.

    Args:
        cluster: Name of a shipped profile, or path of a YAML file; None keeps the run's.
        options: As for `resolve`.

    Raises:
        ConfigError: with all faults.
    """
    values = config.values()
    values["env"] = dict(config.recipe.env)
    values["cluster"]["env"] = dict(config.cluster.env)
    tree = make_tree(values, config.origins)
    if cluster is not None:
        path = find_yaml(cluster, clusters_dir(), "cluster profile", "--cluster FILE.yaml")
        tree["cluster"] = with_user_configuration(read_profile(path, clusters_dir()))
    faults: list[str] = []
    _override(tree, overrides, faults)
    _assign_options(tree, options, faults)
    return RunConfig(*validate(plain(tree), sources(tree), faults, f"run of {config.recipe.name}"))


def changed_settings(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return dotted path → old and new value of the training's settings that differ."""
    old, new = (flatten(config.values()) for config in (before, after))
    return {
        path: (old.get(path), new.get(path))
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path) and not path.startswith(("cluster.", "slurm.", "env."))
    }


def _override(tree: Tree, overrides: Iterable[str], faults: list[str]) -> None:
    settings = []
    for item in overrides:
        dotted, equals, literal = item.partition("=")
        dotted = dotted.strip()
        section, _, name = dotted.rpartition(".")
        if not equals and name and section in ("env", "cluster.env"):
            # The value is this process's own: every user could read it on the command line.
            equals = "="
            literal = os.environ.get(name, "")
            if not literal:
                faults.append(f"--set {item}: {name} is not set here; `export {name}=…` first")
                continue
        if not equals or not all(dotted.split(".")):
            faults.append(f"--set {item!r}: expected path=value, such as optim.lr=1e-4")
            continue
        # An environment variable is text even if it looks like YAML: 1, true, 007, empty.
        value = literal if dotted.startswith(("env.", "cluster.env.")) else parse_scalar(literal)
        if dotted == "model" and isinstance(value, str):
            value = read_model(Path(value))
        secret = any(is_secret_at(path, leaf) for path, leaf in flatten({dotted: value}).items())
        settings.append((dotted, value, f"--set {dotted}={MASK if secret else literal}"))
    # `parallel=auto` clears the section, so it comes before any degree that is set with it.
    settings.sort(key=lambda setting: setting[:2] != ("parallel", "auto"))
    for dotted, value, source in settings:
        is_auto = (dotted, value) == ("parallel", "auto")
        _assign(tree, dotted, AUTO if is_auto else value, source, faults)
        for path in OPEN if is_auto else ():  # a layout's are the planner's now
            section, _, name = path.partition(".")
            leaf = as_section(tree.get(section)).get(name)
            if isinstance(leaf, Value) and leaf.source.startswith(LAYOUT):
                del tree[section][name]


def _assign(tree: Tree, dotted: str, value: Any, source: str, faults: list[str]) -> None:
    """Set one value. Unknown paths are reported by the validation that follows."""
    *sections, leaf = dotted.split(".")
    for section in sections:
        if not is_section(tree.setdefault(section, {})):
            faults.append(f"{dotted}: {section} is not a section; see `slurmllm recipes NAME`")
            return
        entries = as_section(tree[section])
        tree[section] = entries
        tree = entries
    if value is not None or ".".join(sections) not in _REMOVED_BY_NULL:
        tree[leaf] = make_node(value, source)
    elif leaf in tree:
        del tree[leaf]
    else:
        names = ", ".join(sorted(tree)) or "it is empty"
        faults.append(f"{source}: there is no {leaf} in {'.'.join(sections)} ({names})")


def shorten(config: RunConfig, steps: int | None = None) -> RunConfig:
    """Return a configuration that trains `steps` steps, by default those of --smoke.

    Warm-up, decay, saves, evaluations and the profiled steps are scaled, except what --set fixes.

    Raises:
        ConfigError: --set fixes the steps, or what is impossible in so few; or the recipe has a
            command.
    """
    option = "--smoke" if steps is None else f"--steps {steps}"
    config.recipe.require_training(
        option, "shorten it by its own arguments, and say so in command.steps"
    )
    if config.origins.get("train.steps", "").startswith("--set"):
        raise ConfigError(
            f"{option} and --set train.steps exclude each other; leave out train.steps"
        )
    steps = steps or SMOKE_STEPS
    recipe = config.recipe
    optim = recipe.optim

    def scaled(step: int, minimum: int = 1) -> int:
        return max(minimum, round(step * steps / recipe.train.steps))

    every = max(1, steps // 2)  # two saves at most, and as many evaluations
    values: Values = {"train.steps": steps}
    for section in ("checkpoint", "eval"):
        interval = getattr(recipe, section).every_steps
        if interval is not None:
            values[f"{section}.every_steps"] = (
                every if interval == "auto" else min(interval, max(scaled(interval), every))
            )
    end = steps
    if optim.decay_steps is not None:
        values["optim.decay_steps"] = end = scaled(optim.decay_steps)
    if optim.warmup_steps:
        values["optim.warmup_steps"] = min(scaled(optim.warmup_steps), end - 1)
    if optim.decay_start is not None:
        start = scaled(optim.decay_start, values.get("optim.warmup_steps", optim.warmup(steps)))
        values["optim.decay_start"] = min(start, end if optim.decay_steps is None else end - 1)
    if recipe.profile.steps is not None and recipe.profile.steps[1] > steps:
        first, last = recipe.profile.steps
        values["profile.steps"] = (max(1, steps - (last - first)), steps)
    options = {
        path: (option, value)
        for path, value in values.items()
        if not config.origins.get(path, "").startswith("--set")
    }
    return change(config, None, (), options)
