"""Compares the losses of a small GPT at every opt level with a hand-written fp32 loop; part of `end_to_end.py`."""

from __future__ import annotations

import statistics
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from examples.gpt.gpt import GPT, SourceText
from fabricamp import Trainer, TrainingModule
from fabricamp.optimizers import FusedAdam

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
ADAMW = {"lr": 3e-4, "weight_decay": 0.1}
CURVE_POINTS = 100


class Sizes(NamedTuple):
    """A network and its batches."""

    vocabulary: int
    context: int
    layers: int
    width: int
    heads: int
    batch: int

    def network(self, device: torch.device, seed: int = 0, **more) -> GPT:
        """Returns a new network on ``device``, with weights that depend on ``seed``."""
        torch.manual_seed(seed)
        with device:
            sizes = {"context": self.context, "layers": self.layers, "width": self.width, "heads": self.heads}
            return GPT(self.vocabulary, **sizes, **more)


def torch_loss(logits, targets):
    scores = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    return F.nll_loss(scores.flatten(0, 1), targets.flatten())


def loss_of(network, windows):
    return network(windows[:, :-1], windows[:, 1:])


class Lesson(NamedTuple):
    """The batches of all runs, in the same order for each run."""

    sizes: Sizes
    device: torch.device
    steps: int
    batches: list[tuple[torch.Tensor]]

    @classmethod
    def of(cls, sizes: Sizes, device: torch.device, steps: int) -> Lesson:
        """Returns batches from the text of the GPT example."""
        text = SourceText(context=sizes.context)
        text.setup("fit")
        (windows,) = text.train.tensors
        order = torch.randint(len(windows), (steps, sizes.batch), generator=torch.Generator().manual_seed(0))
        chosen = windows[order].long()
        chosen = chosen.pin_memory() if device.type == "cuda" else chosen
        return cls(sizes, device, steps, [(batch,) for batch in chosen.unbind()])

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Returns a schedule that rises over a tenth of the steps, then falls."""
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-3, total_steps=self.steps + 1, pct_start=0.1, cycle_momentum=False
        )


def twin(lesson: Lesson, seed: int = 0) -> list[float]:
    """Returns the losses of a hand-written fp32 loop."""
    network, losses = lesson.sizes.network(lesson.device, seed, loss=torch_loss), []
    optimizer = torch.optim.AdamW(network.parameters(), **ADAMW)
    schedule = lesson.schedule(optimizer)
    for (windows,) in lesson.batches:
        loss = loss_of(network, windows.to(lesson.device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


class Learner(TrainingModule):
    """Trains the network, and keeps its losses."""

    def __init__(self, lesson: Lesson):
        super().__init__()
        self.lesson = lesson
        self.network = lesson.sizes.network(lesson.device)
        self.losses = []

    def training_step(self, batch, batch_idx):  # noqa: D102
        loss = loss_of(self.network, batch[0])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):  # noqa: D102
        optimizer = FusedAdam(self.parameters(), **ADAMW)
        schedule = self.lesson.schedule(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def learnt(lesson: Lesson, level: str) -> list[float]:
    """Returns the losses of the same run by the Trainer."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="gpu" if lesson.device.type == "cuda" else "cpu",
        devices=1,
        precision=level,
        max_epochs=1,
        gradient_clip_val=1.0,
        **dict.fromkeys(off, False),
    )
    module = Learner(lesson)
    trainer.fit(module, lesson.batches)
    return torch.stack(module.losses).tolist()


def means(losses: list[float], size: int) -> list[float]:
    return [statistics.fmean(losses[start : start + size]) for start in range(0, len(losses), size)]


def curves(lesson: Lesson) -> list[dict]:
    """Returns one row per run; ``largest_gap`` compares means over 100 steps, without the first tenth of the run."""
    torch.set_float32_matmul_precision("highest")
    window = min(100, lesson.steps)
    runs = {"torch fp32": partial(twin, lesson), "torch fp32, other weights": partial(twin, lesson, seed=1)}
    runs |= {f"fabricamp {level}": partial(learnt, lesson, level) for level in LEVELS}
    rows, reference = [], []
    for name, run in runs.items():
        losses = run()
        reference = reference or losses
        behind = lesson.steps // 10
        pairs = zip(means(losses[behind:], window), means(reference[behind:], window), strict=True)
        final, over = statistics.fmean(losses[-window:]), statistics.fmean(reference[-window:])
        row = {"run": name, "final": final, "over_fp32": final - over, "largest_gap": max(abs(a - b) for a, b in pairs)}
        print(
            f"{name:34} last {window} steps {final:.4f} ({final - over:+.4f}), largest gap {row['largest_gap']:.4f}",
            flush=True,
        )
        rows.append({**row, "losses": means(losses, max(1, lesson.steps // CURVE_POINTS))})
    return rows
