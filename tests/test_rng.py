"""Random numbers: seeding, capture and restore bit for bit, isolation, determinism."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random

import numpy as np
import pytest
import torch

from fabricamp.errors import ConfigError
from fabricamp.rng import (
    capture_rng,
    deterministic_mode,
    global_seed,
    isolate_rng,
    restore_rng,
    seed_everything,
    seed_worker,
    seeded,
    seeds_workers,
)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in (
        "FABRICAMP_GLOBAL_SEED",
        "FABRICAMP_SEED_WORKERS",
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
        "CUBLAS_WORKSPACE_CONFIG",
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with isolate_rng():
        yield


def draw():
    numbers = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    numbers.append(float(torch.rand(())))
    if torch.cuda.is_available():
        numbers.append(float(torch.rand((), device="cuda")))
    return numbers


def test_seeding_repeats_everything_and_is_shared():
    assert global_seed() == 0
    assert seed_everything(42) == 42
    first = draw()
    assert global_seed() == 42
    assert seed_everything() == 42
    assert draw() == first
    seed_everything(43)
    assert draw() != first
    assert os.environ["FABRICAMP_GLOBAL_SEED"] == "43", "what processes started from here inherit"


def test_ranks_that_run_the_script_again_do_not_repeat_its_line(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "fabricamp")
    seed_everything(5)
    monkeypatch.setenv("FABRICAMP_STARTED_BY", "script")
    seed_everything(5)
    assert caplog.messages == ["Seed set to 5"]
    seed_everything(6)
    assert caplog.messages == ["Seed set to 5", "Seed set to 6"]


@pytest.mark.parametrize("seed", [-1, 2**32, "many", None])
def test_wrong_seeds_are_refused(seed, monkeypatch):
    monkeypatch.setenv("FABRICAMP_GLOBAL_SEED", "-7")
    with pytest.raises(ConfigError, match=r"integer from 0 to 4294967295"):
        seed_everything(seed)


def test_capture_and_restore_are_bit_exact_through_a_checkpoint():
    seed_everything(1)
    draw()  # leaves a cached second gaussian in Python's and NumPy's generators
    file = io.BytesIO()
    torch.save(capture_rng(), file)
    expected = [draw() for _ in range(3)]
    seed_everything(2)
    file.seek(0)
    restore_rng(torch.load(file, weights_only=True))
    assert [draw() for _ in range(3)] == expected


def test_restore_leaves_out_devices_that_are_not_here():
    state = capture_rng()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * 20 if not torch.cuda.is_available() else state["cuda"]
    restore_rng(state)


def test_gpus_that_are_not_in_use_are_not_even_counted(monkeypatch):
    """A process that has counted GPUs can no longer be forked."""

    def asked(*_):
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("is_available", "device_count", "get_rng_state_all", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, asked)
    restore_rng(capture_rng())


def test_isolation_holds_when_the_body_raises():
    seed_everything(3)
    expected = draw()
    seed_everything(3)
    with contextlib.suppress(KeyError), isolate_rng():
        draw()
        raise KeyError
    assert draw() == expected


def test_workers_are_seeded_by_their_seed_and_rank():
    def drawn(base, rank):
        torch.manual_seed(base)
        seed_worker(0, rank)
        return tuple(draw()[:5])

    all_drawn = [drawn(base, rank) for base in range(4) for rank in range(4)]
    assert len(set(all_drawn)) == 16
    assert len({number for numbers in all_drawn for number in numbers}) == 16 * 5
    assert drawn(2, 3) == all_drawn[2 * 4 + 3]


def test_seeding_of_workers_can_be_left_to_torch():
    assert seeds_workers()
    seed_everything(0, workers=False)
    assert not seeds_workers()
    seed_everything(0)
    assert seeds_workers()


@pytest.mark.parametrize(("mode", "warn_only"), [(True, False), ("warn", True)])
def test_deterministic_mode_comes_and_goes(mode, warn_only):
    torch.backends.cudnn.benchmark = True
    with deterministic_mode(mode):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    torch.backends.cudnn.benchmark = False


def test_no_determinism_leaves_the_process_as_it_is(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic_mode(True, benchmark=True):
        assert torch.backends.cudnn.benchmark
        with deterministic_mode(False):
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.backends.cudnn.benchmark
        with deterministic_mode(False, benchmark=False):
            assert not torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    with deterministic_mode(False):
        torch.use_deterministic_algorithms(True)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ConfigError, match="deterministic='yes'"), deterministic_mode("yes"):
        pass


def test_seeded_draws_from_what_is_given_and_leaves_everything_as_it_was():
    def inside(*given):
        with seeded(*given):
            return draw()[:5]

    seed_everything(3)
    expected = draw()
    seed_everything(3)
    first = inside(1, 2, 3)
    assert inside(1, 2, 3) == first
    assert len({tuple(inside(*given)) for given in ((1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (1, 23))}) == 5
    with contextlib.suppress(KeyError), seeded(4):
        raise KeyError
    assert draw() == expected


def test_lightnings_variable_is_the_seed_until_one_is_set(monkeypatch):
    monkeypatch.delenv("FABRICAMP_GLOBAL_SEED", raising=False)
    monkeypatch.setenv("PL_GLOBAL_SEED", "23")
    assert global_seed() == 23
    assert seed_everything() == 23
    monkeypatch.setenv("FABRICAMP_GLOBAL_SEED", "4")
    assert global_seed() == 4


@pytest.mark.parametrize("workers", [True, False])
def test_lightnings_variables_are_set_and_read(workers, monkeypatch):
    """Libraries, and Lightning's processes, read the run's seed from these variables."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "23")
    assert seed_everything(verbose=False) == 23
    seed_everything(5, workers=workers, verbose=False)
    assert os.environ["PL_GLOBAL_SEED"] == "5"
    assert os.environ["PL_SEED_WORKERS"] == str(int(workers))
    assert seed_everything(verbose=False) == 5
