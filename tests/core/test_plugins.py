"""Parts of other packages: found by name, imported only when named, with checked settings."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pytest
from click.testing import CliRunner
from made_records import save_attempt
from pydantic import Field
from train.gang import small_config

from slurmllm.cli.main import cli
from slurmllm.core import plugins
from slurmllm.core.config.families import FAMILIES
from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import change, resolve
from slurmllm.core.errors import ConfigError, NodeError, PluginError
from slurmllm.core.plugins import PluginRef
from slurmllm.core.run.records import NodeRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.data.spec import StreamSpec
from slurmllm.data.stream import PackedStream
from slurmllm.launch.submit.inputs import warn_if_changed
from slurmllm.train.backends.base import Worker
from slurmllm.train.backends.environment import load_environment
from slurmllm.train.exits import failure_record, format_failure
from slurmllm.train.hooks import Hook
from slurmllm.train.plugins import faults
from slurmllm.train.worker import PluginHook

Install = Callable[..., Path]

FAMILY = """
from dataclasses import replace
from slurmllm.core.config.families import FAMILIES
MINE = replace(FAMILIES["llama"], name="mine", norm="layer")
"""
SOURCE = """
import numpy as np
from slurmllm.data.sources.base import BEGINS, Pieces, Source, fingerprint, joined
class Lines(Source):
    size_unit = "tokens"
    def __init__(self, path, encoder, vocab_size):
        self.path, self.fingerprint = path, fingerprint([path], "lines")
        self.lines = [[int(n) for n in line.split()] for line in path.read_text().splitlines()]
    def __len__(self): return len(self.lines)
    @property
    def total_size(self): return sum(map(len, self.lines))
    def document_size(self, document): return len(self.lines[document])
    def num_pieces(self, document): return 1
    def content_hash(self, document): return hash(tuple(self.lines[document]))
    def read(self, requests):
        parts = []
        for document, _ in requests:
            marks = np.zeros(len(self.lines[document]), np.uint8)
            marks[0] = BEGINS
            parts.append((np.array(self.lines[document], np.int32), marks))
        return joined(parts)
"""
HOOKS = """
from types import SimpleNamespace
from typing import Annotated, Any
from pydantic import Field
from slurmllm.core.plugins import register
from slurmllm.train.hooks import Hook
@register("hooks", "counted")
class Counted(Hook):
    backends = ("native",)
    def __init__(self, context, *, every: Annotated[int, Field(gt=0)] = 10): ...
@register("hooks", "no_hook")
class NoHook: ...
"""
OPTIMIZERS = """
import torch
from slurmllm.core.plugins import register
@register("optimizers", "sgd")
def sgd(parameters, recipe, *, momentum: float = 0.0):
    return torch.optim.SGD([p for _, p in parameters], lr=recipe.optim.lr, momentum=momentum)
@register("optimizers", "forgets")
def forgets(parameters, recipe):
    return torch.optim.SGD([parameters[0][1]], lr=1.0)
@register("optimizers", "nothing")
def nothing(parameters, recipe):
    return None
@register("optimizers", "no_arguments")
def no_arguments():
    return None
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """(module, its text, **kind=entry points) → its folder, which is on sys.path of this test."""
    monkeypatch.setattr(plugins, "_registered", {})
    before, shipped = set(sys.modules), dict(FAMILIES)

    def write(module: str, text: str, **groups: str) -> Path:
        folder = tmp_path / f"site-{module}"
        folder.mkdir()
        (folder / f"{module}.py").write_text(text)
        if groups:
            info = folder / f"{module}-1.5.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.5\n")
            lines = [f"[slurmllm.{kind}]\n{entry}\n" for kind, entry in groups.items()]
            (info / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("plug_"):
            del sys.modules[name]
    FAMILIES.clear()
    FAMILIES.update(shipped)


def test_a_prefix_names_a_data_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plugins.split_prefix("lines:data/a.txt") == ("lines", "data/a.txt")
    assert plugins.absolute("lines:a.txt") == f"lines:{tmp_path}/a.txt"
    for path in ("/data/a:b.arrow", "a.arrow", "./x:y", "lines:"):
        assert plugins.split_prefix(path) == (None, path)
    (tmp_path / "lines:a.txt").touch()  # a file of this name was a corpus before there were sources
    assert plugins.split_prefix("lines:a.txt") == (None, "lines:a.txt")


def test_an_installed_part_is_imported_only_when_it_is_named(install: Install) -> None:
    folder = install("plug_lazy", "raise RuntimeError('imported')", hooks="lazy = plug_lazy:Hook")
    assert plugins.is_known("hooks", "lazy")
    part = PluginRef("hooks", "lazy", "hooks.lazy")
    assert plugins.versions([part], ["plug_lazy"]) == plugins.versions([], ["plug_lazy"])
    assert plugins.versions([part], []) == {"plug_lazy": "1.5"}
    assert plugins.module_file("plug_lazy") == folder / "plug_lazy.py"
    assert plugins.module_file("plug_lazy.no.such") is None
    with pytest.raises(
        ConfigError, match=r"hooks.lazy: 'lazy' of plug_lazy 1.5 cannot be imported"
    ):
        plugins.find("hooks", "lazy", "hooks.lazy")


def test_what_is_unknown_or_of_one_name_is_refused(install: Install) -> None:
    install("plug_known", "x = 1", hooks="known = plug_known:x")
    plugins.register("hooks", "one")(int)
    for call, message in (
        (
            lambda: plugins.find("optimizers", "x", "optim.name"),
            r"'x' is unknown: .*known: adamw, muon",
        ),
        (lambda: plugins.find("hooks", "other", "h"), r"\(known: known.*add its module to plugins"),
        (lambda: plugins.import_modules(["no.such"]), r"plugins: no.such cannot be imported: Mod"),
        (lambda: plugins.register("hooks", "one")(str), "two hooks are called 'one'"),
        (lambda: plugins.register("optimizers", "muon"), "'muon'.: slurmllm has one of this name"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_settings_are_the_keyword_only_parameters() -> None:
    def part(
        context: object, *, every: Annotated[int, Field(gt=0)], share: float = 0.5
    ) -> None: ...

    assert plugins.check_settings(part, "p", {"every": 3}, 1) == {"every": 3, "share": 0.5}
    with pytest.raises(ConfigError) as caught:
        plugins.check_settings(part, "p", {"every": 0, "shre": 1}, 1)
    assert caught.value.faults == (
        "every: 0: Input should be greater than 0",
        "shre: unknown setting; known: every, share",
    )
    for kind, settings, count, message in (
        (part, {}, 1, "every: missing; it has no default"),
        (part, {"every": 1}, 2, "cannot be called with 2 positional arguments"),
        (3, {}, 1, "is 3, not a class or function"),
    ):
        with pytest.raises(ConfigError, match=message):
            plugins.check_settings(kind, "p", settings, count)
    with pytest.raises(ConfigError, match=r"optim.settings: .*but optim.name is adamw"):
        small_config("optim.settings.momentum=0.9")


def test_a_family_of_another_package(install: Install) -> None:
    install("plug_family", FAMILY, models="mine = plug_family:MINE")
    config = resolve("tiny_llama", "local", ["model.family=mine"])
    assert (config.recipe.model.activation, config.recipe.model.gated) == ("silu", True)
    assert config.recipe.plugin_refs == [PluginRef("models", "mine", "model.family")]
    assert config.origins["model.activation"] == "family mine"


def test_no_module_is_imported_for_others_configuration(install: Install, tmp_path: Path) -> None:
    register = "import slurmllm.core.plugins as p\np.register('models', 'mine')(MINE)"
    install("plug_family", f"{FAMILY}\n{register}")
    config = resolve("tiny_llama", "local", ["model.family=mine", "plugins=[plug_family]"])
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert load(path, trusted=True).recipe == config.recipe
    plugins._registered.clear()
    del FAMILIES["mine"], sys.modules["plug_family"]
    with pytest.raises(ConfigError, match="must be 'neox'"):
        load(path)
    assert "plug_family" not in sys.modules


def test_a_family_that_cannot_be_used(install: Install) -> None:
    install("plug_number", "MINE = 1", models="number = plug_number:MINE")
    heavy = "import sys, types\nsys.modules.setdefault('torch', types)\nX = 1"
    install("plug_heavy", heavy, models="heavy = plug_heavy:X")
    torch = sys.modules.pop("torch", None)
    try:
        for name, message in (
            ("number", "'number' is 1, and must be a Family of this name"),
            ("unheard", "must be 'neox', 'llama'"),
            ("heavy", "its module imports torch"),
        ):
            with pytest.raises(ConfigError, match=message):
                resolve("tiny_llama", "local", [f"model.family={name}"])
    finally:
        sys.modules.pop("torch", None)
        if torch is not None:
            sys.modules["torch"] = torch


def test_a_data_source_is_read_in_every_process(install: Install, tmp_path: Path) -> None:
    register = "from slurmllm.core.plugins import register\n"
    register += "register('data_sources', 'lines')(Lines)"
    install("plug_lines", f"{SOURCE}\n{register}")
    corpus = tmp_path / "numbers.txt"
    corpus.write_text("\n".join(" ".join(str(i * 8 + n) for n in range(8)) for i in range(20)))
    spec = StreamSpec(
        [(Path(f"lines:{corpus}"), 1.0)], None, 8, 4, 1, 200, "document", plugins=["plug_lines"]
    )
    with PackedStream(spec, 0, 1, 1) as stream:
        batch = stream.next_batch()
        assert stream.identity["corpora"][0]["path"] == f"lines:{corpus}"
    assert batch.tokens.shape == (4, 9)
    starts = batch.tokens[np.arange(4), 0]
    assert (starts % 8 == 0).all()
    assert len(set(starts.tolist())) == 4


def test_faults_of_hooks_and_optimizers(install: Install) -> None:
    install("plug_hooks", HOOKS)
    install("plug_optimizers", OPTIMIZERS)
    both = "plugins=[plug_hooks, plug_optimizers]"

    def texts(*settings: str) -> str:
        return "\n".join(faults(small_config(both, *settings)))

    assert not texts("hooks.counted.every=3", "optim.name=sgd", "optim.settings.momentum=0.9")
    for settings, message in (
        ("hooks.counted.every=0", "every: 0: Input should be greater than 0"),
        ("hooks.counted={} backend=rehearsal", "backend native, and this run has rehearsal"),
        ("hooks.no_hook={}", "must be a subclass of slurmllm.train.hooks.Hook"),
        ("hooks.unheard={}", "hooks.unheard: 'unheard' is unknown"),
        ("optim.name=sgd optim.settings.momentum=-1", "these settings: ValueError: Invalid mom"),
        ("optim.name=forgets", "parameters not exactly once"),
        ("optim.name=nothing", "returned a builtins.NoneType, not a torch.optim"),
        ("optim.name=no_arguments", "cannot be called with 2 positional"),
    ):
        assert message in texts(*settings.split()), message


def test_a_resume_warns_of_another_version(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("plug_old", "", hooks="one = plug_old:x")
    run = RunDir(tmp_path / "run")
    config = small_config("hooks.one={}")
    attempt = run.attempt("train", 0)
    warn_if_changed(config, run)
    save_attempt(run)
    for version in ("1.5", "1.4"):
        NodeRecord(node="n1", versions={"plug_old": version}).save(attempt.node("n1"))
        warn_if_changed(config, run)
    (message,) = caplog.messages
    assert message.startswith("plugin plug_old: 1.5 now, 1.4 in attempt 0;")


def test_backends_refuse_what_they_cannot_train() -> None:
    config = small_config("optim.name=sgd", "train.precision=bf16_sr")
    assert any(
        "optim.name: sgd needs the native backend" in fault
        for fault in load_environment("nxd").unsupported(config)
    )
    assert "bf16_sr rounds stochastically inside AdamW" in "".join(
        load_environment("native").unsupported(config)
    )
    assert load_environment("native").unsupported(small_config("optim.name=sgd")) == []


def test_submit_checks_in_another_process(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = install("plug_optimizers", OPTIMIZERS + "\nprint('hello')")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    arguments = f"submit tiny_neox --local --dry-run --json --runs-dir {tmp_path}".split()
    more = ("plugins=[plug_optimizers]", "optim.name=sgd")
    wrong = ("optim.settings.momentun=1", "hooks.unheard={}")
    result = CliRunner().invoke(cli, [*arguments, *more, *wrong])
    assert result.exit_code == 0, result.output
    refusals = json.loads(result.stdout)["refusals"]
    assert len(refusals) == 2
    assert "'unheard' is unknown" in refusals[0]
    assert "momentun: unknown setting; known: momentum" in refusals[1]
    assert "plug_optimizers" not in sys.modules


class Noisy(Hook):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def before_step(self, step: int) -> None:
        raise self.error

    def close(self) -> None:
        raise self.error


def own_hook(error: Exception) -> PluginHook:
    job: Any = SimpleNamespace(run=RunDir(Path("r")), step=4)
    return PluginHook(job, "noisy", Noisy(error))


def test_a_hook_that_raises_is_named(caplog: pytest.LogCaptureFixture) -> None:
    hook = own_hook(KeyError("lr"))
    with pytest.raises(PluginError) as raised:
        hook.before_step(5)
    assert str(raised.value) == (
        f"hooks.noisy: Noisy.before_step of module {__name__} raised KeyError after step 4: 'lr'; "
        "a hook must not raise: correct it (the traceback is in this worker's log), or train "
        "without it: `slurmllm resume r --set hooks.noisy=null`"
    )
    record = failure_record(raised.value, Worker(0, 1, 0, "n"), 4)
    assert (record.exit_code, record.blame, record.error) == (70, "code", "PluginError")
    assert "in before_step" in format_failure(record)
    assert str(hook) == "Noisy"
    hook.close()  # would hide how the training ended
    (message,) = caplog.messages
    assert message.startswith(
        f"hooks.noisy: Noisy.close of module {__name__} raised KeyError after"
    )


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), NodeError("lost")])
def test_a_hook_does_not_take_the_blame_of_a_machine(error: Exception) -> None:
    with pytest.raises(type(error), match=re.escape(str(error))):
        own_hook(error).before_step(1)


def test_null_removes_a_hook_and_an_evaluation_text() -> None:
    both = ("hooks.one.every=2", "hooks.two={}", "eval.corpora.wiki=a", "eval.corpora.code=b")
    config = small_config(*both, "hooks.one=null", "eval.corpora.code=null")
    assert (config.recipe.hooks, config.recipe.eval.corpora) == ({"two": {}}, {"wiki": "a"})
    assert not any("hooks.one" in path for path in config.origins)
    assert change(config, None, ["hooks.two=null"]).recipe.hooks == {}  # at `resume`
    with pytest.raises(ConfigError, match=r"hooks.tow=null: there is no tow in hooks \(one, two\)"):
        small_config(*both, "hooks.tow=null")
