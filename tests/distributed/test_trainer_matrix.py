"""Every opt level on two ranks: both ranks have the weights of one process on the joined batch, and of a resumed run."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from fabricamp import TrainingModule
from tests.distributed.ranks import run_ranks
from tests.small import loader, quiet_trainer

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
ACCUMULATE = [1, 3]
CLIPS = [None, ("norm", 0.5), ("value", 0.02)]
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
}
MATRIX = list(itertools.product(LEVELS, ACCUMULATE, CLIPS, OPTIMIZERS))
# Each part contains every pair of options; each combination of level, accumulation and clipping is in one of the parts.
PARTS = [
    [
        one
        for one, (level, accumulate, clip, optimizer) in zip(
            MATRIX, itertools.product(*map(range, (6, 2, 3, 2))), strict=True
        )
        if (level + accumulate + clip) % 2 == part and optimizer == (level // 2 + clip // 2) % 2
    ]
    for part in range(2)
]

# The allowed distance of two runs, relative to the distance from the initial weights: sums of half gradients round differently.
TOLERANCE = {"O0": 2e-6, "O1": 0.002, "O2": 0.002, "O3": 0.03, "O4": 0.015, "O5": 0.015}


class Net(TrainingModule):
    def __init__(self, optimizer):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
        )
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


def flat(module):
    return torch.cat([value.flatten().double() for value in module.state_dict().values()])


def fitted(combination, strategy, seed, batch_size, *, max_epochs=2, ckpt_path=None, path=None):
    """Returns the weights before and after a fit of 4 or 8 batches an epoch; with 3 per step the last accumulation is shorter."""
    level, accumulate, clip, optimizer = combination
    torch.manual_seed(seed)
    module = Net(optimizer)
    before = flat(module)
    trainer = quiet_trainer(
        precision=level,
        strategy=strategy,
        devices="auto",
        max_epochs=max_epochs,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip and clip[1],
        gradient_clip_algorithm=clip[0] if clip else "norm",
    )
    save = [] if path is None else [trainer]
    if save:
        module.on_fit_end = lambda: trainer.save_checkpoint(path)
    trainer.fit(module, loader(32, batch_size), ckpt_path=ckpt_path)
    assert trainer.global_step == max_epochs * -(-4 // accumulate)
    return before, flat(module), trainer.skipped_steps


def on_two_ranks(strategy, matrix, folder):
    """Runs the matrix with a different seed on each rank; a part of it again, stopped after an epoch and resumed."""
    rank = dist.get_rank()
    weights, problems = {}, []
    for combination in matrix:
        index = MATRIX.index(combination)
        _, straight, skipped = fitted(combination, strategy, 100 * rank + index, 4)
        weights[combination] = straight, skipped
        if combination[1:3] not in ((3, None), (3, ("norm", 0.5))):
            continue
        path = folder / f"{index}.ckpt"
        fitted(combination, strategy, 100 * rank + index, 4, max_epochs=1, path=path)
        _, resumed, _ = fitted(combination, strategy, 7 + rank, 4, ckpt_path=path)
        if not torch.equal(straight, resumed):
            problems.append((combination, float((straight - resumed).abs().max())))
    return weights, problems


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("ddp", PARTS[0]), id="ddp"),
        pytest.param(("delayed_ddp", PARTS[1]), id="delayed_ddp"),
        pytest.param(("ddp", MATRIX), id="ddp, all", marks=pytest.mark.slow),
        pytest.param(("delayed_ddp", MATRIX), id="delayed_ddp, all", marks=pytest.mark.slow),
    ],
)
def ranks(request, tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_ranks(on_two_ranks, 2, *request.param, tmp_path_factory.mktemp("matrix"), timeout=280.0)


def test_both_ranks_end_with_the_same_bits(ranks):
    (first, _), (second, _) = ranks
    assert len(first) >= len(MATRIX) / 4
    assert [one for one in first if not torch.equal(first[one][0], second[one][0])] == []


def test_two_ranks_train_what_one_process_trains_on_the_joined_batch(ranks):
    weights, _ = ranks[0]
    far = {}
    for combination in weights:
        before, alone, skipped = fitted(combination, "single", MATRIX.index(combination), 8)
        together, skipped_together = weights[combination]
        moved = (alone - before).norm()
        apart = float((together - alone).norm() / moved)
        assert moved > 0.05, combination
        if apart > TOLERANCE[combination[0]] or skipped != skipped_together:
            far[combination] = apart, skipped, skipped_together
    assert far == {}


def test_a_resumed_run_has_the_bits_of_the_straight_one(ranks):
    assert [problems for _, problems in ranks] == [[], []]
