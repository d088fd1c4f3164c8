"""The probe of private names, and `doctor`'s report of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.distributed import distributed_c10d

from slurmllm.launch.diagnose.login_node import private_names_finding
from slurmllm.train.model.private_names import SIGNED_OBJECTS, PrivateNames, missing_names


def test_this_torch_has_all() -> None:
    assert missing_names() == []
    assert private_names_finding().status == "ok"


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed_c10d, "_pickler")
    reason = SIGNED_OBJECTS.missing() or ""
    assert reason.startswith("no _pickler in torch.distributed.distributed_c10d: the objects")
    assert PrivateNames("torch.gone", (), "nothing").missing() == "no module torch.gone: nothing"


def test_doctor_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, "no _pickler in torch: no signature\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: done)
    finding = private_names_finding()
    assert (finding.status, finding.value) == ("warn", "no _pickler in torch: no signature")


def test_doctor_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert private_names_finding().status == "skipped"
