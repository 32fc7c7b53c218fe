"""Trains a byte-level GPT on the standard library's source: ``python train.py --precision O2 --devices 2``, or under torchrun."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gpt import LanguageModel, SourceText

from fabricamp import Callback, Trainer, TrainingModule, seed_everything
from fabricamp.loggers import TensorBoardLogger


class Stopwatch(Callback):
    """Measures the seconds from the first batch of training to the last, without the start of the program."""

    seconds = 0.0

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        self.seconds = -time.perf_counter()

    def on_train_end(self, trainer: Trainer, module: TrainingModule) -> None:
        self.seconds += time.perf_counter()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--precision", default="O0", help="opt level O0 to O5, or a name such as 16-mixed")
    parser.add_argument("--strategy", default="auto", help="single, ddp, or auto: what fits the devices")
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
        callbacks=[stopwatch],
    )
    sizes = {name: getattr(options, name) for name in ("context", "layers", "width", "heads")}
    module = LanguageModel(options.optimizer, options.lr, **sizes)
    data = SourceText(options.batch_size, options.context)
    trainer.fit(module, datamodule=data)
    tokens = trainer.global_step * options.batch_size * options.context
    checkpoint, logs = trainer.checkpoint_callback.best_model_path, trainer.log_dir
    (result,) = trainer.test(module, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        title = f"GPT on Python's standard library, {options.precision}, {options.optimizer} optimizer"
        report(title, result["test_loss"], tokens / stopwatch.seconds, checkpoint, logs)
        print(f"What it writes by itself:\n\n{module.write('def ')}")


def report(title: str, loss: float, tokens_per_second: float, checkpoint: str, logs: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("test loss", f"{loss:.3f} nats per byte")
    table.add_row("tokens/s", f"{tokens_per_second:.0f}")
    table.add_row("checkpoint", shown(checkpoint))
    table.add_row("TensorBoard logs", shown(logs))
    table.add_row("open them with", f"{shown(Path(sys.executable).with_name('tensorboard'))} --logdir {shown(logs)}")
    Console().print(table)


def shown(path: Path | str) -> str:
    """Returns the path, relative to the current folder if it is inside it."""
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
