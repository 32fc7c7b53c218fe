"""One net and its data, trained by the Trainer and by a Loop with the same options, and what is compared of both."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fabricamp import Loop, TrainingModule
from fabricamp.optimizers import FusedAdam, FusedSGD
from tests.small import loader, quiet_trainer

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
    "fused_adam": lambda parameters: FusedAdam(parameters, lr=0.01, eps=1e-3),
    "fused_sgd": lambda parameters: FusedSGD(parameters, lr=0.1, momentum=0.9),
}
NAMES_OF_LOOP = {"gradient_clip_val": "clip", "gradient_clip_algorithm": "clip_algorithm"}


def new_net(dropout=0.1):
    torch.manual_seed(3)
    draws = [torch.nn.Dropout(dropout)] if dropout else []
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), *draws, torch.nn.Linear(16, 3)
    )


class Net(TrainingModule):
    def __init__(self, optimizer, dropout):
        super().__init__()
        self.model = new_net(dropout)
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch[0]).float(), batch[1])

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


def batches(samples=28):
    return loader(samples, 4, shuffle=True)


def by_trainer(optimizer, *, epochs=2, dropout=0.1, **options):
    """Returns the state after the last step of a fit."""
    module = Net(optimizer, dropout)
    trainer = quiet_trainer(max_epochs=epochs, num_sanity_val_steps=0, **options)
    found = []
    module.on_train_epoch_end = lambda: found.append(state_of(module.model, trainer.optimizers, trainer))
    trainer.fit(module, batches())
    return found[-1]


def prepared(optimizer, *, dropout=0.1, **options):
    """Returns a Loop with its net, optimizer and batches."""
    of_prepare = {NAMES_OF_LOOP[name]: options.pop(name) for name in list(options) if name in NAMES_OF_LOOP}
    model = new_net(dropout)
    run = Loop(**{"accelerator": "cpu", "devices": 1, **options})
    model, made = run.prepare(model, OPTIMIZERS[optimizer](model.parameters()), **of_prepare)
    return run, model, made, run.prepare_data(batches())


def by_loop(optimizer, *, epochs=2, **options):
    """Returns the state after a loop over as many epochs."""
    run, model, made, train = prepared(optimizer, **options)
    with run:
        for _ in range(epochs):
            for batch in train:
                run.step(lambda b: F.cross_entropy(model(b[0]).float(), b[1]), batch)
        return state_of(model, [made], run._trainer)


def state_of(model, optimizers, trainer):
    """Returns copies of weights, buffers, the optimizers' states and the precision's, and the counters."""
    precision = trainer.precision_plugin
    return copied(
        {
            "weights": {name: local(value) for name, value in model.state_dict().items()},
            "optimizers": [one.state_dict()["state"] for one in optimizers],
            "masters": [[local(p) for group in one.param_groups for p in group["params"]] for one in optimizers],
            "amp": precision.state_dict(),
            "steps": trainer.global_step,
        }
    )


def local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def copied(value):
    if isinstance(value, torch.Tensor):
        return local(value).detach().clone()
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, list | tuple) else value


def difference(first, second, path=""):
    """Returns the path of the first value that differs in any bit; empty if none does."""
    if isinstance(first, torch.Tensor):
        same = isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
        return "" if same else path or "the value"
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return f"{path}: {sorted(map(str, first))} and {sorted(map(str, second))}"
        return next((d for key in first if (d := difference(first[key], second[key], f"{path}[{key!r}]"))), "")
    if isinstance(first, list):
        if len(first) != len(second):
            return f"{path}: lengths"
        pairs = enumerate(zip(first, second, strict=True))
        return next((d for number, pair in pairs if (d := difference(*pair, f"{path}[{number}]"))), "")
    return "" if first == second else f"{path}: {first!r} and {second!r}"
