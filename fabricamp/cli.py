"""The command ``fabricamp``: runs from a configuration file, plots of runs, and a check of the machine."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fabricamp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    FabricampError,
    MissingCheckpointError,
    nearest,
)
from fabricamp.messages import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")

RUNS = {
    "fit": "train, from the start or resumed from ckpt_path",
    "validate": "run the validation loop once",
    "test": "run the test loop once",
    "predict": "run predict_step over the data and save its outputs as predictions.pt beside the logs",
}

LOADERS = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
"""The loaders that each command needs."""

OVERVIEW = """\
A PyTorch trainer.  A run is described by a YAML file:

  seed: 1
  trainer:                        # arguments of fabricamp.Trainer
    max_epochs: 20
    precision: O1
    callbacks:
      - _target_: fabricamp.callbacks.EarlyStopping
        monitor: val_loss
  module:                         # your TrainingModule, and its arguments
    _target_: my_package.MyModule
    lr: 1e-3
  data:                           # your DataModule; leave it out where the module has the loaders
    _target_: my_package.MyData
    batch_size: ${variables.batch}
  variables:                      # your own values, for ${...}
    batch: 64
"""

_PLAN = "tell the memory that a fit takes on a GPU, on any machine and before the first step, and what would take less"

_BENCH = "measure where the time of a batch goes: data, host, forward, backward, exchange, update; on a GPU as a CUDA graph too"

EXAMPLES = """\
examples:
  fabricamp fit config.yaml
  fabricamp fit config.yaml trainer.precision=O1 trainer.devices=2 module.lr=3e-4
  fabricamp fit config.yaml trainer.callbacks.0.patience=5 'trainer.devices=[0, 1]'
  fabricamp fit config.yaml ckpt_path=auto            (resumes from the last checkpoint, if there is one)
  fabricamp test config.yaml ckpt_path=best           (or last, or the path of a checkpoint)
  fabricamp predict config.yaml ckpt_path=best --json (predictions as JSON, alone on stdout)
  fabricamp bench config.yaml trainer.precision=O1 --out step.png
  fabricamp plan config.yaml --card H200              (needs no GPU)
  fabricamp plot fabricamp_logs/version_0 fabricamp_logs/version_1 --out both.png
  fabricamp runs fabricamp_logs                       (the runs in this folder, and how they ended)
  fabricamp verify train.py --lr 0.1                  (is a run that was killed and resumed bitwise equal)
  fabricamp export fabricamp_logs/version_0/checkpoints/epoch=19-step=400.ckpt --to weights.safetensors
  fabricamp config convert old.yaml --to config.yaml  (from a configuration of LightningCLI)
  fabricamp doctor
  fabricamp doctor --measure                          (on a GPU that the package has no measurements of)
  fabricamp help slow-data                            (a page of the documentation; without a word, the list of them)

exit codes: 0 done, 2 a mistake in the command or the configuration, 1 any other failure, 130 after Ctrl-C
"""


_CODES: dict[type[BaseException], int] = {
    ConfigError: 2,
    MissingCheckpointError: 2,
    CheckpointNotFoundError: 2,
    CheckpointError: 1,
}
"""The errors that a command shows in one line without a traceback, and their exit codes; the first class that fits counts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser, commands = _parsers()
    if not arguments:
        parser.print_help()
        return 2
    try:
        _check_words(parser, commands, *arguments)
        # Unknown options are passed as overrides: the error of an override says how to write one.
        options, unknown = parser.parse_known_args(arguments)
        if options.command in RUNS:
            as_json = options.command == "predict" and options.json
            redirected = _prints_to_stderr() if as_json else contextlib.nullcontext()
            with redirected as stdout:
                predictions = _run(options.command, options.config, [*options.overrides, *unknown], stdout)
            # A sys.stdout of pytest or a notebook may have no descriptor, so the JSON goes through the object.
            if predictions is not None:
                print(json.dumps({"predictions": predictions}, allow_nan=False))
            return 0
        if options.command == "bench":
            return _measure(options, unknown)
        if options.command == "plan":
            return _plan(options, unknown)
        if unknown:
            taken = (
                "--measure alone" if options.command == "doctor" else f"what `fabricamp {options.command} --help` shows"
            )
            parser.error(f"{options.command} takes {taken}, given: {' '.join(unknown)}")
        actions = {
            "plot": _plot,
            "runs": _list_runs,
            "verify": _verify,
            "export": _export,
            "config": _convert,
            "doctor": _doctor,
            "help": _show_page,
        }
        return actions[options.command](options)
    except (ConfigError, CheckpointError) as error:
        return _explain(error)
    except KeyboardInterrupt:
        # The Trainer has reported an interrupted run already; elsewhere, as during imports, there is nothing to report.
        return 128 + signal.SIGINT


def _check_words(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], command: str, *words: str
) -> None:
    """Raises :class:`ConfigError` for an unknown command, or an option that is nearly one of its own; argparse tells of others."""
    if command.startswith("-"):
        _check_option("fabricamp", command, parser)
        return
    if command not in commands:
        raise ConfigError(f"{command!r} is not a command{nearest(command, commands)} (known: {', '.join(commands)})")
    chosen = commands[command]
    for before, word in pairwise(("", *words)):
        is_script = command == "verify" and not word.startswith("-") and before not in chosen._option_string_actions
        if word == "--" or is_script:  # what follows a script are its own options
            return
        _check_option(command, word, chosen)


def _check_option(where: str, word: str, parser: argparse.ArgumentParser) -> None:
    known = parser._option_string_actions
    name = word.partition("=")[0]
    if name.startswith("-") and name not in known and (hint := nearest(name, known)):
        raise ConfigError(f"{where} has no option {name!r}{hint}")


def _parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Returns the parser of the command line, and that of each command by its name."""
    from fabricamp import __version__

    parser = argparse.ArgumentParser(
        prog="fabricamp",
        description=OVERVIEW,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fabricamp {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, summary in (*RUNS.items(), ("bench", _BENCH), ("plan", _PLAN)):
        command = _add_command(commands, name, summary, epilog=_examples_of(name), add_help=False)
        command.add_argument("config", type=Path, help="the YAML file")
        about = "show this, the Trainer's arguments and, after a YAML file, those of all its classes"
        command.add_argument("-h", "--help", action=_RunHelp, help=about)
        command.add_argument(
            "overrides",
            nargs="*",
            default=[],
            metavar="key=value",
            help="values that replace, or are added to, those of the file: trainer.max_epochs=3, module.lr=1e-3, ckpt_path=FILE",
        )
        if name == "predict":
            about = "write predictions as one JSON to stdout, all else to stderr, and no predictions.pt; nan and inf are null"
            command.add_argument("--json", action="store_true", help=about)
        if name == "bench":
            command.add_argument("--steps", type=int, default=100, help="how many are measured; 100 by default")
            command.add_argument("--out", metavar="FILE", help="a .png, .svg or .pdf file to draw into too")
        if name == "plan":
            about = "the GPU, such as H200; without it the present one"
            command.add_argument("--card", metavar="NAME", help=about)
            command.add_argument("--json", action="store_true", help="write the figures as one JSON to stdout")
    _add_plot(commands)
    _add_runs(commands)
    _add_verify(commands)
    _add_export(commands)
    _add_config(commands)
    _add_doctor(commands)
    _add_help(commands)
    return parser, commands.choices


def _add_command(
    commands: Any, name: str, about: str, epilog: str | None = None, *, add_help: bool = True
) -> argparse.ArgumentParser:
    # Filled here: the formatter of a command with an epilog leaves lines as they are.
    description = textwrap.fill(f"{about[0].upper()}{about[1:]}.", 88)
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter if epilog else argparse.HelpFormatter,
        allow_abbrev=False,
        add_help=add_help,
    )
    return parser


def _add_doctor(commands: Any) -> None:
    about = "check Python, torch, CUDA, NCCL, CuPy, GPUs, links and kernels, and say how to mend what is broken"
    _add_command(commands, "doctor", about).add_argument(
        "--measure",
        action="store_true",
        help="first compare kernels with torch's operations on the GPUs here (minutes), and keep which are faster",
    )


def _add_help(commands: Any) -> None:
    about = "show a page of the documentation; without a topic, list the pages"
    _add_command(commands, "help", about).add_argument("topic", nargs="?", metavar="TOPIC", help="such as slow-data")


def _show_page(options: argparse.Namespace) -> int:
    from fabricamp.commands.pages import show

    with _reader_may_leave():
        show(options.topic)
    return 0


class _RunHelp(argparse.Action):
    """An action that shows the help of a run command, and every argument that the YAML file can hold."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=options.get("help"))

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: object) -> None:
        """Prints the help and exits."""
        from fabricamp.arguments.described import described
        from fabricamp.config import check_config, read_config, targets_of
        from fabricamp.trainer import Trainer

        with _reader_may_leave():
            parser.print_help()
            path: Path | None = getattr(namespace, "config", None)
            found: list[tuple[str, Any]] = [("trainer", Trainer)]
            if path is not None and path.is_file():
                content = read_config(path)
                check_config(content)
                found = list(targets_of(content))
            for where, target in found:
                name = getattr(target, "__name__", str(target))
                print("", described(f"{where} ({name})", target), sep="\n")
        parser.exit()


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """A context for long output: if the reader of stdout ends early, as ``head`` does, the rest is dropped without an error."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # At exit Python flushes what is left in the buffer, which would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _add_plot(commands: Any) -> None:
    about = "draw what runs logged: losses, what ModelCheckpoint monitors, learning rate, loss scale, gradient norm, throughput"
    plot = _add_command(commands, "plot", about)
    plot.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, or a CSV or event file in it")
    plot.add_argument("--out", metavar="FILE", help="a .png, .svg or .pdf file to draw into too (needs matplotlib)")
    plot.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="what to draw instead; may be given several times"
    )
    plot.add_argument(
        "--smooth", type=float, default=0.6, metavar="SHARE", help="0 (raw values alone) to below 1; 0.6 by default"
    )


def _measure(options: argparse.Namespace, unknown: list[str]) -> int:
    from fabricamp.commands.bench import bench

    for line in bench(options.config, [*options.overrides, *unknown], steps=options.steps, out=options.out):
        print(line)
    return 0


def _plan(options: argparse.Namespace, unknown: list[str]) -> int:
    from fabricamp.commands.plan import plan

    found = plan(options.config, [*options.overrides, *unknown], card=options.card)
    print(json.dumps(found.as_dict()) if options.json else found)
    return 0


def _add_runs(commands: Any) -> None:
    about = "list the runs below a folder: when they began, steps, best values, and how they ended"
    epilog = (
        "In a pipe or a file: a line with the heads, then one for each run, with tabs between\n"
        "whole values, as in\n"
        "  fabricamp runs | cut -f 1,4"
    )
    runs = _add_command(commands, "runs", about, epilog)
    runs.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="the current one by default")


def _list_runs(options: argparse.Namespace) -> int:
    from fabricamp.runs.listing import show

    with _reader_may_leave():
        show(options.folder)
    return 0


def _add_verify(commands: Any) -> None:
    about = "run a script uninterrupted, then killed and resumed, and say if the bits are equal or where they differ"
    verify = _add_command(commands, "verify", about)
    verify.add_argument("--batches", type=int, default=20, help="of its first fit, which ends there; 20 by default")
    verify.add_argument("script", type=Path, help="the Python script that calls Trainer.fit")
    # Otherwise argparse reports the arguments as required.
    verify.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments").required = False


def _verify(options: argparse.Namespace) -> int:
    from fabricamp.runs.verify import verify

    difference, what = verify(options.script, options.arguments, options.batches)
    print(what)
    print("bitwise equal" if difference is None else difference)
    return 0 if difference is None else 1


def _add_export(commands: Any) -> None:
    about = (
        "write the weights of a checkpoint (.pt, .safetensors), the module with them (.pt2, .onnx), "
        "or all of it as one file (.ckpt) or a folder (name/)"
    )
    epilog = (
        "The batch size of a .pt2 or .onnx varies where the example has 2 rows or more: --input\n"
        "2,3,224,224, or the module's example_input_array. From an example of batch size 1 the\n"
        "file takes batches of 1 alone."
    )
    export = _add_command(commands, "export", about, epilog)
    export.add_argument("checkpoint", help="a Trainer's file or folder, of any opt level")
    export.add_argument("--to", required=True, metavar="FILE", help="how it ends decides the format")
    export.add_argument("--dtype", metavar="NAME", help="fp32, fp16, bf16 or fp64; by default what was trained")
    export.add_argument("--module", metavar="package.Class", help="the module's class, for .pt2 and .onnx")
    export.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="2,3,224,224",
        help="the shape of an input, one for each of forward's, with a dtype other than float32 behind it (2,128:int64); "
        "by default that of example_input_array",
    )


def _export(options: argparse.Namespace) -> int:
    from fabricamp.commands.export import example_input, export
    from fabricamp.config import locate

    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as Python does for a script
    module: Any = locate(options.module, "--module") if options.module else None
    inputs = [example_input(text) for text in options.input]
    print(export(options.checkpoint, options.to, module=module, inputs=inputs, dtype=options.dtype))
    return 0


def _add_config(commands: Any) -> None:
    about = "write a configuration for fabricamp fit from one that Lightning's LightningCLI reads"
    config = _add_command(commands, "config", about)
    config.add_argument("action", choices=["convert"], help="what to do")
    config.add_argument("file", type=Path, metavar="FILE", help="such as lightning_logs/version_0/config.yaml")
    config.add_argument("--to", type=Path, metavar="FILE", help="the new file; stdout by default")
    config.add_argument("--module", metavar="package.Class", help="the module's class, if the program names it")
    config.add_argument("--data", metavar="package.Class", help="the data module's class, if the program names it")


def _convert(options: argparse.Namespace) -> int:
    from fabricamp.commands.convert import convert

    text = convert(options.file, options.module, options.data)
    if options.to is None:
        with _reader_may_leave():
            print(text, end="")
        return 0
    if options.to.exists():
        raise ConfigError(f"{str(options.to)!r} is there; give another name, or remove it")
    options.to.write_text(text, encoding="utf-8")
    return 0


def _plot(options: argparse.Namespace) -> int:
    from fabricamp.runs import plot

    plot(options.runs, out=options.out, metrics=options.metric, smooth=options.smooth)
    if options.out:
        print(f"picture: {options.out}")
    return 0


def _examples_of(command: str) -> str:
    """Returns the examples of one command, and the exit codes."""
    lines = EXAMPLES.splitlines()
    own = [line for line in lines if line.startswith(f"  fabricamp {command} ")]
    own = own or [f"  fabricamp {command} config.yaml ckpt_path=best"]
    return "\n".join(["examples:" if len(own) > 1 else "example:", *own, "", lines[-1]])


@contextlib.contextmanager
def _prints_to_stderr() -> Iterator[int]:
    """Sends to stderr what this process, and those that it starts, write to stdout; yields a descriptor of stdout itself."""
    with Path(os.devnull).open("w") as nowhere:
        # Python sets None for a closed stderr.  Another file may have its number then.
        stderr = nowhere.fileno() if sys.__stderr__ is None else 2
        with _stdout_leads_to(stderr) as stdout, contextlib.redirect_stdout(sys.stderr or nowhere):
            yield stdout


@contextlib.contextmanager
def _stdout_leads_to(target: int) -> Iterator[int]:
    """Makes descriptor 1 a copy of ``target`` in this block; yields a copy of the former one, which child processes lack."""
    if sys.__stdout__ is None:
        # stdout is closed.  Another file may have its number.
        yield 1
        return
    _flush_stdout()
    before = os.dup(1)
    os.dup2(target, 1)
    try:
        yield before
    finally:
        _flush_stdout()
        os.dup2(before, 1)
        os.close(before)


def _flush_stdout() -> None:
    """Flushes the buffers of Python and of the C library; called before descriptor 1 changes, so text goes to the old target."""
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()  # type: ignore[union-attr]
    # Some systems do not find their C library in this way.
    with contextlib.suppress(OSError, TypeError, ValueError):
        library = ctypes.CDLL(None)
        library.fflush(ctypes.c_void_p.in_dll(library, "__stdoutp" if sys.platform == "darwin" else "stdout"))


def _runs_command_again(trainer: Trainer) -> bool:
    """Returns whether each rank will run this command again, as a process of its own."""
    from fabricamp.launch import choose_start_method

    runner = trainer._runner
    return runner.launches and choose_start_method(runner.settings.start_method) == "script"


def _run(command: str, path: Path, overrides: list[str], stdout: int | None) -> list[Any] | None:
    """Runs the command; returns the predictions on rank 0 if the descriptor ``stdout`` is kept for their JSON, otherwise None."""
    from fabricamp.checkpoint import write_checkpoint
    from fabricamp.config import build_parts, check_config, read_config, refusals_explained
    from fabricamp.launch import explained_without_traceback

    content = read_config(path, overrides)
    check_config(content)
    trainer, module, data, ckpt_path = build_parts(content, LOADERS[command])
    if ckpt_path is not None:
        _check_there(ckpt_path, command)
    elif command != "fit" and trainer.is_global_zero and not _started():
        _LOG.warning("%s uses the module's initial weights; give ckpt_path=FILE to load others", command)
    entry: Any = getattr(trainer, command)
    for_ranks: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if stdout is not None and _runs_command_again(trainer):
        # A rank that runs this command again inherits stdout itself, and keeps it for the JSON as this process does.
        for_ranks = _stdout_leads_to(stdout)
    with explained_without_traceback(_CODES), for_ranks, refusals_explained(content):
        result = entry(module, datamodule=data, ckpt_path=ckpt_path)
    if command != "predict" or not trainer.is_global_zero:
        return None
    if stdout is not None:
        return [_plain(one) for one in result]
    file = Path(trainer.log_folder or trainer.root_folder) / "predictions.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(file, {"predictions": result})
    print(f"predictions: {file}")
    return None


def _plain(value: Any) -> Any:
    """Returns ``value`` as data for JSON, nan and inf as None; raises :class:`ConfigError` for a class that JSON cannot hold."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # a tensor, or NumPy's array or number
        return _plain(value.tolist())
    raise ConfigError(
        f"predict_step returned a value of class {type(value).__name__}, which JSON cannot hold; return tensors, numbers, "
        "strings, lists and dicts of them, or leave --json out, for predictions.pt"
    )


def _check_there(ckpt_path: str, command: str) -> None:
    """Raises :class:`ConfigError` for a file that does not exist; "last", "best", "auto" and URLs are resolved later."""
    from fabricamp.checkpoint.storage import nearby_checkpoints

    if ckpt_path in ("last", "best", "auto") or "://" in ckpt_path:
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # too long, or the home of a user who does not exist
        if Path(ckpt_path).expanduser().exists():
            return
    # As in the Trainer's check, a name with a folder or a suffix is meant as a path.
    bare = Path(ckpt_path).name == ckpt_path and not Path(ckpt_path).suffix
    words = ("last", "best", "auto") if command == "fit" else ("last", "best")
    if bare and (meant := nearest(ckpt_path, words)):
        raise ConfigError(f"ckpt_path={ckpt_path!r} is not there{meant}")
    raise ConfigError(
        f"ckpt_path={ckpt_path!r} is not there{nearby_checkpoints(ckpt_path)}; give the path of a checkpoint, or ckpt_path=last"
    )


def _started() -> bool:
    """Returns whether another process of this command started this one, and prints the messages for both."""
    from fabricamp._utils.first_rank import STARTED_BY

    return STARTED_BY in os.environ


def _doctor(options: argparse.Namespace) -> int:
    from fabricamp.commands.doctor import examine, measure, show

    checks = [*(measure() if options.measure else []), *examine()]
    show(checks)
    return 1 if any(one.status == "broken" for one in checks) else 0


def _explain(error: FabricampError) -> int:
    """Prints the error without a traceback, and returns the exit code."""
    from fabricamp.launch import explained_without_traceback, record_failure

    # The process that started this one shows the error recorded here.
    with explained_without_traceback(_CODES):
        record_failure(error)
    if not _started():
        lines = map(printable, str(error).split("\n"))  # a name in it may be a stranger's
        print("fabricamp: " + "\n".join(lines), file=sys.stderr)
    return next(code for kind, code in _CODES.items() if isinstance(error, kind))


_LIGHTNINGS: Final = ("ArgsType", "LightningArgumentParser", "LightningCLI", "LRSchedulerCallable", "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion", "OptimizerCallable", "ReduceLROnPlateau", "SaveConfigCallback", "instantiate_class")  # fmt: skip
"""The names that Lightning has at this path."""


def __getattr__(name: str) -> Any:
    if name not in _LIGHTNINGS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fabricamp.lightning.packages.pytorch import cli

    return getattr(cli, name)
