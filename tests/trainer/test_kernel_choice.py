"""The mode by which norms choose between kernel and torch: fixed during a run, saved, and kept by a resumed run."""

from __future__ import annotations

import pytest
import torch

from fabricamp import Callback, CheckpointError
from fabricamp.engine import kernel_choice
from fabricamp.nn import fuse
from fabricamp.ops import dispatch, set_kernel_choice
from fabricamp.ops.norm import kernels as norm_kernels
from tests.cuda_on_cpu.compiler import kernel_device
from tests.small import Classifier, loader, quiet_trainer

__all__ = ["kernel_device"]


class Net(Classifier):
    """Has a norm; records in each step the mode of the choice and whether a kernel ran."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.norm = fuse(torch.nn.LayerNorm(3))
        self.seen = set()

    def training_step(self, batch, batch_idx):
        made = self.norm(self.net(batch[0]))
        self.seen.add((dispatch.settings.mode, "_Normalise" in type(made.grad_fn).__name__))
        return torch.nn.functional.cross_entropy(made, batch[1])


@pytest.fixture
def captures(monkeypatch):
    """Pretends that steps on a CPU can be captured; with "auto" they still run eagerly."""
    monkeypatch.setattr(kernel_choice, "reason_against", lambda *_: "")


@pytest.fixture
def kernels(kernel_device):
    norm_kernels.forget()
    yield
    norm_kernels.forget()


class Saves(Callback):
    """Saves after the third step."""

    def __init__(self, file):
        self.file = file

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.file)


def fit(steps, file=None, ckpt_path=None, **options):
    callbacks = [] if file is None else [Saves(file)]
    trainer, module = quiet_trainer(max_steps=steps, callbacks=callbacks, **options), Net()
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    assert dispatch.settings.mode == "eager"
    return module


def weights(module):
    return torch.cat([one.flatten() for one in module.parameters()])


def test_a_run_without_a_graph_weighs_the_host(captures, monkeypatch):
    assert fit(2).seen == {("eager", False)}
    monkeypatch.undo()
    assert fit(2, cuda_graph="auto").seen == {("eager", False)}  # a CPU cannot capture


def test_a_process_may_weigh_the_gpu_alone(monkeypatch):
    monkeypatch.setattr(dispatch, "settings", dispatch.ChoiceSettings())  # restored at the test's end
    set_kernel_choice("graph")
    module = Net()
    quiet_trainer(max_steps=2).fit(module, loader())
    assert dispatch.settings.mode == "graph"
    assert module.seen == {("graph", False)}


@pytest.mark.parametrize("kernel_device", ["forward"], indirect=True)
@pytest.mark.parametrize("begins", ["eager", "graph"])
def test_a_run_that_goes_on_keeps_its_choice_and_its_bits(kernels, captures, tmp_path, begins):
    asked = {"eager": False, "graph": "auto"}
    whole = {name: fit(6, cuda_graph=value) for name, value in asked.items()}
    assert [whole[name].seen for name in asked] == [{("eager", False)}, {("graph", True)}]
    assert not torch.equal(*map(weights, whole.values()))
    first = tmp_path / "first.ckpt"
    fit(3, first, cuda_graph=asked.pop(begins))
    (other,) = asked.values()
    module = fit(6, ckpt_path=first, cuda_graph=other)
    assert module.seen == whole[begins].seen
    assert torch.equal(weights(module), weights(whole[begins]))


def test_a_damaged_choice_is_refused(tmp_path):
    file = tmp_path / "a.ckpt"
    fit(3, file)
    checkpoint = torch.load(file, weights_only=True)
    assert checkpoint["loops"]["fit"]["kernel_choice"] == "eager"
    checkpoint["loops"]["fit"]["kernel_choice"] = "both"
    del checkpoint["checksum"]
    torch.save(checkpoint, file)
    with pytest.raises(CheckpointError, match=r"a\.ckpt: its loops\.fit\.kernel_choice is 'both'"):
        fit(6, ckpt_path=file)
    assert dispatch.settings.mode == "eager"
