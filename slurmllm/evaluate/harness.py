"""EleutherAI's lm-evaluation-harness as a library: one model, task after task.

Each task is a call of `lm_eval.simple_evaluate` with the harness's own defaults, so that its
figures are those of `lm_eval run` for that task alone on the same folder.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from slurmllm.errors import DataError, SlurmllmError, UserError
from slurmllm.evaluate.cache_key import harness_version
from slurmllm.evaluate.request import Asked, Candidate, Settings
from slurmllm.records import EvaluationRecord

REMEDY = "install it: pip install 'slurmllm[eval]'"
# How errors of data that a hub should have given are recognised, through their causes.
_HUB = (
    "ConnectionError", "ConnectError", "OfflineModeIsEnabled", "LocalEntryNotFoundError",
    "DatasetNotFoundError", "MaxRetryError", "NameResolutionError", "DataFilesNotFoundError",
    "HfHubHTTPError", "ProxyError", "ReadTimeout", "ConnectTimeout",
)  # fmt: skip
# The harness, of a task that may generate more than the model's context holds.
_TOO_LONG = re.compile(r"max tokens to generate \((\d+)\) must be less than .* length \((\d+)\)")


def require_harness() -> str:
    """The version of the harness.

    Raises:
        UserError: it is not installed.
    """
    version = harness_version()
    if version is None:
        raise UserError(f"lm-evaluation-harness (lm_eval) is not installed; {REMEDY}")
    return version


class Harness:
    """A model folder under the harness; the model is loaded when the first task needs it.

    Args:
        folder: A Hugging Face model folder.
        candidate: Whose it is.
        settings: How tasks are done.
    """

    def __init__(self, folder: Path, candidate: Candidate, settings: Settings) -> None:
        self._folder = folder
        self._candidate = candidate
        self._settings = settings
        self._device = torch_device(settings.device)
        self._model: Any = None

    def judge(self, asked: Asked) -> EvaluationRecord:
        """Do a task.

        Raises:
            UserError: there is no such task, or it runs code and may not.
            DataError: its questions cannot be had here.
        """
        begun = time.monotonic()
        found = self._evaluate(asked)
        name = asked.task.task
        scores, errors = _figures(found["results"][name])
        if not scores:
            raise DataError(f"{name} has no figure that is a finite number")
        shots = found.get("n-shot", {}).get(name, asked.task.shots)
        return EvaluationRecord(
            step=self._candidate.step,
            tokens=self._candidate.tokens,
            checkpoint=self._candidate.checksum,
            task=name,
            shots=shots if isinstance(shots, int) else asked.task.shots,
            limit=self._settings.limit,
            scores=scores,
            errors=errors,
            num_samples=sum(int(n["effective"]) for n in found["n-samples"].values()),
            version=require_harness(),
            seconds=time.monotonic() - begun,
            evaluated_at=time.time(),
        )

    def _evaluate(self, asked: Asked) -> Mapping[str, Any]:
        task, settings = asked.task, self._settings
        if settings.allow_code:
            os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # asked for by metrics that run programs
        try:
            if fault := fault_of(asked, settings.allow_code):
                raise UserError(fault)
            import lm_eval

            found = lm_eval.simple_evaluate(
                model=self._loaded(),
                tasks=[_set_up(asked)],
                num_fewshot=task.shots,
                limit=settings.limit,
                task_manager=_manager_of(asked),
                confirm_run_unsafe_code=settings.allow_code,
                log_samples=False,
            )
        except SlurmllmError:
            raise
        except Exception as error:
            raise _in_our_words(task.task, error) from error
        assert found is not None, "only other ranks get nothing"
        return dict(found)

    def _loaded(self) -> Any:
        if self._model is None:
            from lm_eval.api.registry import get_model

            size = self._settings.batch_size or (1 if self._device == "cpu" else "auto")
            self._model = get_model("hf").create_from_arg_obj(
                {"pretrained": str(self._folder)},
                {"batch_size": size, "max_batch_size": None, "device": self._device},
            )
        return self._model


@cache
def task_manager(folder: str | None) -> Any:
    """The harness's list of tasks, with those of a folder.

    Raises:
        UserError: there is no such folder, or the harness cannot be imported.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(
            f"lm-evaluation-harness (lm_eval) cannot be imported ({error}); {REMEDY}"
        ) from error
    if folder is None:
        return TaskManager()
    if not Path(folder).is_dir():
        raise UserError(f"no folder of tasks {folder}; see `folder` in the suite")
    own = TaskManager(include_path=folder, include_defaults=False)
    # Groups may name the harness's own tasks; to list those takes seconds.
    return TaskManager(include_path=folder) if own.all_groups or own.all_tags else own


def _manager_of(asked: Asked) -> Any:
    own = asked.task.folder
    return task_manager(None if own is None else str(asked.folder / own))


def _set_up(asked: Asked) -> Any:
    """What the harness is told to do: a task's name, or the task with its options."""
    task, manager = asked.task, _manager_of(asked)
    if not task.options:
        return task.task
    # Given as {"task": name, **options}, harness 0.4.13 forgets the task's own file.
    index = manager.task_index
    return manager._factory.build(index[task.task], overrides=task.options, registry=index)


def fault_of(asked: Asked, allow_code: bool) -> str | None:
    """Why the harness cannot do a task, as far as its name and file say.

    Raises:
        UserError: there is no such folder of tasks, or the harness cannot be imported.
    """
    name, manager = asked.task.task, _manager_of(asked)
    if name not in manager.all_tasks:
        return _unknown(name, manager.all_tasks)
    entry = manager.task_index[name]
    if name in manager.all_tags:
        return f"{name} is a tag of several tasks; name them: {', '.join(sorted(entry.tags))}"
    file = entry.cfg or {}
    if name in manager.all_groups and not file.get("aggregate_metric_list"):
        children = [one if isinstance(one, str) else one.get("task") for one in file["task"]]
        tasks = ", ".join(str(one) for one in children if isinstance(one, str))
        return f"{name} is a group without a figure of its own; name its tasks: {tasks}"
    if file.get("unsafe_code") and not allow_code:
        return f"{name} runs programs that the model writes; allow it: --allow-code-execution"
    return None


def _unknown(name: str, known: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=3)
    guess = f"did you mean {' or '.join(close)}? " if close else ""
    return f"the harness has no task {name!r}; {guess}`lm_eval ls tasks` lists all"


def torch_device(device: str) -> str:
    """`auto` resolved.

    Raises:
        UserError: cuda where there is none.
    """
    import torch

    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise UserError("--device cuda: torch finds no CUDA device here; choose cpu or auto")
    if device == "auto":
        return "cuda" if there else "cpu"
    return device


def _figures(result: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Scores and standard errors by `metric,filter`; what is not a finite number is left out."""
    scores: dict[str, float] = {}
    errors: dict[str, float] = {}
    for name, value in result.items():
        metric, comma, chosen = name.partition(",")
        if not comma or isinstance(value, str) or not math.isfinite(float(value)):
            continue
        if metric.endswith("_stderr"):
            errors[f"{metric.removesuffix('_stderr')},{chosen}"] = float(value)
        else:
            scores[name] = float(value)
    return scores, errors


def _in_our_words(task: str, error: Exception) -> SlurmllmError:
    text = " ".join(str(error).split())[:300]
    if "marked as unsafe" in text:
        return UserError(
            f"{task} runs programs that the model writes; allow it: --allow-code-execution"
        )
    if "Dataset scripts are no longer supported" in text:
        return DataError(
            f"the questions of {task} are a program on the hub, which `datasets` refuses since its "
            f"version 4 ({text}); choose another task, or write one that reads them from files"
        )
    if too_long := _TOO_LONG.search(text):
        wanted, context = too_long.groups()
        return DataError(
            f"{task} lets the model write {wanted} tokens, and its context holds {context}, prompt "
            "and answer together; leave the task out, or in a suite of your own ask for fewer: "
            f"options: {{generation_kwargs: {{max_gen_toks: N, until: [...]}}}}"
        )
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < 20:
        chain += [kind.__name__ for kind in type(cause).__mro__]
        cause = cause.__cause__ or cause.__context__
    if any(name in _HUB for name in chain) or "Hugging Face Hub" in text:
        return DataError(
            f"what {task} reads cannot be fetched here ({text}); fetch it where there is a "
            "network, with the same command and --fetch, and HF_HOME set to a folder that the "
            "nodes share; set the same HF_HOME for the evaluation"
        )
    if isinstance(error, ModuleNotFoundError):
        return UserError(f"the harness needs {error.name}, which is not installed; {REMEDY}")
    return DataError(f"{type(error).__name__}: {text}")


def fetch(asked: Asked) -> None:
    """Fetch a task's questions into the cache of this machine (HF_HOME).

    Raises:
        UserError: there is no such task.
        DataError: they cannot be had here.
    """
    name = asked.task.task
    try:
        manager = _manager_of(asked)
        if name not in manager.all_tasks:
            raise UserError(_unknown(name, manager.all_tasks))
        manager.load([_set_up(asked)])
    except SlurmllmError:
        raise
    except Exception as error:
        raise _in_our_words(name, error) from error
