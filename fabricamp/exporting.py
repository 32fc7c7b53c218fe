"""A module's ``forward`` as TorchScript or ONNX."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from fabricamp.arguments.checks import check_choice
from fabricamp.engine.run_context import RunContext
from fabricamp.errors import ConfigError
from fabricamp.precision.float8_linears import plain_linears

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BytesIO


_NOT_EXPORTED = ("_attachment", "automatic_optimization", "strict_loading", "example_input_array")
"""Attributes of a module that its TorchScript does not have."""


class ExportMixin:
    """Gives a module :meth:`to_torchscript` and :meth:`to_onnx`."""

    example_input_array: Any = None
    """Default input of exports: a tensor, or a tuple of ``forward``'s arguments."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        is_training_module = ExportMixin in cls.__bases__
        if is_training_module:
            # torch.jit.script would compile each property of this class.  It still compiles properties of users' subclasses:
            # forward may read them.
            names = [name for name in dir(cls) if isinstance(getattr(cls, name, None), property)]
            cls.__jit_unused_properties__ = names  # type: ignore[attr-defined]  # torch's name
            # Attributes too: torch cannot read the annotations of this package's classes, which are text.
            cls.__jit_ignored_attributes__ = [*names, *_NOT_EXPORTED]  # type: ignore[attr-defined]  # likewise

    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: str | None = "script",
        example_inputs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Returns ``forward`` in evaluation mode as a ScriptModule, and writes it if a path is given.

        Args:
            file_path: the file for ``torch.jit.load``; None writes none.
            method: "script" compiles the source, "trace" records what happens to ``example_inputs``.
            example_inputs: a tensor, or a tuple of arguments; None stands for ``example_input_array``.
            **kwargs: further arguments of ``torch.jit.script`` or ``torch.jit.trace``.

        Raises:
            ConfigError: for another method, or a trace without inputs.

        Example:
            >>> module.to_torchscript("model.pt")  # doctest: +SKIP
        """
        check_choice("method", method, ("script", "trace"))
        inputs = None
        if method == "trace":
            inputs = self._inputs(example_inputs, "to_torchscript(method='trace')", "example_inputs")
        with self._evaluated() as module, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the caller has chosen TorchScript
            if method == "script":
                script = torch.jit.script(module, **kwargs)
            else:
                script = torch.jit.trace(module, inputs, **kwargs)
            if file_path is not None:
                Path(file_path).parent.mkdir(parents=True, exist_ok=True)
                torch.jit.save(script, str(file_path))
        return script

    def to_onnx(self, file_path: str | Path | BytesIO | None = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Writes ``forward`` in evaluation mode as ONNX, and returns the result of ``torch.onnx.export``.

        Args:
            file_path: the file, or a ``BytesIO``; None writes none.
            input_sample: a tensor, or a tuple of arguments; None stands for ``example_input_array``.
            **kwargs: further arguments of ``torch.onnx.export``, such as ``dynamic_shapes``.

        Raises:
            ConfigError: without inputs, or if the packages onnx and onnxscript are missing.

        Example:
            >>> module.to_onnx("model.onnx", torch.zeros(1, 8))  # doctest: +SKIP
        """
        missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"to_onnx needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        inputs = self._inputs(input_sample, "to_onnx", "input_sample")
        target: Any = str(file_path) if isinstance(file_path, Path) else file_path
        if isinstance(target, str):
            Path(target).parent.mkdir(parents=True, exist_ok=True)
        with self._evaluated() as module:
            arguments = inputs if isinstance(inputs, tuple) else (inputs,)
            return torch.onnx.export(module, arguments, target, **{"verbose": False, **kwargs})

    def _inputs(self, given: Any, caller: str, argument: str) -> Any:
        """Returns the inputs on the module's device, passed through the batch-transfer hooks."""
        own = cast("Any", self)
        inputs = own.example_input_array if given is None else given
        if inputs is None:
            raise ConfigError(
                f"{caller} takes an input to run forward on; give {argument}=, or set self.example_input_array"
            )
        inputs = own.on_before_batch_transfer(inputs, 0)
        return own.on_after_batch_transfer(own.transfer_batch_to_device(inputs, own.device, 0), 0)

    @contextlib.contextmanager
    def _evaluated(self) -> Iterator[nn.Module]:
        """Yields the module in evaluation mode, without gradients, detached from a run with its submodules; restores all of it."""
        module = cast("nn.Module", self)
        modes = [(submodule, submodule.training) for submodule in module.modules()]
        attached = [(part, vars(part).get("_attachment")) for part in module.modules() if isinstance(part, ExportMixin)]
        # torch reads every attribute of the module, and treats an attribute as missing if the read raises AttributeError.
        # Properties such as current_epoch read the trainer, so the module gets a trainer without attributes: without a trainer
        # these properties would raise another error.
        no_run = RunContext()
        no_run.trainer = cast("Any", object())
        for part, _ in attached:
            vars(part)["_attachment"] = no_run
        try:
            with torch.no_grad(), plain_linears(module):
                yield module.eval()
        finally:
            for part, run_context in attached:
                if run_context is None:
                    del vars(part)["_attachment"]
                else:
                    vars(part)["_attachment"] = run_context
            for submodule, training in modes:
                submodule.training = training
