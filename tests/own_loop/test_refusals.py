"""What a Loop cannot do is refused by name, before the first batch."""

from __future__ import annotations

import pytest
import torch

from fabricamp import ConfigError, CudaGraph, Loop
from fabricamp.errors import UnknownArgumentError
from fabricamp.strategies import FaultTolerant
from tests.small import loader

CPU = {"accelerator": "cpu", "devices": 1}


def linear():
    model = torch.nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_clip_val": 1.0}, r"gradient_clip_val.*prepare\(\.\.\., clip=1\.0\)"),
        ({"max_epochs": 3}, "max_epochs.*your loop"),
        ({"precison": "O1"}, "'precison'.*'precision'"),
        ({"nan_policy": "stop"}, "nan_policy='stop'.*'raise'"),
        ({"precision": "O9"}, "O9"),
        ({"strategy": FaultTolerant(groups=2, group=0)}, "strategy='fault_tolerant': replicas join"),
        ({"cuda_graph": CudaGraph(steps=4, required=False)}, r"CudaGraph\(steps=4\).*steps=1"),
        ({"cuda_graph": True}, "needs a CUDA GPU"),
        ({"devices": 2}, r"devices=2.*torchrun --nproc_per_node=2.*devices=1"),
    ],
)
def test_arguments(options, words):
    with pytest.raises(ConfigError, match=words):
        Loop(**{**CPU, **options})


def test_unknown_arguments_are_type_errors():
    with pytest.raises(UnknownArgumentError, match="Loop has no argument 'callbacks': call in your loop"):
        Loop(**CPU, callbacks=[])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (lambda m, o: (m,), "1 modules and 0 optimizers"),
        (lambda m, o: (o,), "0 modules and 1 optimizers"),
        (lambda m, o: (m, torch.optim.LBFGS(m.parameters())), "LBFGS calls the forward itself"),
        (lambda m, o: (m, o, torch.optim.lr_scheduler.StepLR(o, 1)), "StepLR; call its step"),
        (lambda m, o: (m, o, loader()), "DataLoader; give loaders to prepare_data"),
        (lambda m, o: (torch.nn.Linear(1, 1), o), "SGD has parameters of a module that prepare was not given"),
    ],
)
def test_parts(parts, words):
    with pytest.raises(ConfigError, match=words):
        Loop(**CPU).prepare(*parts(*linear()))


def test_steps_in_parts_of_accumulation():
    run = Loop(**CPU, accumulate_grad_batches=2)
    model, _ = run.prepare(*linear())
    with pytest.raises(ConfigError, match=r"run\.accumulate"):
        run.forward(model, torch.ones(1, 8))


def test_order():
    run = Loop(**CPU)
    for call in (lambda: run.step(len, 1), lambda: run.prepare_data(loader()), lambda: run.save("last")):
        with pytest.raises(ConfigError, match="comes after prepare"):
            call()
    model, _ = run.prepare(*linear())
    with pytest.raises(ConfigError, match="prepare was called before"):
        run.prepare(*linear())
    run.step(lambda b: model(b[0]).sum(), next(iter(loader())))
    with pytest.raises(ConfigError, match="prepare_data comes once, before restore and the first step"):
        run.prepare_data(loader())
    two = Loop(**CPU)
    both = [linear(), linear()]
    two.prepare(both[0][0], both[1][0], both[0][1], both[1][1])
    with pytest.raises(ConfigError, match="save within the function of step"):
        two.step(lambda b: two.save("last"), next(iter(loader())))
    run.close()
    with pytest.raises(ConfigError, match="after close"):
        run.step(lambda b: model(b[0]).sum(), next(iter(loader())))


@pytest.mark.parametrize("returned", [1.0, "loss", torch.ones(2, requires_grad=True), torch.ones(())])
def test_what_a_function_returns(returned):
    run = Loop(**CPU)
    run.prepare(*linear())
    with pytest.raises(ConfigError, match="step's function"):
        run.step(lambda b: returned, 0)
