"""LightningArgumentParser: jsonargparse's parser with methods that add a Trainer, a module, data, a callback or an optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from jsonargparse import ArgumentParser, Namespace, register_unresolvable_import_paths, set_parsing_settings
from jsonargparse.typing import class_from_function
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fabricamp.arguments.migration import ignored_at_none
from fabricamp.callbacks.base import Callback
from fabricamp.data import DataModule
from fabricamp.errors import ConfigError
from fabricamp.lightning.cli.class_paths import lightnings_names
from fabricamp.lightning.cli.written import read_lightnings_arguments
from fabricamp.module import TrainingModule

# Functions of torch have no module of their own, and are defaults of arguments.
register_unresolvable_import_paths(torch)
# A configuration may lie at a URL (s3://, gs://).
set_parsing_settings(config_read_mode_fsspec_enabled=True)
read_lightnings_arguments()

AUTOMATIC: Final = "AUTOMATIC"
"""The ``link_to`` of an optimizer or a scheduler that LightningCLI gives to the module's ``configure_optimizers``."""

Classes = type | tuple[type, ...]
"""One class, whose arguments are options, or several, of whose subclasses the configuration names one."""


class LightningArgumentParser(ArgumentParser):
    """A parser of command line, environment and YAML files with the parts of a run as groups of options.

    Args:
        *args: arguments of ``argparse.ArgumentParser``.
        description: the first line of the help.
        env_prefix: the first word of the environment variables.
        default_env: whether environment variables are read.
        **options: options of jsonargparse's parser.

    Example:
        >>> parser = LightningArgumentParser()
        >>> parser.add_lightning_class_args(Callback, "announce")
        []
    """

    def __init__(
        self,
        *args: Any,
        description: str = "Runs fit, validate, test or predict.",
        env_prefix: str = "PL",
        default_env: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, description=description, env_prefix=env_prefix, default_env=default_env, **options)
        self.callback_keys: list[str] = []
        """The keys of callbacks that the Trainer gets besides those of ``trainer.callbacks``."""
        self.optimizers: dict[str, tuple[Classes, str]] = {}
        """By key: what was given to :meth:`add_optimizer_args`, and the key that it is linked to."""
        self.lr_schedulers: dict[str, tuple[Classes, str]] = {}
        """The same of :meth:`add_lr_scheduler_args`."""
        self.links: dict[str, str] = {}
        """By target: the keys that :meth:`link_arguments` links to it."""

    def add_lightning_class_args(
        self,
        lightning_class: type | Callable[..., Any],
        nested_key: str | None,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Adds the constructor arguments of a Trainer, module, data module or callback, or of a function that returns one.

        Args:
            lightning_class: the class or function.
            nested_key: the group of the options, as "trainer"; None: the options have no prefix.
            subclass_mode: the configuration names a subclass, by ``class_path`` and ``init_args``.
            required: whether it has to, with ``subclass_mode``.

        Raises:
            ConfigError: for any other class.
        """
        kind: Any = lightning_class
        if callable(kind) and not isinstance(kind, type):
            kind = class_from_function(kind)
        if not isinstance(kind, type) or not (
            issubclass(kind, Callback | TrainingModule | DataModule) or _is_trainer(kind)
        ):
            raise ConfigError(
                f"{lightning_class!r} is no Trainer, LightningModule, LightningDataModule or Callback; give such a class, or a "
                "function whose annotation says that it returns one; for others call add_class_arguments"
            )
        if issubclass(kind, Callback) and nested_key is not None:
            self.callback_keys.append(nested_key)
        if subclass_mode:
            if nested_key is None:
                raise ConfigError(
                    "subclass_mode=True needs a key for class_path and init_args, such as nested_key='model'"
                )
            self.add_subclass_arguments(kind, nested_key, fail_untyped=False, required=required)
            return [nested_key]
        if _is_trainer(kind):
            return self._add_trainer(kind, nested_key)
        return self.add_class_arguments(kind, nested_key, fail_untyped=False, sub_configs=True)  # type: ignore[no-any-return]

    def _add_trainer(self, kind: type, nested_key: str | None) -> list[str]:
        """Adds the arguments of a Trainer, which LightningCLI builds itself, with more callbacks."""
        init = next(vars(one)["__init__"] for one in kind.__mro__ if "__init__" in vars(one))
        parameters = inspect.signature(init).parameters
        passes_on = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        # A name without a class would pass for that of a registered callback.
        replaced = passes_on and ("callbacks" not in parameters or _is_own(init))
        added: list[str] = self.add_class_arguments(
            kind,
            nested_key,
            fail_untyped=False,
            instantiate=False,
            sub_configs=True,
            skip={"callbacks"} if replaced else None,
        )
        groups: Any = self.groups
        group, prefix = (self, "") if nested_key is None else (groups[nested_key], f"{nested_key}.")
        if replaced:
            callbacks = list[Callback] | Callback | None
            group.add_argument(
                f"--{prefix}callbacks", type=callbacks, default=None, help="A callback, or a list of them."
            )
            added.append(f"{prefix}callbacks")
        if passes_on:
            # Configurations that Lightning wrote have these; the Trainer refuses another value than null.
            for name in ignored_at_none("Trainer"):
                group.add_argument(f"--{prefix}{name}", type=str | None, default=None, help="Lightning's; only null.")
        return added

    def add_optimizer_args(
        self,
        optimizer_class: Classes = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Adds the arguments of an optimizer, but for the parameters; of a tuple the configuration names a subclass.

        ``link_to`` "AUTOMATIC": the module's ``configure_optimizers`` returns it; otherwise the key of an argument that gets the
        dict of ``class_path`` and ``init_args``, for :func:`instantiate_class`.  Raises :class:`ConfigError` for other classes.
        """
        self._add_recipe(optimizer_class, Optimizer, nested_key, "params")
        self.optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: Classes = (LRScheduler,),
        nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Adds the arguments of a learning-rate scheduler, but for the optimizer; the rest is as in :meth:`add_optimizer_args`."""
        self._add_recipe(lr_scheduler_class, LRScheduler, nested_key, "optimizer")
        self.lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _add_recipe(self, classes: Classes, base: type, nested_key: str, first: str) -> None:
        """Adds the arguments of a class that is built later, when its ``first`` argument is known."""
        several = classes if isinstance(classes, tuple) else (classes,)
        if not several or not all(isinstance(one, type) and issubclass(one, base) for one in several):
            raise ConfigError(
                f"{nested_key}: {classes!r} is no subclass of torch's {base.__name__}, and no tuple of them"
            )
        options: dict[str, Any] = {"instantiate": False, "fail_untyped": False, "skip": {first}}
        if isinstance(classes, tuple):
            self.add_subclass_arguments(classes, nested_key, **options)
        else:
            self.add_class_arguments(classes, nested_key, sub_configs=True, **options)

    def link_arguments(
        self,
        source: str | tuple[str, ...],
        target: str,
        compute_fn: Callable[..., Any] | None = None,
        apply_on: str = "parse",
    ) -> None:
        """Makes ``target`` follow ``source``; see jsonargparse's method."""
        super().link_arguments(source, target, compute_fn=compute_fn, apply_on=apply_on)
        self.links[target] = source if isinstance(source, str) else ", ".join(source)

    def dump(self, namespace: Namespace, *args: Any, **options: Any) -> str:
        """Returns the configuration as text, with Lightning's names of classes; see jsonargparse's method."""
        text: str = super().dump(lightnings_names(namespace), *args, **options)
        return text


_TRAINER: Final = "fabricamp.trainer.trainer"
"""The module of the Trainer, which stands above this one."""


def _is_trainer(kind: type) -> bool:
    return any(one.__module__ == _TRAINER for one in kind.__mro__)


def _is_own(init: Callable[..., None]) -> bool:
    return init.__module__ == _TRAINER
