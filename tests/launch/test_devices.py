"""Which devices and how many processes: the forms of ``accelerator`` and ``devices``, on machines with and without GPUs."""

from __future__ import annotations

import pytest
import torch

from fabricamp.errors import ConfigError
from fabricamp.launch import resolve_devices
from fabricamp.strategies.base import Environment

TWO_STARTED = Environment(world_size=2, local_world_size=2, name="torchrun")
BY_AN_EARLIER_TRAINER = Environment(world_size=2, local_world_size=2, name="script")


@pytest.fixture
def gpus(monkeypatch):
    return lambda number: monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


@pytest.mark.parametrize(
    ("accelerator", "devices", "environment", "expected"),
    [
        ("auto", "auto", None, [0]),
        ("cpu", "auto", None, [0]),
        ("cpu", 3, None, [0, 1, 2]),
        ("cpu", "2", None, [0, 1]),
        ("auto", 2, None, [0, 1]),
        ("cpu", "auto", TWO_STARTED, [0, 1]),
        ("cpu", "auto", BY_AN_EARLIER_TRAINER, [0]),
    ],
)
def test_cpu_processes(gpus, accelerator, devices, environment, expected):
    gpus(0)
    assert resolve_devices(accelerator, devices, environment) == ("cpu", expected)


@pytest.mark.parametrize(
    ("accelerator", "devices", "environment", "expected"),
    [
        ("auto", "auto", None, [0, 1, 2, 3]),
        ("gpu", -1, None, [0, 1, 2, 3]),
        ("gpu", "-1", None, [0, 1, 2, 3]),
        ("cuda", 2, None, [0, 1]),
        ("cuda", "2", None, [0, 1]),
        ("gpu", [3, 1], None, [3, 1]),
        ("gpu", (2,), None, [2]),
        ("gpu", "0,2", None, [0, 2]),
        ("gpu", "3,", None, [3]),
        ("gpu", "auto", TWO_STARTED, [0, 1]),
        ("gpu", [2, 3], TWO_STARTED, [2, 3]),
    ],
)
def test_gpu_numbers(gpus, accelerator, devices, environment, expected):
    gpus(4)
    assert resolve_devices(accelerator, devices, environment) == ("cuda", expected)


def test_the_cpu_can_be_chosen_beside_gpus(gpus):
    gpus(4)
    assert resolve_devices("cpu", 2) == ("cpu", [0, 1])


def test_each_task_may_see_only_its_own_gpu(gpus):
    gpus(1)
    assert resolve_devices("gpu", 2, TWO_STARTED) == ("cuda", [0, 0])


@pytest.mark.parametrize(
    ("there", "accelerator", "devices", "message"),
    [
        (0, "gpuu", "auto", "did you mean 'gpu'"),
        (0, "gqv", "auto", "known: 'auto', 'cpu', 'gpu', 'cuda'"),
        (0, "tpu", "auto", "TPUs are not offered: write 'cpu', 'gpu' or 'auto'"),
        (0, "gpu", 1, "sees none here"),
        (0, "cpu", 0, "1 or more"),
        (0, "cpu", -1, "1 or more"),
        (0, "cpu", [0, 1], "number of CPU processes"),
        (0, "auto", "0,1", "number of CPU processes"),
        (4, "gpu", 5, "there are 4 GPUs here"),
        (4, "gpu", [4], "there are 4 GPUs here"),
        (1, "gpu", 2, "there is 1 GPU here"),
        (4, "gpu", [-1], "not there"),
        (4, "gpu", -2, "selects no device"),
        (4, "gpu", 0, "selects no device"),
        (4, "gpu", [], "selects no device"),
        (4, "gpu", [1, 1], "twice"),
        (4, "gpu", "1,1", "twice"),
        (4, "gpu", "all", "cannot be read"),
        (4, "gpu", "atuo", "did you mean 'auto'"),
        (4, "gpu", "0,x", "cannot be read"),
        (4, "gpu", "", "cannot be read"),
        (4, "gpu", True, "cannot be read"),
        (4, "gpu", [True, 0], "cannot be read"),
        (4, "gpu", 1.0, "cannot be read"),
        (4, "gpu", None, "cannot be read"),
    ],
)
def test_refused(gpus, there, accelerator, devices, message):
    gpus(there)
    with pytest.raises(ConfigError, match=message):
        resolve_devices(accelerator, devices)
