"""Lightning's command line, on jsonargparse: ``LightningCLI(Model, Data)`` runs fit, validate, test or predict."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import json
import sys
from argparse import Namespace as ArgparseNamespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_utilities.core.imports import RequirementCache
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fabricamp import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from fabricamp.arguments.migration import ignored_at_none
from fabricamp.checkpoint.hyperparameters import MODULE, configured
from fabricamp.checkpoint.instantiate import CLASS_PATH, INSTANTIATOR, LIGHTNINGS, instantiate_module
from fabricamp.checkpoint.reading import read_checkpoint
from fabricamp.errors import ConfigError, NotInstalledError
from fabricamp.hooks import overrides
from fabricamp.lightning import aliases
from fabricamp.lightning.cli.recipes import (
    LRSchedulerCallable,
    LRSchedulerType,
    LRSchedulerTypeTuple,
    LRSchedulerTypeUnion,
    OptimizerCallable,
    ReduceLROnPlateau,
    instantiate_class,
)
from fabricamp.lightning.packages.pytorch.__version__ import version
from fabricamp.utilities.rank_zero import rank_zero_warn

_JSONARGPARSE_SIGNATURES_AVAILABLE = RequirementCache("jsonargparse[signatures]>=4.53")

if TYPE_CHECKING or importlib.util.find_spec("jsonargparse") is not None:
    from jsonargparse import ActionConfigFile, Namespace  # type: ignore[attr-defined]  # its __all__ is made at run time
    from jsonargparse.typing import class_from_function

    from fabricamp.lightning.cli.class_paths import lightnings_names
    from fabricamp.lightning.cli.left_out import Given, given_by, given_in, say_left_out
    from fabricamp.lightning.cli.parser import AUTOMATIC, LightningArgumentParser
    from fabricamp.lightning.cli.save_config import SaveConfigCallback
else:

    class LightningArgumentParser:
        """Needs jsonargparse: constructing it raises."""

        def __init__(self, *_: Any, **__: Any) -> None:
            raise _not_installed("LightningArgumentParser")

    class SaveConfigCallback(Callback):
        """Needs jsonargparse: constructing it raises."""

        def __init__(self, *_: Any, **__: Any) -> None:
            raise _not_installed("SaveConfigCallback")


def _not_installed(name: str) -> NotInstalledError:
    return NotInstalledError(
        f"{name} needs jsonargparse, which is not installed; run: pip install 'jsonargparse[signatures]'"
    )


ArgsType = list[str] | dict[str, Any] | ArgparseNamespace | None

__all__ = [
    "ArgsType",
    "LRSchedulerCallable",
    "LRSchedulerType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "LightningArgumentParser",
    "LightningCLI",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "SaveConfigCallback",
    "instantiate_class",
    "instantiate_module",
]

_LOADERS: Final = {"dataloaders", "datamodule", "model"}


class LightningCLI:
    """A command line for a module and its data: parses, builds both and a Trainer, and runs the subcommand.

    Every argument of the three constructors is an option, ``--model.lr 0.1``, and a key of a YAML file for ``--config``.

    Args:
        model_class: the module's class, or a function that returns a module; None: the configuration names a class.
        datamodule_class: the same of the data module; None: the configuration may name one.
        save_config_callback: the callback that writes the configuration into the log folder; None: none.
        save_config_kwargs: its arguments.
        trainer_class: the Trainer's class, or a function that returns one.
        trainer_defaults: defaults of its arguments; callbacks among them are added to those of the configuration.
        seed_everything_default: the default of ``--seed_everything``: a seed, True (the seed of the environment, or 0) or False.
        parser_kwargs: arguments of the parser, or of a subcommand's parser, by its name.
        parser_class: the class of the parsers.
        subclass_mode_model: the configuration names a subclass of ``model_class``.
        subclass_mode_data: the same of ``datamodule_class``.
        args: a list of options, a dict or a Namespace in place of the program's command line.
        run: False has no subcommands, and only builds.
        auto_configure_optimizers: adds ``--optimizer`` and ``--lr_scheduler``.
        load_from_checkpoint_support: ``save_hyperparameters`` saves the configuration, from which ``load_from_checkpoint`` builds
            modules with classes among their arguments.
    """

    def __init__(
        self,
        model_class: type[LightningModule] | Callable[..., LightningModule] | None = None,
        datamodule_class: type[LightningDataModule] | Callable[..., LightningDataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        if importlib.util.find_spec("jsonargparse") is None:
            raise _not_installed("LightningCLI")
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = save_config_kwargs or {}
        self.trainer_class = trainer_class
        self.trainer_defaults = trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs = parser_kwargs or {}
        self.parser_class = parser_class
        self.auto_configure_optimizers = auto_configure_optimizers
        self.load_from_checkpoint_support = load_from_checkpoint_support
        self.model_class = LightningModule if model_class is None else model_class
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.datamodule_class = datamodule_class
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self._parsers: dict[str, LightningArgumentParser] = {}
        self._run_arguments: dict[str, list[str]] = {}
        """By subcommand: the arguments of the Trainer's method that are options."""
        _import_named_classes()
        names = self.subcommands() if run else {}
        of_subcommands = {name: value for name, value in self.parser_kwargs.items() if name in names}
        of_all = {name: value for name, value in self.parser_kwargs.items() if name not in names}
        self.setup_parser(run, of_all, of_subcommands)
        self.parse_arguments(self.parser, args)
        self.subcommand: str | None = self.config["subcommand"] if run else None
        self._take_hyperparameters_of_checkpoint()
        self._set_seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # -- the parser --------------------------------------------------------------------------------------------------------------

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Returns a parser with the option ``--config``; ``kwargs`` are the parser's arguments."""
        kwargs.setdefault("dump_header", [f"lightning.pytorch=={version}"])
        parser = self.parser_class(**kwargs)
        parser.add_argument(
            "-c", "--config", action=ActionConfigFile, help="A configuration: a file, a URL or text, in YAML or JSON."
        )
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Makes the parser, with a parser for each subcommand."""
        self.parser = self.init_parser(**main_kwargs)
        if not add_subcommands:
            self._add_arguments(self.parser)
            return
        commands = self.parser.add_subcommands()
        kind = _class_of(self.trainer_class)
        for name, left_out in self.subcommands().items():
            about = _first_line(getattr(kind, name))
            parser = self._parsers[name] = self.init_parser(**{"description": about, **subparser_kwargs.get(name, {})})
            self._add_arguments(parser)
            self._run_arguments[name] = parser.add_method_arguments(kind, name, skip={*left_out}, fail_untyped=False)
            commands.add_subcommand(name, parser, help=about)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Returns the methods of the Trainer that are subcommands, with those of their arguments that are no options."""
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": {*_LOADERS},
            "test": {*_LOADERS},
            "predict": {*_LOADERS},
        }

    def _add_arguments(self, parser: LightningArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.optimizers:
                parser.add_optimizer_args((Optimizer,))
            if not parser.lr_schedulers:
                parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
        self.link_optimizers_and_lr_schedulers(parser)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds ``--seed_everything``."""
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="The seed of seed_everything, called first; true: that of the environment, or 0; false: none.",
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the arguments of Trainer, module and data module."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        # Callbacks are added to those of the configuration, which may hold objects that no parser knows.
        defaults = {key: value for key, value in self.trainer_defaults.items() if key != "callbacks"}
        parser.set_defaults({f"trainer.{key}": value for key, value in defaults.items()})
        parser.add_lightning_class_args(self.model_class, "model", subclass_mode=self.subclass_mode_model)
        if self.datamodule_class is None:
            # The module's own loaders may be meant.
            parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True, required=False)
        else:
            parser.add_lightning_class_args(self.datamodule_class, "data", subclass_mode=self.subclass_mode_data)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Override it to add options, links and defaults; called for the parser of each subcommand."""

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        """Links optimizers and schedulers to the arguments that were given as their ``link_to``."""
        for key, (classes, target) in {**parser.optimizers, **parser.lr_schedulers}.items():
            if target != AUTOMATIC:
                compute = None if isinstance(classes, tuple) else functools.partial(_recipe, classes)
                parser.link_arguments(key, target, compute_fn=compute)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Sets ``config`` from ``args``, or from the program's command line; says which values are left out."""
        if args is not None and len(sys.argv) > 1:
            rank_zero_warn(
                f"LightningCLI was given args={args!r}, and does not read the command line: {sys.argv[1:]}; leave one of them out"
            )
        if isinstance(args, dict | ArgparseNamespace):
            config = parser.parse_object(args if isinstance(args, dict | Namespace) else Namespace(args))
        else:
            config = parser.parse_args(args)
        self.config: Any = lightnings_names(config)
        subcommand = self.config.get("subcommand")
        part = self.config if subcommand is None else self.config[subcommand]
        say_left_out([*self._given(args, subcommand)], part, self._parser(subcommand).links)

    def _given(self, args: ArgsType, subcommand: str | None) -> Iterator[Given]:
        """Yields what the subcommand was given: by files that are always read, and by files and options around its name."""
        if isinstance(args, dict | ArgparseNamespace):
            values = args if isinstance(args, dict) else Namespace(args).as_dict()
            yield "args", values if subcommand is None else values.get(subcommand, {})
            return
        given = sys.argv[1:] if args is None else [*args]
        end = given.index(subcommand) if subcommand in given else len(given)
        for where, values in [*given_in(self.parser.default_config_files), *given_by(given[:end])]:
            yield where, values if subcommand is None else values.get(subcommand, {})
        if subcommand is not None:
            yield from given_in(self._parser(subcommand).default_config_files)
            yield from given_by(given[end + 1 :])

    def _parser(self, subcommand: str | None) -> LightningArgumentParser:
        """Returns the parser of a subcommand, or the only one."""
        return self.parser if subcommand is None else self._parsers[subcommand]

    def _get(self, config: Any, key: str, default: Any = None) -> Any:
        """Returns a value of ``config``, or of the subcommand's part of it."""
        part = config if self.subcommand is None else config.get(self.subcommand, config)
        return part.get(key, default)

    def _set(self, key: str, value: Any) -> None:
        """Sets a value of the configuration, or of the subcommand's part of it."""
        self.config[key if self.subcommand is None else f"{self.subcommand}.{key}"] = value

    # -- the objects -------------------------------------------------------------------------------------------------------------

    def _take_hyperparameters_of_checkpoint(self) -> None:
        """Gives the module the arguments that it had in ``--ckpt_path``: the weights in the file fit no other."""
        path = self._get(self.config, "ckpt_path") if self.subcommand is not None else None
        if path is None or not Path(path).is_file():  # "best", or a URL, which the run resolves
            return
        checkpoint = read_checkpoint(path, mapped=True, verify=False)
        saved = checkpoint.get(MODULE.values) or {}
        if INSTANTIATOR not in saved and checkpoint.get(MODULE.types):  # objects, which no configuration has
            return
        arguments = {key: value for key, value in saved.items() if key not in (INSTANTIATOR, CLASS_PATH)}
        if not arguments:
            return
        if self.subclass_mode_model:
            kind = saved.get(CLASS_PATH) or self._get(self.config, "model")["class_path"]
            # dict_kwargs: jsonargparse sorts out what the class takes by **kwargs.
            arguments = {"class_path": kind, "dict_kwargs": arguments}
        try:
            config = self.parser.parse_object({str(self.subcommand): {"model": arguments}}, self.config)
        except SystemExit:
            print(f"{path}: its hyper-parameters are no arguments of the model: {', '.join(saved)}", file=sys.stderr)
            raise
        self.config = lightnings_names(config)

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is not False:
            self._set("seed_everything", seed_everything(None if seed is True else seed, workers=True))

    def before_instantiate_classes(self) -> None:
        """Called before :meth:`instantiate_classes`."""

    def instantiate_classes(self) -> None:
        """Builds data, module and Trainer: the attributes ``datamodule``, ``model`` and ``trainer``."""
        instantiators: list[Any] = []
        if self.load_from_checkpoint_support:
            arguments = _dumped(self._parser(self.subcommand), self._get_all())
            for key, kind, by_name in (
                ("model", self.model_class, self.subclass_mode_model),
                ("data", self.datamodule_class or LightningDataModule, self.subclass_mode_data),
            ):
                if isinstance(kind, type):
                    instantiators.append((functools.partial(_build, key, arguments.get(key) or {}), kind, by_name))
        self.config_init: Any = self.parser.instantiate(self.config, instantiators=instantiators)
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._give_optimizers()
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Called after :meth:`instantiate_classes`."""

    def _get_all(self) -> Any:
        return self.config if self.subcommand is None else self.config[self.subcommand]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Returns a new Trainer with the arguments of the configuration; ``kwargs`` take precedence."""
        options = {**vars(self._get(self.config_init, "trainer", Namespace())), **kwargs}
        options = {
            name: one for name, one in options.items() if one is not None or name not in ignored_at_none("Trainer")
        }
        defaults = self.trainer_defaults.get("callbacks")
        own = [self._get(self.config_init, key) for key in self._parser(self.subcommand).callback_keys]
        if "callbacks" in options:
            callbacks = [*_listed(options.get("callbacks")), *own]
            callbacks += [instantiate_class((), one) if isinstance(one, dict) else one for one in _listed(defaults)]
            if self.save_config_callback is not None and not options.get("fast_dev_run"):
                parser = self._parser(self.subcommand)
                callbacks.append(self.save_config_callback(parser, self._get_all(), **self.save_config_kwargs))
            options["callbacks"] = callbacks
        elif own or defaults or self.save_config_callback is not None:
            name = getattr(self.trainer_class, "__name__", str(self.trainer_class))
            rank_zero_warn(
                f"{name} has no argument callbacks, so the configuration is not saved, and callbacks of LightningCLI are left out; "
                "take callbacks, and pass them on to Trainer"
            )
        return self.trainer_class(**options)

    @staticmethod
    def configure_optimizers(
        lightning_module: LightningModule,  # noqa: ARG004 - for overrides
        optimizer: Optimizer,
        lr_scheduler: LRScheduler | None = None,
    ) -> Any:
        """Returns what the module's ``configure_optimizers`` returns, for ``--optimizer`` and ``--lr_scheduler``."""
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor},
            }
        return [optimizer], [lr_scheduler]

    def _give_optimizers(self) -> None:
        """Replaces the module's ``configure_optimizers`` if the configuration names an optimizer."""
        parser = self._parser(self.subcommand)
        optimizer = self._automatic(parser.optimizers, "optimizer")
        scheduler = self._automatic(parser.lr_schedulers, "scheduler")
        if optimizer is None:
            if scheduler is not None:
                rank_zero_warn("lr_scheduler is left out, because no optimizer is given; give --optimizer too")
            return
        if overrides(self.model, "configure_optimizers", LightningModule):
            rank_zero_warn(
                f"{type(self.model).__name__}.configure_optimizers is not called: the configuration names the optimizer "
                f"{optimizer['class_path']}; leave one of them out"
            )
        self.model.configure_optimizers = functools.partial(
            _configure, self.model, configure=self.configure_optimizers, optimizer=optimizer, lr_scheduler=scheduler
        )

    def _automatic(self, added: Mapping[str, tuple[Any, str]], what: str) -> dict[str, Any] | None:
        """Returns class and arguments of the optimizer, or scheduler, for ``configure_optimizers``; None if there is none."""
        keys = [key for key, (_, target) in added.items() if target == AUTOMATIC]
        if len(keys) > 1:
            raise ConfigError(
                f"configure_optimizers cannot return a {what} for each of {', '.join(keys)}; give link_to=, and build them in the "
                "module by instantiate_class"
            )
        value = self._get(self.config_init, keys[0]) if keys else None
        if value is None:
            return None
        classes = added[keys[0]][0]
        return dict(value.as_dict()) if isinstance(classes, tuple) else _recipe(classes, value)

    # -- the run -----------------------------------------------------------------------------------------------------------------

    def _run_subcommand(self, subcommand: str) -> None:
        """Calls ``before_fit``, ``fit`` and ``after_fit`` of the command line, or the Trainer's ``fit``; so for each subcommand."""
        part = self.config_init[subcommand]
        arguments = {key: part[key] for key in self._run_arguments[subcommand] if key in part}
        arguments["model"] = self.model
        if self.datamodule is not None:
            arguments["datamodule"] = self.datamodule
        run = getattr(self, subcommand, None) or getattr(self.trainer, subcommand)
        for call in (getattr(self, f"before_{subcommand}", None), run, getattr(self, f"after_{subcommand}", None)):
            if call is not None:
                call(**(arguments if call is run else {}))


def _import_named_classes() -> None:
    """Imports the classes that a configuration may name without a path: jsonargparse knows those that are imported."""
    for part in ("callbacks", "loggers", "plugins", "profilers", "strategies"):
        importlib.import_module(f"{aliases.HOME}.pytorch.{part}")


def _class_of(trainer: Any) -> type:
    return trainer if isinstance(trainer, type) else class_from_function(trainer)


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [*value] if isinstance(value, list | tuple) else [value]


def _recipe(kind: type, arguments: Any) -> dict[str, Any]:
    """Returns the class and its arguments as :func:`instantiate_class` takes them."""
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": dict(vars(arguments))}


def _dumped(parser: LightningArgumentParser, config: Any) -> dict[str, Any]:
    """Returns the configuration as plain data, with what links have put in."""
    text = parser.dump(config, format="json", skip_unset=False, skip_link_targets=False, skip_validation=True)
    content: dict[str, Any] = json.loads(text)
    return content


def _build(
    key: str,
    arguments: dict[str, Any],
    kind: type,
    *args: Any,
    applied_instantiation_links: dict[str, Any],
    **kwargs: Any,
) -> Any:
    """Returns an object of ``kind`` that saves the configuration's ``arguments`` as its hyper-parameters.

    ``applied_instantiation_links`` are arguments that came from objects, by the targets of the links.
    """
    named = arguments.get("class_path")
    if named is not None:
        arguments = {**(arguments.get("init_args") or {}), **(arguments.get("dict_kwargs") or {}), CLASS_PATH: named}
    saved = copy.deepcopy(arguments)
    for target, value in applied_instantiation_links.items():
        words = target.removeprefix(f"{key}.").split(".")
        if target.startswith(f"{key}."):
            node = saved
            for word in words[named is not None : -1]:
                node = node.setdefault(word, {})
            node[words[-1]] = value
    with configured(kind, {**saved, INSTANTIATOR: LIGHTNINGS}):
        return kind(*args, **kwargs)


def _configure(
    module: LightningModule,
    *,
    configure: Callable[..., Any],
    optimizer: dict[str, Any],
    lr_scheduler: dict[str, Any] | None,
) -> Any:
    """Builds optimizer and scheduler from their recipes; stands in for a module's ``configure_optimizers``."""
    made = instantiate_class(module.parameters(), optimizer)
    schedule = None if lr_scheduler is None else instantiate_class(made, lr_scheduler)
    return configure(module, optimizer=made, lr_scheduler=schedule)
