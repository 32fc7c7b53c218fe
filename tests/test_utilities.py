"""Lightning's helpers: their effects, and the ranks on which they act."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only as the_one_function

from fabricamp import ConfigError
from fabricamp.strategies import Environment, Strategy
from fabricamp.utilities import (
    AttributeDict,
    grad_norm,
    measure_flops,
    move_data_to_device,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from fabricamp.utilities.exceptions import MisconfigurationException
from fabricamp.utilities.seed import isolate_rng, seed_everything
from fabricamp.utilities.types import EVAL_DATALOADERS, STEP_OUTPUT, TRAIN_DATALOADERS, OptimizerLRScheduler
from tests.small import Classifier, loader, quiet_trainer


@pytest.fixture
def rank_one():
    rank_zero_only.rank = 1
    yield
    rank_zero_only.rank = 0


def test_rank_zero_functions_run_on_rank_zero_only(rank_one, capsys):
    calls = []
    call = rank_zero_only(calls.append)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        call(1)
        rank_zero_warn("one")
        Strategy().setup_environment(Environment(), torch.device("cpu"))  # as a Trainer does
        call(0)
        rank_zero_warn("zero")
    assert calls == [0]
    assert [str(one.message) for one in warned] == ["zero"]
    assert rank_zero_only is the_one_function


def test_the_rank_is_known_before_there_is_a_trainer_and_messages_show_without_logging():
    code = (
        "import torch, os; os.environ['RANK'] = '3' if os.fork() else '0'; os.environ['RANK'] == '0' or os.wait(); "
        "from fabricamp.utilities.rank_zero import rank_zero_info, rank_zero_debug, rank_zero_only; "
        "rank_zero_info('rank %d', rank_zero_only.rank); rank_zero_debug('hidden'); print(rank_zero_only.rank); "
        "import logging, sys; logging.basicConfig(stream=sys.stdout, level=logging.INFO, format='configured: %(message)s'); "
        "rank_zero_info('once')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\nconfigured: once\n3\n", "rank 0\n")


def test_gradient_norms_have_lightnings_names():
    layer = torch.nn.Linear(2, 1)
    layer(torch.ones(1, 2)).sum().backward()  # the gradients are ones: two in the weight, one in the bias
    norms = grad_norm(layer, norm_type=2)
    assert list(norms) == ["grad_2.0_norm/weight", "grad_2.0_norm/bias", "grad_2.0_norm_total"]
    assert [round(float(one), 4) for one in norms.values()] == [1.4142, 1.0, 1.7321]
    assert float(grad_norm(layer, "inf", group_separator=".")["grad_inf_norm.bias"]) == 1.0
    assert grad_norm(torch.nn.Linear(2, 1), 1) == {}
    with pytest.raises(ConfigError, match="norm_type=0"):
        grad_norm(layer, 0)


def test_gradient_norms_are_logged_from_a_hook():
    class Logs(Classifier):
        def on_before_optimizer_step(self, optimizer):
            self.log_dict(grad_norm(self, norm_type=2))

    trainer = quiet_trainer(max_steps=2, log_every_n_steps=1)
    trainer.fit(Logs(), loader())
    assert trainer.logged_metrics["grad_2.0_norm_total"] > 0


def test_the_error_that_lightning_raises_catches_ours():
    with pytest.raises(MisconfigurationException, match="max_epochs"):
        quiet_trainer(max_epochs=-3)
    with pytest.raises(ConfigError, match="mine"):
        raise MisconfigurationException("mine")


def test_small_helpers():
    assert AttributeDict(lr=0.1, nested={"a": 1}).nested.a == 1
    moved = move_data_to_device({"x": [torch.zeros(2)], "name": "n"}, "meta")
    assert (moved["x"][0].device.type, moved["name"]) == ("meta", "n")
    with torch.device("meta"):
        layer, batch = torch.nn.Linear(8, 4), torch.randn(2, 8)
    forward = measure_flops(layer, lambda: layer(batch))
    assert forward == 2 * 2 * 8 * 4
    assert measure_flops(layer, lambda: layer(batch), torch.sum) == 2 * forward  # the batch needs no gradient
    seed_everything(3, verbose=False)
    with isolate_rng(include_cuda=False):
        first = torch.rand(1)
    assert torch.equal(torch.rand(1), first)


def test_types_stand_in_annotations():
    def step(batch: torch.Tensor) -> STEP_OUTPUT: ...

    def loaders() -> tuple[TRAIN_DATALOADERS, EVAL_DATALOADERS]: ...

    def optimizers() -> OptimizerLRScheduler: ...

    assert OptimizerLRScheduler.__args__  # a union, for the type checker and `|`
    rank_zero_info("")
