"""``Trainer(activations=...)`` with ``compile``: the numbers of compiled code that keeps everything."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fabricamp import Activations, Compile, ConfigError
from tests.distributed.ranks import import_compiler
from tests.small import quiet_trainer
from tests.trainer.test_activations import KINDS, Called, Deep, batches, deep_with, fitted


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks_have_the_bits_of_compiled_blocks(kind):
    import_compiler()
    options = {"compile": Compile("blocks", backend="aot_eager", fullgraph=True), "watches": False, "precision": "O5"}
    expected, _ = fitted(**options)
    weights, _ = fitted(KINDS[kind], **options)
    assert torch.equal(weights, expected)


@pytest.mark.parametrize(("part", "kind"), [("step", "products"), ("modules", "recompute")])
def test_a_compiled_step_computes_blocks_again(part, kind):
    import_compiler()
    options = {"compile": Compile(part, backend="aot_eager", fullgraph=True), "watches": False}
    expected, _ = fitted(**options)
    assert torch.equal(fitted(KINDS[kind], **options)[0], expected)


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("blocks", "inputs elsewhere"),
        ("modules", "recompute"),
        pytest.param("step", "products", marks=pytest.mark.slow),
    ],
)
def test_a_block_that_cannot_be_compiled_as_a_whole_is_computed_again_eagerly(part, kind):
    import_compiler()

    def trained(activations):
        torch.manual_seed(0)
        module = deep_with(Called)
        options = Compile(part, backend="aot_eager")
        quiet_trainer(max_epochs=1, compile=options, activations=activations).fit(module, batches())
        return torch.cat([one.detach().flatten() for one in module.parameters()])

    expected = trained("keep")
    torch.compiler.reset()
    assert torch.equal(trained(KINDS[kind]), expected)


def test_a_budget_with_dropout_is_refused_before_the_first_backward():
    """Gradients would be of other numbers than the forward's."""
    module = Deep(dropout=0.1)
    options = {"compile": Compile("blocks", backend="aot_eager_decomp_partition"), "max_epochs": 1}
    with pytest.raises(ConfigError, match=r"memory_budget=0.5\): training_step draws random numbers, as dropout does"):
        quiet_trainer(activations=Activations(memory_budget=0.5), **options).fit(module, batches(1))
    assert all(one.grad is None for one in module.parameters())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="torch's default backend needs a C compiler")
@pytest.mark.parametrize("part", ["blocks", "step"])
def test_inductors_code_is_as_near_as_two_compilations(part):
    """On a CPU the bits are the same; a GPU's kernels may be fused in another way."""
    for dropout in (0.0, 0.1):
        options = {"compile": part, "watches": False, "dropout": dropout}
        torch.compiler.reset()
        expected, _ = fitted(**options)
        for kind in KINDS:
            if part == "step" and KINDS[kind] != "recompute":
                continue
            torch.compiler.reset()
            torch.testing.assert_close(fitted(KINDS[kind], **options)[0], expected, rtol=1e-5, atol=1e-6)


class Counted(Deep):
    """Notes the bytes that are saved for backward."""

    def training_step(self, batch, batch_idx):
        saved = {}

        def note(tensor):
            saved[StorageWeakRef(tensor.untyped_storage()).cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = super().training_step(batch, batch_idx)
        self.saved = sum(saved.values())
        return loss


def test_a_budget_is_of_compiled_regions():
    import_compiler()

    def saved(activations):
        torch.compiler.reset()
        module = Counted(dropout=0.0)
        options = Compile("blocks", backend="aot_eager_decomp_partition")
        quiet_trainer(max_steps=1, compile=options, activations=activations).fit(module, batches())
        return module.saved, torch.cat([one.detach().flatten() for one in module.parameters()])

    whole, expected = saved("keep")
    none, weights = saved(Activations(memory_budget=0.0))
    half, _ = saved(Activations(memory_budget=0.5))
    assert none < 0.7 * whole
    assert none <= half <= whole
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert torch._functorch.config.activation_memory_budget == 1.0
