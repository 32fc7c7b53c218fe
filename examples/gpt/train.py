"""Teaches one thing: a network that no process builds whole is sharded, and its run goes on at another number of processes.

``python train.py --strategy fsdp --devices 2`` trains a byte-level GPT on the standard library's source on two processes, and
``python train.py --devices 1 --resume`` goes on with that run on one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gpt import LanguageModel, SourceText

from fabricamp import Callback, Trainer, TrainingModule, seed_everything
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.loggers import TensorBoardLogger
from fabricamp.runs import plot


class Stopwatch(Callback):
    """Measures seconds and steps from the first batch of training to the last, without the start of the program."""

    seconds = 0.0
    steps = 0

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        self.seconds = -time.perf_counter()
        self.steps = -trainer.global_step

    def on_train_end(self, trainer: Trainer, module: TrainingModule) -> None:
        self.seconds += time.perf_counter()
        self.steps += trainer.global_step


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--precision", default="O0", help="opt level O0 to O5, or a name such as 16-mixed")
    parser.add_argument("--strategy", default="auto", help="single, ddp, fsdp, or auto: what fits the devices")
    parser.add_argument("--devices", default="auto", help="how many processes; under torchrun it decides")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, or auto: a GPU where there is one")
    parser.add_argument("--optimizer", default="fused", help="fused: FusedAdam, or torch: its AdamW")
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="windows a step, of all processes together")
    parser.add_argument("--context", type=int, default=128, help="bytes in a window")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate of the schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default="runs", help="where logs and checkpoints go")
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="resume the furthest checkpoint in --folder")
    parser.add_argument("--picture", help="draw the losses of all runs in --folder into this .png or .svg file")
    return parser.parse_args()


def main() -> None:
    options = parse()
    seed_everything(options.seed)
    stopwatch = Stopwatch()
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=options.strategy,
        precision=options.precision,
        max_steps=options.max_steps,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir=options.folder,
        logger=TensorBoardLogger(options.folder, name="gpt"),
        callbacks=[stopwatch, ModelCheckpoint(every=f"{options.save_every} steps")],
    )
    sizes = {name: getattr(options, name) for name in ("context", "layers", "width", "heads")}
    module = LanguageModel(options.optimizer, options.lr, **sizes, meta=options.strategy == "fsdp")
    data = SourceText(options.batch_size, options.context)
    trainer.fit(module, datamodule=data, ckpt_path="auto" if options.resume else None)
    tokens = stopwatch.steps * options.batch_size * options.context
    checkpoint, logs = trainer.checkpoint_callback.best_model_path, trainer.log_dir
    (result,) = trainer.test(module, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        title = f"GPT on Python's standard library, {options.precision}, {options.optimizer} optimizer"
        report(title, result["test_loss"], tokens / stopwatch.seconds, checkpoint, logs)
        print(f"What it writes by itself:\n\n{module.write('def ')}")
        if options.picture:
            runs = sorted(Path(options.folder, "gpt").glob("version_*"))
            plot(runs, metrics=["train_loss"], out=options.picture)


def report(title: str, loss: float, tokens_per_second: float, checkpoint: str, logs: str) -> None:
    print("", title, sep="\n")
    rows = {
        "test loss": f"{loss:.3f} nats per byte",
        "tokens/s": f"{tokens_per_second:.0f}",
        "checkpoint": shown(checkpoint),
        "TensorBoard logs": shown(logs),
        "open them with": f"{shown(Path(sys.executable).with_name('tensorboard'))} --logdir {shown(logs)}",
    }
    for label, value in rows.items():
        print(f"  {label:18}{value}")


def shown(path: Path | str) -> str:
    """Returns the path, relative to the current folder if it is inside it."""
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
