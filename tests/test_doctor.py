"""The doctor: its report on this machine, and on simulated other machines."""

from __future__ import annotations

import pytest
import torch

from fabricamp.cli import main
from fabricamp.commands import doctor
from fabricamp.commands.doctor import (
    Check,
    check_cuda,
    check_cupy,
    check_kernels,
    check_links,
    check_torch,
    examine,
    show,
)


def test_nothing_is_broken_here(capfd):
    assert main(["doctor"]) == 0
    out = capfd.readouterr().out
    assert torch.__version__ in out
    assert "nothing is broken" in out


def test_a_machine_without_a_gpu_has_one_row_about_it(monkeypatch, capfd):
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda *_: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("COLUMNS", "80")
    checks = examine()
    assert [one.name for one in checks][:4] == ["Python", "torch", "GPU", "exchange"]
    assert not [one.name for one in checks if one.name.startswith(("ops.", "CuPy", "CUDA"))]
    assert [one.name for one in checks if one.status != "ok"] == ["GPU"]
    show(checks)
    out = capfd.readouterr().out
    assert "cure" not in out.splitlines()[2]
    assert any("none: everything runs on the CPU" in line for line in out.splitlines())


def test_every_failure_has_a_cure():
    assert all(one.cure for one in examine() if one.status == "broken")


def test_what_is_broken_decides_the_exit_code(monkeypatch, capfd):
    # Wide enough that no line is wrapped; rich must not take an extra's name in brackets for a style.
    monkeypatch.setenv("COLUMNS", "160")
    found = [Check("CuPy", "not there", "broken", "pip install cupy-cuda13x"), Check("x", "y", "not here")]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    assert main(["doctor"]) == 1
    out = capfd.readouterr().out
    assert "pip install cupy-cuda13x" in out
    assert "1 broken" in out


@pytest.mark.parametrize(("version", "status"), [("2.10.1", "broken"), ("2.11.0+cu130", "ok"), ("3.0.0a0", "ok")])
def test_torch_versions(version, status):
    assert check_torch(version).status == status


@pytest.mark.parametrize(
    ("packages", "cuda", "failure", "status", "cure"),
    [
        ({}, None, "", "not here", ""),
        ({}, "13.0", "", "not here", "cupy-cuda13x"),
        ({}, "12.8", "", "not here", "cupy-cuda12x"),
        ({"cupy-cuda13x": "14.2"}, "13.0", "", "ok", ""),
        (
            {"cupy-cuda12x": "14.2"},
            "13.0",
            "",
            "broken",
            "pip uninstall -y cupy-cuda12x; pip install cupy-cuda13x",
        ),
        (
            {"cupy-cuda12x": "14.2", "cupy-cuda13x": "14.2"},
            "13.0",
            "",
            "broken",
            "pip uninstall -y cupy-cuda12x cupy-cuda13x",
        ),
        ({"cupy-cuda13x": "14.2"}, "13.0", "no libnvrtc", "broken", "--force-reinstall cupy-cuda13x"),
    ],
)
def test_cupy_has_to_fit_torch(monkeypatch, packages, cuda, failure, status, cure):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None)
    monkeypatch.setattr(doctor, "_cupy_failure", lambda: failure)
    check = check_cupy(packages, cuda)
    assert check.status == status
    assert cure in check.cure


@pytest.mark.parametrize(
    ("driver", "build", "available", "status", "words"),
    [
        ("", None, False, "not here", "everything runs on the CPU"),
        ("580.65", None, False, "broken", "torch is the CPU build"),
        ("470.10", "13.0", False, "broken", "finds no GPU"),
        ("580.65", "13.0", True, "ok", "driver 580.65"),
    ],
)
def test_driver_and_build(monkeypatch, driver, build, available, status, words):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda *_: driver)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    check = check_cuda()
    assert check.status == status
    assert words in check.found


@pytest.mark.parametrize("value", ["", "-1"])
def test_gpus_that_the_user_has_hidden_are_not_broken(monkeypatch, value):
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda *_: "580.65")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    check = check_cuda()
    assert (check.status, check.cure) == ("not here", "")
    assert f"CUDA_VISIBLE_DEVICES={value!r}" in check.found


TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity
GPU0\t X \tNV18\tSYS\t0-15
GPU1\tNV18\t X \tSYS\t0-15
GPU2\tSYS\tSYS\t X \t16-31
"""


def test_links_between_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) == (0, 1))
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda *_: TOPOLOGY)
    (check,) = check_links()
    assert (
        check.found
        == "1 of 3 pairs directly (NV18, SYS); the others exchange through the host: slower, with the same results"
    )
    assert check.status == "ok"


def test_without_a_gpu_each_op_says_what_runs_instead(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    checks = check_kernels()
    assert Check("ops.adam", "torch: its tensors are on cpu") in checks
    assert all(one.name.startswith("ops.") and one.status == "ok" for one in checks)
