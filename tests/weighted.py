"""Sequences of very different lengths, a module whose loss is (sum, weight), and the same training by hand in float64."""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional as F

from fabricamp import OptLevel, TrainingModule
from fabricamp.optimizers import FusedAdam, FusedSGD
from tests.small import quiet_trainer

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
ACCUMULATE = [1, 3]
CLIPS = [None, ("norm", 0.3), ("value", 0.02)]
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
    "fused_sgd": lambda parameters: FusedSGD(parameters, lr=0.1, momentum=0.9),
    "fused_adam": lambda parameters: FusedAdam(parameters, lr=0.01, eps=1e-3, weight_decay=0.01),
}
MATRIX = list(itertools.product(LEVELS, ACCUMULATE, CLIPS, OPTIMIZERS))
# Every pair of options, without torch's Adam at O3: its squares would be 0 in half precision.
PAIRS = [
    one
    for one, (a, b, c, d) in zip(MATRIX, itertools.product(*map(range, (6, 2, 3, 4))), strict=True)
    if not (a + 3 * b + 2 * c + d) % 6 and (one[0], one[3]) != ("O3", "adamw")
]
BY_HAND = {"fused_sgd": OPTIMIZERS["sgd"], "fused_adam": OPTIMIZERS["adamw"]}
# The allowed distance of two runs, relative to the distance from the initial weights: half gradients round differently.
TOLERANCE = {"O0": 1e-5, "O1": 0.03, "O2": 0.03, "O3": 0.03, "O4": 0.08, "O5": 0.08}


def batches(rank=0, count=4):
    """Returns micro-batches of tokens and their classes (-100: padding), with 3 to 64 valid tokens."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for number in range(count):
        x = torch.randn(4, 16, 8, generator=generator)
        y = x[..., :3].argmax(-1)
        valid = (3, 64, 9, 30)[(number + rank) % 4]
        y.view(-1)[torch.randperm(64, generator=generator)[valid:]] = -100
        found.append((x, y))
    return found


class Tokens(TrainingModule):
    def __init__(self, optimizer="sgd", net=None):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
            )
        self.optimizer = optimizer

    def summed(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), reduction="sum"), (y >= 0).sum()

    def training_step(self, batch, batch_idx):
        return self.summed(batch)

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


def flat(module):
    return torch.cat([value.flatten().double() for value in module.state_dict().values()])


def fitted(combination, strategy, data, *, module=None, ckpt_path=None, **options):
    """Returns the weights before and after two epochs of ``data``; with 3 micro-batches per step the last step is shorter."""
    level, accumulate, clip, optimizer = combination
    module = module or Tokens(optimizer)
    before = flat(module)
    trainer = quiet_trainer(
        precision=OptLevel(level, max_loss_scale=256.0) if level in ("O1", "O2") else level,  # no step is skipped
        strategy=strategy,
        devices="auto",
        max_epochs=2,
        use_distributed_sampler=False,  # each rank has its own data
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip and clip[1],
        gradient_clip_algorithm=clip[0] if clip else "norm",
        **options,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None), ckpt_path=ckpt_path)
    return before, flat(module)


def by_hand(combination, of_ranks, *, carries=False):
    """Returns the weights after the same training in float64 on the joined batches of all ranks, in which no step is skipped.

    ``carries``: an incomplete accumulation continues in the next epoch.
    """
    _, accumulate, clip, name = combination
    module = Tokens(name).double()
    optimizer = BY_HAND.get(name, OPTIMIZERS.get(name))(module.parameters())
    epochs = [[data * 2 for data in of_ranks]] if carries else [of_ranks] * 2
    for epoch in epochs:
        ends = (
            range(accumulate, len(epoch[0]) + 1, accumulate)
            if carries
            else range(accumulate, len(epoch[0]) + accumulate, accumulate)
        )
        for end in ends:
            window = [one for data in epoch for one in data[end - accumulate : end]]
            joined = torch.cat([x for x, _ in window]).double(), torch.cat([y for _, y in window])
            total, weight = module.summed(joined)
            optimizer.zero_grad()
            (total / weight).backward()
            if clip is not None and clip[0] == "norm":
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip[1])
            elif clip is not None:
                torch.nn.utils.clip_grad_value_(module.parameters(), clip[1])
            optimizer.step()
    return flat(module)


def apart(before, after, wanted):
    """Returns the distance of ``after`` from ``wanted``, relative to the distance from ``before``."""
    return float((after - wanted).norm() / (wanted - before).norm())
