"""Loops around Fabric: ``python fabric_program.py > fabric_printed.txt`` with Lightning records what they print there."""

import lightning as L
import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.wrappers import is_wrapped
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Counts:
    def __init__(self):
        self.steps = 0

    def on_step(self, loss):
        self.steps += 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.classes = 3

    def forward(self, x):
        return self.layers(x)


def sums(*modules):
    return " ".join(f"{float(p.detach().double().sum()):.7f}" for module in modules for p in module.parameters())


def accumulated(precision):
    """Two micro-batches a step, clipping, a schedule, a file that is loaded again."""
    counts = Counts()
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision, callbacks=[counts])
    fabric.launch()
    seed_everything(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    data = TensorDataset(torch.randn(32, 8), torch.randint(3, (32,)))
    loader = fabric.setup_dataloaders(DataLoader(data, 4, shuffle=True))
    for epoch in range(2):
        for number, (x, y) in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                loss = F.cross_entropy(model(x), y)
                fabric.backward(loss / 2)
            if number % 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                fabric.call("on_step", loss=loss)
        print(f"{precision} {epoch} {loss.item():.7f} {optimizer.param_groups[0]['lr']}")
    state = {"model": model, "optimizer": optimizer, "epoch": epoch}
    fabric.save(f"{precision}.ckpt", state, filter={"model": lambda name, _: "bias" not in name or "0" in name})
    print(sorted(torch.load(f"{precision}.ckpt", weights_only=True)["model"]))
    fabric.save(f"{precision}.ckpt", state)
    before = sums(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state["epoch"] = 7
    rest = fabric.load(f"{precision}.ckpt", state)
    print(sums(model) == before, before, state["epoch"], rest, counts.steps)
    print(is_wrapped(model), is_wrapped(optimizer), isinstance(optimizer, torch.optim.Optimizer), model.classes)
    print(list(model.state_dict()), len(loader), len(optimizer.state_dict()["state"]))
    print(model(x).dtype, fabric.device, fabric.world_size, fabric.global_rank, fabric.is_global_zero)


def gan(precision):
    """Two optimizers, set up in two calls, that step in turn."""
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=precision)
    fabric.seed_everything(4)
    generator, critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    first, second = torch.optim.Adam(generator.parameters(), 1e-2), torch.optim.SGD(critic.parameters(), 0.1, 0.9)
    generator, first = fabric.setup(generator, first)
    critic = fabric.setup_module(critic)
    second = fabric.setup_optimizers(second)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(48, 2)), 4, shuffle=True))
    loss_of = F.binary_cross_entropy_with_logits
    for (real,) in loader:
        second.zero_grad()
        scores = critic(real)
        fabric.backward(loss_of(scores, torch.ones_like(scores)))
        fake = generator(torch.randn(4, 4))
        scores = critic(fake.detach())
        fabric.backward(loss_of(scores, torch.zeros_like(scores)))
        second.step()
        first.zero_grad()
        scores = critic(fake)
        fabric.backward(loss_of(scores, torch.ones_like(scores)))
        first.step()
    with torch.no_grad():
        print("gan", precision, sums(generator, critic), f"{float(critic(fake).float().sum()):.7f}")


def main(fabric, word):
    with fabric.rank_zero_first():
        fabric.print(word, fabric.all_gather(torch.ones(2)).tolist(), fabric.all_reduce(torch.ones(2)).tolist())
    fabric.barrier()
    print(fabric.broadcast({"a": 1}), fabric.to_device([torch.ones(1), "b"])[1])


for name in ("32-true", "bf16-mixed", "64-true", "bf16-true"):
    accumulated(name)
    gan(name)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch(main, "launched")
