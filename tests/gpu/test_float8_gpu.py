"""FP8 products on a card that has them: compiled, in CUDA graphs, resumed, and where their sizes do not allow them."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from fabricamp import Float8
from fabricamp.precision.float8_linears import RECIPES, float8_class, plain_linears
from tests.small import quiet_trainer
from tests.trainer.test_float8_in_the_loop import TAKEN, SaveAt, Words, batches, fp8, weights

pytest.importorskip("torchao", reason="needs the package torchao")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="this GPU has no FP8 products"
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="torch's default backend needs a C compiler"),
]


@pytest.fixture(autouse=True)
def _no_code_of_earlier_tests():
    torch.compiler.reset()


def trained(precision, *, ckpt_path=None, **options):
    module = Words()
    trainer = quiet_trainer(
        **{"accelerator": "gpu", "devices": 1, "max_epochs": 1, "precision": precision, "compile": "blocks", **options}
    )
    trainer.fit(module, batches(), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_have_real_products_of_the_recipe(recipe):
    """What torchao emulates is a bf16 product of rounded values; a real one is a call of torch's scaled product."""
    net = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 128), nn.Linear(128, 64)).cuda()
    precision = Float8(recipe, include=["1"])
    conversion = precision.convert_module(net)
    assert not net[1].config.emulate
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        precision.forward(lambda: net(torch.arange(32, device="cuda") % 8)).sum().backward()
    calls = sum(event.count for event in seen.key_averages() if event.key == "aten::_scaled_mm")
    assert calls == (2 if recipe == "rowwise_with_gw_hp" else 3)
    conversion.undo()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_that_is_not_compiled_says_that_it_is_slow(caplog, compiled):
    with caplog.at_level(logging.INFO, logger="fabricamp"):
        trained(fp8(), compile="blocks" if compiled else None, limit_train_batches=1)
    said = [message for message in caplog.messages if "slower than O5" in message]
    assert len(said) == (not compiled)


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_blocks_learn_nearly_what_bf16_learns(recipe):
    module = trained(fp8(recipe), gradient_clip_val=1.0)
    assert module.kinds == TAKEN
    exact = trained("O5", gradient_clip_val=1.0)
    assert module.losses != exact.losses
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(exact.losses), rtol=0.03, atol=0)


def test_a_whole_compiled_step():
    module = trained(fp8(base="O4"), compile="step")
    assert module.losses[-1] < 0.95 * module.losses[0]


def test_replayed_steps_have_the_bits_of_eager_launches():
    eager = trained(fp8(), nan_policy="skip")
    replayed = trained(fp8(), nan_policy="skip", cuda_graph=True)
    assert replayed.losses == eager.losses
    torch.testing.assert_close(weights(replayed), weights(eager), rtol=0, atol=0)


@pytest.mark.parametrize("graph", [False, True])
def test_a_resumed_run_has_the_same_bits(tmp_path, graph):
    path = str(tmp_path / "cut.ckpt")
    options = {"gradient_clip_val": 1.0, "cuda_graph": True if graph else None}
    straight = trained(fp8("rowwise"), callbacks=[SaveAt(path, 3)], **options)
    resumed = trained(fp8("rowwise"), ckpt_path=path, **options)
    assert resumed.losses == straight.losses[3:]
    torch.testing.assert_close(weights(resumed), weights(straight), rtol=0, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("base", ["O4", "O5"])
def test_products_and_gradients_are_near_those_in_bf16(recipe, base):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(8, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 16)
    ).cuda()
    precision = Float8(recipe, base=base, include=["1", "3"])
    conversion = precision.convert_module(net)
    for rows in (1, 20, 32):
        tokens = torch.arange(rows, device="cuda") % 8
        gradients = []
        for plain in (False, True):
            net.zero_grad()
            if plain:
                with plain_linears(net):
                    loss = precision.forward(lambda: net(tokens).float().square().mean())
                    loss.backward()
            else:
                loss = precision.forward(lambda: net(tokens).float().square().mean())
                loss.backward()
            gradients.append([parameter.grad.float() for parameter in net.parameters()])
        for found, exact in zip(*gradients, strict=True):
            assert (found - exact).norm() <= 0.15 * exact.norm()
            assert rows == 32 or torch.equal(found, exact)
    conversion.undo()


def test_a_real_product_is_that_of_the_emulation():
    torch.manual_seed(0)
    layer = nn.Linear(64, 128, dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    layer.__class__ = float8_class("tensorwise", emulate=True)
    emulated = layer(x)
    layer.__class__ = float8_class("tensorwise", emulate=False)
    real = layer.cuda()(x.cuda())
    torch.testing.assert_close(real.cpu(), emulated, rtol=0.02, atol=0.02)
    assert (real.cpu() - F.linear(x, layer.weight.cpu(), layer.bias.cpu())).abs().max() > 0
