"""Valid combinations of options, the known names, and the errors for wrong ones."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from fabricamp.errors import ConfigError
from fabricamp.precision import PRECISIONS, OptLevel, Precision, precision_from
from tests.windows import end_step, make_step


@pytest.mark.parametrize(
    ("name", "level", "autocast", "cast", "batchnorm", "masters", "scale"),
    [
        ("O1", "O1", torch.float16, None, False, False, "dynamic"),
        ("16-mixed", "O1", torch.float16, None, False, False, "dynamic"),
        (16, "O1", torch.float16, None, False, False, "dynamic"),
        ("O2", "O2", None, torch.float16, True, True, "dynamic"),
        ("O3", "O3", None, torch.float16, False, False, 1.0),
        ("16-true", "O3", None, torch.float16, False, False, 1.0),
        ("O4", "O4", torch.bfloat16, None, False, False, 1.0),
        ("bf16-mixed", "O4", torch.bfloat16, None, False, False, 1.0),
        ("bf16", "O4", torch.bfloat16, None, False, False, 1.0),
        ("O5", "O5", None, torch.bfloat16, True, True, 1.0),
        ("bf16-true", "O3", None, torch.bfloat16, False, False, 1.0),
        ("64-true", "O3", None, torch.float64, False, False, 1.0),
        (64, "O3", None, torch.float64, False, False, 1.0),
    ],
)
def test_names(name, level, autocast, cast, batchnorm, masters, scale):
    precision = pickle.loads(pickle.dumps(precision_from(name)))
    row = precision.level
    assert precision.name == level
    assert (row.autocast, row.cast_model_type, row.keep_batchnorm_fp32) == (autocast, cast, batchnorm)
    assert (row.master_weights, row.loss_scale) == (masters, scale)
    precision.convert_module(nn.Linear(2, 2))
    assert (precision.verdicts is not None) == (scale == "dynamic")


@pytest.mark.parametrize("name", ["O0", "32-true", "32", 32])
def test_full_precision_costs_nothing(name):
    assert type(precision_from(name)) is Precision


def test_an_object_is_taken_as_it_is():
    precision = OptLevel("O2")
    assert precision_from(precision) is precision


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("O6", "known: "),
        ("01", "'O1'"),
        ("o2", "'O2'"),
        ("16-mixt", "'16-mixed'"),
        (7, "numbers: "),
        (8, "write 'fp8' .* or 'fp8-mixed'"),
        (None, "OptLevel"),
        (True, "OptLevel"),
        (torch.float16, "write '16-mixed'.*or '16-true'"),
        (torch.int8, "OptLevel"),
    ],
)
def test_unknown_names(value, told):
    with pytest.raises(ConfigError, match=told):
        precision_from(value)


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32", False),
        ({"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32", True),
        ({"loss_scale": "128.0"}, "loss_scale", 128.0),
        ({"loss_scale": 1}, "loss_scale", 1.0),
        ({"loss_scale": "dynamic"}, "loss_scale", "dynamic"),
        ({"cast_model_type": "bfloat16"}, "cast_model_type", torch.bfloat16),
        ({"cast_model_type": "torch.float32"}, "cast_model_type", torch.float32),
        ({"cast_model_type": False}, "cast_model_type", None),
        ({"cast_model_type": False}, "master_weights", False),
        ({"master_weights": "False"}, "master_weights", False),
        ({"min_loss_scale": 1}, "min_loss_scale", 1.0),
        ({"max_loss_scale": "1024"}, "max_loss_scale", 1024.0),
        ({"scale_window": 10}, "scale_window", 10),
        ({"cast_model_outputs": torch.float64}, "cast_model_outputs", torch.float64),
    ],
)
def test_overrides(given, field, value):
    assert getattr(OptLevel("O2", **given).level, field) == value


@pytest.mark.parametrize(
    ("level", "given", "told"),
    [
        ("01", {}, "letter O"),
        ("O1", {"cast_model_type": torch.float16}, "'O2'"),
        ("O4", {"cast_model_type": "bfloat16"}, "'O2'"),
        ("O1", {"keep_batchnorm_fp32": False}, "leave keep_batchnorm_fp32 out"),
        ("O1", {"keep_batchnorm_fp32": "True"}, "leave keep_batchnorm_fp32 out"),
        ("O4", {"master_weights": True}, "leave master_weights out"),
        ("O2", {"keep_batchnorm_fp32": "yes"}, "'yes'"),
        ("O2", {"keep_batchnorm_fp32": 1}, "1 is not allowed"),
        ("O2", {"master_weights": 0}, "0 is not allowed"),
        ("O2", {"loss_scale": "dynamical"}, "'dynamic'"),
        ("O2", {"loss_scale": 0}, "positive"),
        ("O2", {"loss_scale": float("inf")}, "positive"),
        ("O2", {"loss_scale": True}, "positive"),
        ("O2", {"min_loss_scale": -1}, "positive"),
        ("O2", {"min_loss_scale": 8, "max_loss_scale": 4}, "above"),
        ("O2", {"scale_window": 0}, "from 1"),
        ("O2", {"num_losses": 1.5}, "from 1"),
        ("O2", {"cast_model_type": torch.int8}, "floating dtype"),
        ("O2", {"cast_model_type": "float61"}, "did you mean 'float"),
        ("O2", {"cast_model_outputs": 3}, "floating dtype"),
    ],
)
def test_what_cannot_be(level, given, told):
    with pytest.raises(ConfigError, match=told):
        OptLevel(level, **given)


def test_o1_takes_what_changes_nothing():
    for given in (False, torch.float32, "float32"):
        assert OptLevel("O1", cast_model_type=given).level.cast_model_type is None


def test_registered_names_are_those_of_the_documentation():
    own = {"O0", "O1", "O2", "O3", "O4", "O5"}
    lightning = {"32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true", "16", "32", "64", "bf16"}
    assert own | lightning <= set(PRECISIONS.names())


def test_devices_that_cannot():
    with pytest.raises(ConfigError, match="float64"):
        OptLevel("O3", cast_model_type="float64").level.check_device("mps")
    with pytest.raises(ConfigError, match="autocast"):
        OptLevel("O1").level.check_device("meta")
    for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
        OptLevel(level).level.check_device("cpu")


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_small_net_learns(level):
    from fabricamp.strategies.base import Strategy

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    x = torch.randn(64, 1, 4, 4)
    y = (x.mean((1, 2, 3)) > 0).long()
    precision = precision_from(level)
    precision.convert_module(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    precision.setup_optimizers(net, [optimizer], Strategy())
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = precision.forward(lambda: nn.functional.cross_entropy(net(precision.convert_input(x)), y))
        precision.backward(loss)
        make_step(precision, optimizer)
        end_step(precision, loss)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_the_face_of_a_precision_is_small():
    """A name is added here on purpose: each is one more that a plug-in has to know."""
    of_a_module = {"convert_module", "convert_input", "forward", "notes", "slowness"}
    of_an_update = {"setup_optimizers", "gradients", "backward", "step_of"}
    of_edits = {"fp32_values", "note_restored_weights", "refresh_masters", "take_edits"}
    of_a_run = {"name", "check_strategy", "state_dict", "load_state_dict", "verdicts"}
    face = {name for name in dir(Precision) if not name.startswith("_")}
    assert face == of_a_module | of_an_update | of_edits | of_a_run
