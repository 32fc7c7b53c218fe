"""What tests/startup changes in interpreters that tests start: no import of torch._dynamo, and compiled code as ever."""

from __future__ import annotations

from tests.distributed.scripts import finish, start

TRAINS = """
import sys, torch
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

def step(x):
    optimizer.zero_grad()
    net(x).sum().backward()
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
"""


def test_training_imports_no_compiler_and_compiling_works(tmp_path):
    (tmp_path / "train.py").write_text(TRAINS + COMPILES)
    code, out, err = finish(start(tmp_path, "train.py"))
    assert code == 0, err
    assert out.splitlines() == ["-2.0 False True", "-2.0 True True"]
