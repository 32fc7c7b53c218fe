"""Export of a module's forward to TorchScript and ONNX: equal values, and the module is not changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fabricamp import ConfigError
from tests.small import Classifier, loader, quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


class Net(Classifier):
    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)
        self.factor = 3.0

    @property
    def twice(self) -> float:
        return 2 * self.factor

    def forward(self, x):
        return self.drop(self.net(x)) * self.twice

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch.float() if isinstance(batch, torch.Tensor) else batch


@pytest.mark.parametrize("precision", [None, "O0", "O2", "bf16-true"])
@pytest.mark.parametrize("method", ["script", "trace"])
def test_the_script_gives_what_the_module_gives(method, precision, tmp_path):
    module, x = Net(), torch.randn(5, 8)
    trainer = None
    if precision:
        trainer = quiet_trainer(max_steps=3, precision=precision)
        trainer.fit(module, loader())
        trainer_before = module.trainer
    module.train()
    module.net.eval()
    modes = [one.training for one in module.modules()]
    path = tmp_path / "exported" / "net.pt"
    script = module.to_torchscript(path, method=method, example_inputs=torch.zeros(1, 8, dtype=torch.float64))
    assert isinstance(script, torch.jit.ScriptModule)
    assert [one.training for one in module.modules()] == modes
    assert trainer is None or module.trainer is trainer_before is trainer
    expected = module.eval()(x)
    assert torch.equal(script(x), expected)
    assert torch.equal(torch.jit.load(path)(x), expected)
    if precision is None:
        with pytest.raises(ConfigError, match="is not attached"):
            _ = module.trainer


def test_what_cannot_work_is_refused():
    module = Net()
    with pytest.raises(ConfigError, match="example_inputs=, or set self.example_input_array"):
        module.to_torchscript(method="trace")
    with pytest.raises(ConfigError, match="did you mean 'trace'"):
        module.to_torchscript(method="traced")
    module.example_input_array = torch.ones(1, 8)
    assert module.to_torchscript(method="trace")(torch.ones(2, 8)).shape == (2, 3)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("precision", [None, "O2"])
def test_the_onnx_file_gives_what_the_module_gives(precision, tmp_path):
    reference = pytest.importorskip("onnx.reference", reason="needs the package onnx")
    pytest.importorskip("onnxscript", reason="needs the package onnxscript")
    module, x = Net(), torch.randn(2, 8)
    module.example_input_array = torch.ones(2, 8)
    if precision:
        quiet_trainer(max_steps=3, precision=precision).fit(module, loader())
    module.train()
    path = tmp_path / "exported" / "net.onnx"
    assert isinstance(module.to_onnx(path), torch.onnx.ONNXProgram)
    assert module.training
    assert module.net.training
    session = reference.ReferenceEvaluator(str(path))
    (found,) = session.run(None, {session.input_names[0]: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module.eval()(x))


def test_what_onnx_needs_is_named(monkeypatch):
    with pytest.raises(
        ConfigError, match="to_onnx takes an input.*give input_sample=, or set self.example_input_array"
    ):
        Net().to_onnx("x.onnx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match="pip install onnxscript"):
        Net().to_onnx("x.onnx", torch.ones(1, 8))
