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

WRAPS = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
several = torch.nn.parallel.DistributedDataParallel(net)
optimizer.zero_grad()
several(torch.ones(4, 2)).sum().backward()
print(net.bias.grad.item(), "torch._dynamo" in sys.modules, "_dynamo" in vars(torch))
"""

COMPILES = """
with torch.no_grad():
    net.bias.zero_()
print(torch.compile(step, backend="eager")(torch.ones(4, 2)).item(), "torch._dynamo" in sys.modules, torch.is_grad_enabled())
compiled = torch.compile(several, backend="eager")
optimizer.zero_grad()
compiled(torch.ones(4, 2)).sum().backward()
print(net.bias.grad.item())
again = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
print(again._use_python_reducer)
dist.destroy_process_group()
"""


def test_training_imports_no_compiler_and_compiling_works(tmp_path):
    (tmp_path / "train.py").write_text(TRAINS + WRAPS + COMPILES)
    code, out, err = finish(start(tmp_path, "train.py"))
    assert code == 0, err
    trains, wraps, *compiles = out.splitlines()
    assert trains == "-2.0 False True"
    assert wraps == "4.0 False False"
    assert compiles == ["-2.0 True True", "4.0", "False"]
