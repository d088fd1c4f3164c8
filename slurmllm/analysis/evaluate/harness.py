"""EleutherAI's lm-evaluation-harness as a library: one model, one task at a time.

Each task is a call of `lm_eval.simple_evaluate` with the harness's own defaults, so that its
scores are those of `lm_eval run` with only that task on the same folder.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from slurmllm.analysis.evaluate.request import (
    EvaluationSettings,
    TaskRequest,
    TaskScores,
    harness_version,
)
from slurmllm.analysis.evaluate.suites import suites_dir
from slurmllm.analysis.evaluate.task_templates import Sandbox
from slurmllm.core.config.profiles import did_you_mean
from slurmllm.core.errors import DataError, SlurmllmError, UserError
from slurmllm.core.format import Values
from slurmllm.train.model.private_names import TASK_FUNCTIONS

REMEDY = "install it: pip install 'slurmllm[eval]'"
# Classes of errors, or of their causes, if data cannot be downloaded from the hub.
_HUB = re.compile(
    "ConnectionError|ConnectError|ConnectTimeout|ReadTimeout|ProxyError|NameResolutionError|"
    "MaxRetryError|HfHubHTTPError|OfflineModeIsEnabled|LocalEntryNotFoundError|"
    "DatasetNotFoundError|DataFilesNotFoundError"
)
# The harness's message if a task may generate more tokens than the model's context holds.
_TOO_LONG = re.compile(r"max tokens to generate \((\d+)\) must be less than .* length \((\d+)\)")
_TRUST = "pass --allow-code-execution to allow it, if you trust its author"
# Settings that change only prompts, answers and metrics. The harness's own functions can be made to
# run code by the others: some evaluate the questions, or load the tokenizer that `metadata` names.
_PROMPT_SETTINGS = {
    "description",
    "doc_to_choice",
    "doc_to_target",
    "doc_to_text",
    "fewshot_delimiter",
    "filter_list",
    "gen_prefix",
    "generation_kwargs",
    "metric_list",
    "num_fewshot",
    "repeats",
    "target_delimiter",
    "task",
    "task_alias",
}
# Settings by which transformers, datasets and evaluate run programs of a folder or of the hub.
_CODE_SETTINGS = ("class", "custom_generate", "hf_evaluate", "trust_remote_code", "use_prompt")
# Settings of `datasets`: the folder, maybe another user's, for its copies of what a task reads,
# which may be a private file.
_PLACES = ("cache_dir", "storage_options", "download_config")
_CODE_READERS = ("pandas", "sql")  # of `datasets`: pickles, and statements for a database


def require_harness() -> str:
    """Return the version of the harness; raise UserError if it is not installed."""
    version = harness_version()
    if version is None:
        raise UserError(f"lm-evaluation-harness (lm_eval) is not installed; {REMEDY}")
    return version


class Harness:
    """The tasks of the harness on a model, loaded for the first task from its exported folder."""

    def __init__(self, folder: Path, settings: EvaluationSettings) -> None:
        self._folder = folder
        self._settings = settings
        self._device = resolve_device(settings.device)
        self._loaded_model: Any = None

    def score(self, request: TaskRequest) -> TaskScores:
        """Evaluate a task; UserError if it may not run, DataError if its questions are not here."""
        results = self._evaluate(request)
        name = request.task.task
        scores = {}
        errors = {}
        for key, value in results["results"][name].items():
            metric, comma, _ = key.partition(",")
            # `alias` has no comma; a standard error may be "N/A".
            if not comma or isinstance(value, str) or not math.isfinite(float(value)):
                continue
            if metric.endswith("_stderr"):
                errors[key.replace("_stderr,", ",")] = float(value)
            else:
                scores[key] = float(value)
        if not scores:
            raise DataError(f"{name} has no metric that is a finite number")
        shots = results.get("n-shot", {}).get(name)
        shots = shots if isinstance(shots, int) else request.task.shots
        num_samples = sum(int(n["effective"]) for n in results["n-samples"].values())
        return TaskScores(scores, errors, num_samples, require_harness(), shots)

    def _evaluate(self, request: TaskRequest) -> Values:
        task = request.task
        settings = self._settings
        if settings.allow_code:
            os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # required by metrics that run programs
        with _translated(task.task):
            if fault := task_fault(request):
                raise UserError(fault)
            import lm_eval

            # The draws are the same in this process: a pool forked beside torch's
            # threads may deadlock.
            os.environ["DISABLE_MULTIPROC"] = "1"
            if self._loaded_model is None:
                from lm_eval.api.registry import get_model

                # "auto" halves the batch on a CUDA out-of-memory error; a CPU would swap instead.
                size = settings.batch_size or (1 if self._device == "cpu" else "auto")
                self._loaded_model = get_model("hf").create_from_arg_obj(
                    {
                        "pretrained": str(self._folder),
                        # Neither pickles nor programs of the folder (`auto_map` in config.json).
                        "use_safetensors": True,
                        "trust_remote_code": False,
                    },
                    {"batch_size": size, "max_batch_size": None, "device": self._device},
                )
            results = lm_eval.simple_evaluate(
                model=self._loaded_model,
                tasks=[_harness_task(request)],
                num_fewshot=task.shots,
                limit=settings.limit,
                task_manager=_manager_of(request),
                confirm_run_unsafe_code=settings.allow_code,
                log_samples=False,  # kept in memory otherwise, all prompts and answers
            )
        assert results is not None, "None on ranks other than 0"
        return dict(results)


class _TaskTemplates(NamedTuple):
    """The harness's Jinja environment, in a child process."""

    sandbox: Sandbox

    def from_string(self, template: str) -> Any:
        def render(**values: Any) -> str:
            return self.sandbox.render(template, values)

        return SimpleNamespace(render=render)


@cache
def task_manager(folder: str | None, allow_code: bool = False) -> Any:
    """Return the harness's index of tasks, with those of a folder.

    With `allow_code` task files that are not shipped may run code. Raises UserError if there is no
    such folder, or the harness cannot be imported.
    """
    try:
        import lm_eval.utils
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(
            f"lm-evaluation-harness (lm_eval) cannot be imported ({error}); {REMEDY}"
        ) from error
    env = lm_eval.utils.env
    if not isinstance(env, _TaskTemplates):
        options = {"undefined": env.undefined.__name__}
        options["keep_trailing_newline"] = env.keep_trailing_newline
        lm_eval.utils.env = _TaskTemplates(Sandbox(options))
    if folder is None:
        manager = TaskManager()
    else:
        if not Path(folder).is_dir():
            raise UserError(f"no folder of tasks {folder}; check `folder` in the suite")
        manager = TaskManager(include_path=folder, include_defaults=False)
        if manager.all_groups or manager.all_tags:
            # Only groups may refer to the harness's own tasks, whose index takes seconds.
            manager = TaskManager(include_path=folder)
    if not allow_code:
        manager._factory = _factory_without_code()
    return manager


def _manager_of(request: TaskRequest) -> Any:
    folder = request.task.folder
    path = None if folder is None else str(request.folder / folder)
    return task_manager(path, request.allow_code)


def _harness_task(request: TaskRequest) -> Any:
    """Return a task's name, or the harness's task object with the options of the suite."""
    task = request.task
    manager = _manager_of(request)
    if not task.options:
        return task.task
    # If given as {"task": name, **options}, harness 0.4.13 ignores the task's own file.
    index = manager.task_index
    return manager._factory.build(index[task.task], overrides=task.options, registry=index)


def _is_shipped(path: Path) -> bool:
    """Return whether a file or folder, without links, comes with the harness or slurmllm."""
    import lm_eval

    roots = [Path(str(lm_eval.__file__)).parent.resolve(), suites_dir().resolve()]
    return any(path.is_relative_to(root) for root in roots)


def _factory_without_code() -> Any:
    """Return the harness's maker of tasks that refuses code in task files not shipped."""
    from lm_eval.tasks import _yaml_loader
    from lm_eval.tasks._factory import GROUP_FIELD_NAMES, TaskFactory

    missing = TASK_FUNCTIONS.missing()
    make_constructor: Any = getattr(_yaml_loader, "_mk_function_ctor", None)

    def make_refusal(folder: Path, resolve: bool) -> Any:
        def refuse(loader: Any, node: Any) -> Any:
            position = f"{node.start_mark.name}, line {node.start_mark.line + 1}"
            raise UserError(f"{position}: `!function {node.value}` runs Python code; {_TRUST}")

        trusted = not resolve or _is_shipped(folder)
        return make_constructor(folder, resolve) if trusted else refuse

    class Factory(TaskFactory):  # type: ignore[misc]
        def _load_full_config(self, entry: Any, overrides: Any = None) -> Any:
            if entry.yaml_path is None:
                return super()._load_full_config(entry, overrides)
            path = entry.yaml_path.resolve()  # once: a link can be replaced
            if missing is not None:
                if not _is_shipped(path):
                    raise UserError(f"{path} cannot be checked for code: {missing}")
                return super()._load_full_config(replace(entry, yaml_path=path), overrides)
            _yaml_loader._mk_function_ctor = make_refusal
            try:
                config = super()._load_full_config(replace(entry, yaml_path=path), overrides)
            finally:
                _yaml_loader._mk_function_ctor = make_constructor
            if not _is_shipped(path):
                of_group = {*GROUP_FIELD_NAMES, "tag"}
                _refuse_code(config, str(path), of_group if "group" in config else None)
                for member in config["task"] if "group" in config else ():
                    if not isinstance(member, str):
                        _refuse_code(member, str(path), _PROMPT_SETTINGS)
            return config

    return Factory()


def _refuse_code(settings: Values, source: str, allowed: Collection[str] | None = None) -> None:
    """Raise UserError if settings run code, at any depth, or a shipped task may not have them."""
    from lm_eval.api import metrics, registry

    del metrics  # imported to fill the registry
    remaining: list[tuple[str, Any]] = [("", settings)]
    seen = set()  # the aliases of YAML share objects
    while remaining:
        name, value = remaining.pop()
        word = value if isinstance(value, str) else ""
        if (
            (callable(value) or name in _CODE_SETTINGS)
            or (name == "dataset_path" and word in _CODE_READERS)
            or (name == "metric" and word not in registry.metric_registry)
        ):
            raise UserError(f"{source}: `{name}: {value}` runs code; {_TRUST}")
        if name in _PLACES:
            raise UserError(f"{source}: `{name}` may copy your files to other folders; {_TRUST}")
        if isinstance(value, dict | list) and id(value) not in seen:
            seen.add(id(value))
            remaining += value.items() if isinstance(value, dict) else [(name, v) for v in value]
    for name in sorted(settings.keys() - allowed) if allowed is not None else ():
        raise UserError(
            f"{source}: `{name}` changes the input of the task's functions, which can make them "
            f"run code; {_TRUST}"
        )


def task_fault(request: TaskRequest) -> str | None:
    """Return why the harness cannot run a task, by its name and file; None if it can.

    Raises UserError if there is no such folder of tasks, or the harness cannot be imported.
    """
    name = request.task.task
    manager = _manager_of(request)
    if name not in manager.all_tasks:
        return _unknown_task(name, manager.all_tasks)
    entry = manager.task_index[name]
    if name in manager.all_tags:
        return f"{name} is a tag of several tasks; name them: {', '.join(sorted(entry.tags))}"
    file = entry.cfg or {}
    if name in manager.all_groups and not file.get("aggregate_metric_list"):
        members = [task if isinstance(task, str) else task.get("task") for task in file["task"]]
        tasks = ", ".join(member for member in members if isinstance(member, str))
        return f"{name} is a group without a metric of its own; name its tasks: {tasks}"
    if file.get("unsafe_code") and not request.allow_code:
        return f"{name} executes model-written code; pass --allow-code-execution to allow it"
    try:
        _check_code(request)
    except UserError as error:
        return str(error)
    return None


def _check_code(request: TaskRequest) -> None:
    """Raise UserError if a task or the suite's options run code that is not allowed or shipped."""
    if request.allow_code:
        return
    manager = _manager_of(request)
    entry = manager.task_index[request.task.task]
    if entry.yaml_path and not _is_shipped(entry.yaml_path.resolve()):
        manager._factory._load_full_config(entry)
    if not _is_shipped(request.folder.resolve()):
        source = f"options of {request.task.task} in the suite"
        _refuse_code(request.task.options, source, _PROMPT_SETTINGS)


def _unknown_task(name: str, tasks: Sequence[str]) -> str:
    guess = did_you_mean(name, tasks)
    return f"the harness has no task {name!r}; {guess}`lm_eval ls tasks` lists all"


def resolve_device(device: str) -> str:
    """Return cpu or cuda, for `auto`; raise UserError for cuda without a CUDA device."""
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UserError("--device cuda: torch finds no CUDA device here; choose cpu or auto")
    if device == "auto":
        return "cuda" if available else "cpu"
    return device


def _translate_error(task: str, error: Exception) -> SlurmllmError:
    """Return the harness's error as one of ours, with what to do about it."""
    message = " ".join(str(error).split())[:300]
    if "marked as unsafe" in message:
        return UserError(
            f"{task} executes model-written code; pass --allow-code-execution to allow it"
        )
    if too_long := _TOO_LONG.search(message):
        longest, context = too_long.groups()
        return DataError(
            f"{task} lets the model write {longest} tokens, but its context holds {context}, "
            "prompt and answer together; omit the task, or request fewer in a suite of your own: "
            f"options: {{generation_kwargs: {{max_gen_toks: N, until: [...]}}}}"
        )
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < 20:  # a chain of causes may be circular
        chain += [kind.__name__ for kind in type(cause).__mro__]
        cause = cause.__cause__ or cause.__context__
    if any(map(_HUB.fullmatch, chain)) or "Hugging Face Hub" in message:
        return DataError(
            f"the data of {task} cannot be fetched here ({message}); fetch it on a machine with a "
            "network, with the same command and --fetch, and HF_HOME set to a folder that the "
            "nodes share; set the same HF_HOME for the evaluation"
        )
    if isinstance(error, ModuleNotFoundError):
        return UserError(f"the harness needs {error.name}, which is not installed; {REMEDY}")
    return DataError(f"{type(error).__name__}: {message}")


def fetch(request: TaskRequest) -> None:
    """Download a task's questions into the cache of this machine (HF_HOME); raise as `score`."""
    name = request.task.task
    with _translated(name):
        manager = _manager_of(request)
        if name not in manager.all_tasks:
            raise UserError(_unknown_task(name, manager.all_tasks))
        _check_code(request)
        manager.load([_harness_task(request)])


@contextmanager
def _translated(task: str) -> Iterator[None]:
    try:
        yield
    except SlurmllmError:
        raise
    except Exception as error:
        raise _translate_error(task, error) from error
