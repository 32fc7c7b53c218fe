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


class Cache(nn.Module):
    """Has a buffer that the program replaces after setup: it keeps its dtype."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return [self.layer(x) * self.scale, x]


def agent(precision):
    """Networks that are set up one by one and compute before they have optimizers, a parameter of no module, a later network."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    fabric.seed_everything(6)
    with fabric.init_module(empty_init=True):
        empty = nn.Linear(4, 2)
    with fabric.init_module():
        actor, critic = Cache(), nn.Linear(4, 2)
    with fabric.init_tensor():
        print(precision, empty.weight.dtype, torch.ones(1).dtype)
    actor, critic = fabric.setup_module(actor), fabric.setup_module(critic)
    actor.scale = torch.tensor([0.3, 1.7], dtype=torch.float32)
    x = torch.randn(8, 4)
    with torch.no_grad():
        for output in actor(x):  # the second is the input, cast to the precision and back
            print(precision, output.dtype, f"{float(output.double().sum()):.7f}")
    temperature = nn.Parameter(torch.zeros(1))
    first = fabric.setup_optimizers(torch.optim.Adam(actor.parameters(), 0.1))
    second, third = fabric.setup_optimizers(
        torch.optim.Adam(critic.parameters(), 0.1), torch.optim.SGD([temperature], 0.1)
    )
    for _ in range(3):
        for optimizer, loss in (
            (second, lambda: critic(x).square().mean()),
            (first, lambda: (actor(x)[0] - critic(x)).square().mean()),
            (third, lambda: (temperature * actor(x)[0].detach().mean()).square().mean() + temperature.sum()),
        ):
            optimizer.zero_grad()
            fabric.backward(loss())
            optimizer.step()
    later = nn.Linear(4, 1)
    later, fourth = fabric.setup(later, torch.optim.SGD(later.parameters(), 0.1))
    fabric.backward(later(x).mean())
    fourth.step()
    print(precision, sums(actor, critic, later), f"{float(temperature):.7f}", actor.device)


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def on_epoch(self, number):
        self.logger.log_metrics({"number": number}, 7)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Rows:
    def log_metrics(self, metrics, step=None):
        print("logged", {name: round(value, 6) for name, value in metrics.items()}, step)


class Hooks:
    def on_after_setup(self, fabric, module):
        print("set up", type(module.module).__name__)

    def on_after_optimizer_step(self, strategy, optimizer):
        print("stepped", type(optimizer).__name__)


def lightning_module():
    """A LightningModule in a loop around Fabric: its loggers, its steps, callbacks."""
    fabric = Fabric(accelerator="cpu", devices=1, loggers=Rows(), callbacks=[Hooks()])
    fabric.seed_everything(8)
    module = Lit()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    for number in range(2):
        optimizer.zero_grad()
        fabric.backward(model.training_step(torch.randn(3, 4)))
        optimizer.step()
        fabric.call("on_epoch", number)
    fabric.log("number", torch.tensor([3.0]))
    print(sums(module))


def main(fabric, word):
    with fabric.rank_zero_first():
        fabric.print(word, fabric.all_gather(torch.ones(2)).tolist(), fabric.all_reduce(torch.ones(2)).tolist())
    numbers = fabric.all_gather({"a": 2, "b": [0.5], "c": "word"})
    print(numbers["a"] + 1, numbers["b"][0].sum(), numbers["c"], fabric.all_reduce(3.5).item())
    fabric.barrier()
    print(fabric.broadcast({"a": 1}), fabric.to_device([torch.ones(1), "b"])[1])


for name in ("32-true", "bf16-mixed", "64-true", "bf16-true"):
    accumulated(name)
    gan(name)
    agent(name)
gan("16-mixed")
gan("16-true")
lightning_module()
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch(main, "launched")
