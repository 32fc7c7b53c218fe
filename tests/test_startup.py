"""What tests/startup changes in interpreters that tests start: modules that only compilers use are executed late, and work."""

from __future__ import annotations

import pytest

from tests.distributed.scripts import finish, start

TRAINS = """
import sys, torch
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel = torch.nn.parallel.DistributedDataParallel(net)

def step(x):
    optimizer.zero_grad()
    parallel(x).sum().backward()
    optimizer.step()
    return net.bias.detach().clone()

with torch.no_grad():
    net.bias.zero_()
print(step(torch.ones(4, 2)).item(), "torch._dynamo" in sys.modules, torch.is_grad_enabled())
"""

COMPILES = """
with torch.no_grad():
    net.bias.zero_()
print(torch.compile(step, backend="eager")(torch.ones(4, 2)).item(), "torch._dynamo" in sys.modules, torch.is_grad_enabled())
again = torch.nn.parallel.DistributedDataParallel(net)
print(parallel._use_python_reducer, again._use_python_reducer, torch._dynamo.utils.__name__)
torch.distributed.destroy_process_group()
"""


def test_training_imports_no_compiler_and_compiling_works(tmp_path):
    (tmp_path / "train.py").write_text(TRAINS + COMPILES)
    code, out, err = finish(start(tmp_path, "train.py"))
    assert code == 0, err
    assert out.splitlines() == ["-2.0 False True", "-2.0 True True", "False False torch._dynamo.utils"]


SHAPES = """
import gc, sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode

def executed(name):
    return type(sys.modules[name]) is type(sys)

print(torch.Generator().manual_seed(7).initial_seed(), torch.utils.data.RandomSampler([1, 2]).generator)
print(executed("torch._meta_registrations"), executed("torch.export"), "torch._decomp" in sys.modules, gc.isenabled())
with FakeTensorMode():
    print(tuple(torch.cdist(torch.ones(2, 3), torch.ones(4, 3)).shape))
print(executed("torch._meta_registrations"))
from torch.export.dynamic_shapes import Dim  # imports its package, which has not been executed
print(executed("torch.export"), Dim is torch.export.Dim)
print(torch.export.export(torch.nn.Linear(2, 1), (torch.ones(4, 2),)).module()(torch.ones(4, 2)).shape[0])
"""


def test_shapes_and_export_are_loaded_where_they_are_used(tmp_path):
    (tmp_path / "shapes.py").write_text(SHAPES)
    code, out, err = finish(start(tmp_path, "shapes.py"))
    assert code == 0, err
    assert out.splitlines() == ["7 None", "False False False True", "(2, 4)", "True", "True True", "4"]


METRICS = """
import sys, torch, torchmetrics
accuracy = torchmetrics.classification.MulticlassAccuracy(3)
accuracy.update(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]))
print(accuracy.compute().item(), [name for name in ("transformers", "matplotlib", "scipy") if name in sys.modules])
"""


def test_metrics_import_no_packages_for_text_plots_and_audio(tmp_path):
    pytest.importorskip("torchmetrics", reason="needs the package torchmetrics")
    (tmp_path / "metrics.py").write_text(METRICS)
    code, out, err = finish(start(tmp_path, "metrics.py"))
    assert code == 0, err
    assert out == "1.0 []\n"
