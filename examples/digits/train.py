"""Trains on the handwritten digits: ``python train.py --precision O1 --devices 2``, or under torchrun."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from digits import DigitsClassifier, DigitsData

from fabricamp import Trainer, seed_everything
from fabricamp.callbacks import LearningRateMonitor, ModelCheckpoint
from fabricamp.loggers import TensorBoardLogger
from fabricamp.runs import plot


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--precision", default="O0", help="opt level O0 to O5, or a name such as 16-mixed")
    parser.add_argument("--strategy", default="auto", help="single, ddp, delayed_ddp, or auto: what fits the devices")
    parser.add_argument("--devices", default="auto", help="how many processes; under torchrun it decides")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, or auto: a GPU where there is one")
    parser.add_argument("--max-epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--optimizer", default="torch", help="torch: its SGD, or fused: FusedAdam")
    parser.add_argument(
        "--lr", type=float, help="the highest learning rate of the schedule (None: what suits the optimizer)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", default="runs", help="where logs and checkpoints go")
    return parser.parse_args()


def main() -> None:
    options = parse()
    seed_everything(options.seed)
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=options.strategy,
        precision=options.precision,
        max_epochs=options.max_epochs,
        log_every_n_steps=10,
        default_root_dir=options.folder,
        logger=TensorBoardLogger(options.folder, name="digits"),
        callbacks=[
            LearningRateMonitor(),
            ModelCheckpoint(filename="{step}", monitor="val_accuracy", mode="max"),
        ],
    )
    module = DigitsClassifier(lr=options.lr, optimizer=options.optimizer)
    data = DigitsData(batch_size=options.batch_size)
    trainer.fit(module, datamodule=data)
    checkpoint = trainer.checkpoint_callback.best_model_path
    logs = trainer.log_dir
    (result,) = trainer.test(module, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        report(result["test_accuracy"], checkpoint, logs, options.precision)
        plot([logs], metrics=["train_loss_step", "val_accuracy"])
        tell_what_is_next(logs)


def report(accuracy: float, checkpoint: str, logs: str, precision: str) -> None:
    print("", f"Handwritten digits, {precision}", sep="\n")
    rows = {
        "test accuracy": f"{accuracy:.2%}",
        "best checkpoint": shown(checkpoint),
        "TensorBoard logs": shown(logs),
        "open them with": f"{shown(Path(sys.executable).with_name('tensorboard'))} --logdir {shown(logs)}",
    }
    for label, value in rows.items():
        print(f"  {label:18}{value}")


def tell_what_is_next(logs: str) -> None:
    command = shown(Path(sys.executable).with_name("fabricamp"))
    print("", "Next, all curves of this run, or of several runs:", sep="\n")
    print(f"  {command} plot {shown(logs)}")
    print("and in fifteen minutes a model of your own:")
    print(f"  {command} help tutorial")


def shown(path: Path | str) -> str:
    """Returns the path, relative to the current folder if it is inside it."""
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
