"""``fabricamp export``: writes the weights of a checkpoint, or the module with them, in formats of other programs."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.arguments.checks import check_choice
from fabricamp.checkpoint import read_checkpoint, write_checkpoint
from fabricamp.checkpoint.compiled_names import with_names_of
from fabricamp.checkpoint.folder import write_whole
from fabricamp.checkpoint.left_out import LEFT_OUT
from fabricamp.checkpoint.storage import is_folder, nearby_checkpoints
from fabricamp.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from fabricamp.module import TrainingModule


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
WEIGHTS = (".pt", ".safetensors")
GRAPHS = (".pt2", ".onnx")
WHOLE = ".ckpt"
_PACKAGES = {".safetensors": ("safetensors",), ".onnx": ("onnx", "onnxscript")}


def export(
    checkpoint: str | Path,
    to: str | Path,
    *,
    module: type[TrainingModule] | None = None,
    inputs: Sequence[Tensor] = (),
    dtype: str | None = None,
) -> str:
    """Writes the model in a checkpoint of any opt level to a file or folder; returns a line that describes what was written.

    ``.pt`` (``torch.load``) and ``.safetensors`` hold the weights by name.  ``.pt2`` (``torch.export.load``) and ``.onnx`` hold the
    module's ``forward`` too, in evaluation mode; the first dimension of inputs may vary if the module allows it.  ``.ckpt`` is the
    complete checkpoint as one file, also if it was a folder of sharded tensors; a name that ends in ``/`` is such a folder.

    Args:
        checkpoint: the file or folder, or a URL.
        to: the file or folder to write; its ending decides the format.
        module: the class of the module, for ``.pt2`` and ``.onnx``: a checkpoint names no code.
        inputs: the arguments of ``forward``; empty means the module's ``example_input_array``.
        dtype: "fp32", "fp16", "bf16" or "fp64" for all floating weights; None keeps the dtype of training: fp32 (at O2 and O5 the
            masters), half at O3 and the half ``true`` precisions.

    Raises:
        ConfigError: if there is no such checkpoint, the format is not known, a package is missing, or ``module`` or ``inputs``
            are needed.
        CheckpointError: for a file that is no checkpoint, or cannot be written.

    Example:
        >>> export("epoch=19-step=400.ckpt", "weights.safetensors", dtype="bf16")  # doctest: +SKIP
    """
    as_folder = str(to).endswith("/")
    path = _checked(Path(to).expanduser(), dtype, whole=as_folder)
    if not ("://" in str(checkpoint) or Path(checkpoint).expanduser().exists()):
        raise ConfigError(
            f"{str(checkpoint)!r} is not there{nearby_checkpoints(str(checkpoint))}; "
            "give the file or folder of a checkpoint, or a URL"
        )
    content = read_checkpoint(checkpoint, keep_objects=True)
    weights = content.get("state_dict")
    if not isinstance(weights, dict):
        raise CheckpointError(
            f"{checkpoint} holds no 'state_dict' (it has {sorted(content)}); give a Trainer's checkpoint"
        )
    if as_folder:
        write_whole(path, content)
        return f"{path}: the checkpoint of step {content.get('global_step')} as a folder"
    if path.suffix == WHOLE:
        write_checkpoint(path, content)
        return f"{path}: the checkpoint of step {content.get('global_step')} as one file"
    target_dtype = _trained_dtype(content.get("amp")) if dtype is None else DTYPES[dtype]
    weights = {name: _converted(value, target_dtype) for name, value in weights.items()}
    if path.suffix in WEIGHTS:
        _write_and_rename(path, lambda file: _write_weights(file, path.suffix, weights))
        left_out = len(content.get(LEFT_OUT, {}).get("names", ()))
        rest = f" (trained; the file leaves out {left_out} of the base model)" if left_out else ""
        return f"{path}: {len(weights)} tensors, {_dtypes(weights)}{rest}"
    if module is None:
        raise ConfigError(
            f"{path.name} holds the module's forward too, which a checkpoint does not contain: give the module's class (--module)"
        )
    program = _program(_module(module, str(checkpoint), weights, target_dtype), inputs)
    _write_and_rename(path, lambda file: _write_program(file, path.suffix, program))
    return f"{path}: {module.__name__}.forward, {_dtypes(weights)}{_fixed_batch(program)}"


def _fixed_batch(program: torch.export.ExportedProgram) -> str:
    """Returns which batch size alone the program takes, in words; an empty string if it may vary."""
    inputs = program.graph_signature.user_inputs
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
    batches = [value.shape[0] for value in values if isinstance(value, torch.Tensor) and value.ndim]
    sizes = sorted({size for size in batches if isinstance(size, int)})  # one that may vary is a symbol
    if not sizes:
        return ""
    cure = "; an example with 2 rows or more (--input 2,...) lets it vary" if sizes == [1] else ""
    return f", for batches of {', '.join(map(str, sizes))} alone{cure}"


def _checked(path: Path, dtype: str | None, *, whole: bool) -> Path:
    if not whole and path.suffix not in (*WEIGHTS, *GRAPHS, WHOLE):
        endings = ", ".join((*WEIGHTS, *GRAPHS, WHOLE))
        raise ConfigError(f"{str(path)!r} has no known format; end it in {endings}, or in / for a folder")
    if dtype is not None and (whole or path.suffix == WHOLE):
        raise ConfigError(
            f"{path.name} with dtype={dtype!r}: a whole checkpoint keeps what was trained; leave dtype out"
        )
    if dtype is not None:
        check_choice("dtype", dtype, tuple(DTYPES))
    missing = [name for name in _PACKAGES.get(path.suffix, ()) if importlib.util.find_spec(name) is None]
    if not path.parent.is_dir():
        raise CheckpointError(
            f"{path} cannot be written: there is no folder {path.parent}; make it, or give another one"
        )
    if whole and path.is_dir() and not is_folder(str(path)):
        raise CheckpointError(f"{path} is a folder already, and no checkpoint; give the name of a new one")
    if missing:
        raise ConfigError(f"{path.name} is written by packages that are not installed: pip install {' '.join(missing)}")
    return path


def _trained_dtype(amp: Any) -> torch.dtype | None:
    """Returns the dtype of all floating weights at O3, else None; a file of O3 holds fp32 for weights that no step has changed."""
    if not isinstance(amp, dict) or amp.get("level") != "O3":
        return None
    dtype = getattr(torch, str(amp.get("cast_model_type")), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _converted(value: Any, dtype: torch.dtype | None) -> Any:
    """Returns a contiguous copy on the CPU, of ``dtype`` if the tensor is floating; any other value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    target_dtype = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return value.detach().to(device="cpu", dtype=target_dtype, copy=True).contiguous()


def _dtypes(weights: dict[str, Any]) -> str:
    floating = {
        value.dtype for value in weights.values() if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    return ", ".join(sorted(str(one).removeprefix("torch.") for one in floating)) or "no floating tensors"


def _module(
    kind: type[TrainingModule], checkpoint: str, weights: dict[str, Any], dtype: torch.dtype | None
) -> TrainingModule:
    """Returns the module with ``weights`` assigned as they are: copying them in would cast them to the module's dtype.

    What a file leaves out, of a base model, gets ``dtype`` too.
    """
    module = kind.load_from_checkpoint(checkpoint).eval()
    named: dict[str, Any] = with_names_of({"state_dict": weights}, module)["state_dict"]
    base = {name: _converted(value, dtype) for name, value in module.state_dict().items() if name not in named}
    module.load_state_dict({**base, **named}, strict=False, assign=True)
    return module


def _program(module: TrainingModule, inputs: Sequence[Tensor]) -> torch.export.ExportedProgram:
    example: Any = tuple(inputs) or module.example_input_array
    if example is None:
        raise ConfigError(
            f"forward of {type(module).__name__} needs an example of its inputs: give their shapes (--input 2,3,224,224, integers "
            "as 2,128:int64), or set "
            "self.example_input_array in __init__"
        )
    tensors = example if isinstance(example, tuple) else (example,)
    dtype = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)
    arguments = tuple(one.cpu().to(dtype) if one.is_floating_point() else one.cpu() for one in tensors)
    _check_forward(module, arguments)
    batches: Any = tuple({0: torch.export.Dim.AUTO} if one.ndim else None for one in arguments)
    with torch.no_grad():
        return torch.export.export(module, arguments, dynamic_shapes=batches)


def example_input(text: str) -> Tensor:
    """Returns an input with the sizes, and the dtype, of ``--input``: random floating values, or zeros, which any embedding has.

    Raises :class:`ConfigError` for a text that names none.
    """
    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    if not isinstance(dtype, torch.dtype) or not all(size.isdecimal() for size in shape.split(",")):
        raise ConfigError(
            f"--input {text}: write sizes with commas between them, as in 2,3,224,224, and a dtype of torch behind a colon if it "
            "is not float32, as in 2,128:int64"
        )
    sizes = [int(size) for size in shape.split(",")]
    make = torch.randn if dtype.is_floating_point or dtype.is_complex else torch.zeros
    return make(sizes, dtype=dtype, device="cpu")


def _check_forward(module: TrainingModule, arguments: tuple[Tensor, ...]) -> None:
    """Calls ``forward``; raises :class:`ConfigError` if it fails on the given inputs."""
    try:
        with torch.no_grad():
            module(*arguments)
    except Exception as error:
        forward = f"{type(module).__name__}.forward{inspect.signature(module.forward)}"
        example = module.example_input_array
        fits = "" if example is None else f", such as its example_input_array: {_shapes(example)}"
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{forward} does not take an input of {_shapes(arguments)}: {reason}; give each input's sizes as the module takes "
            f"them{fits} (--input 2,3,224,224, once for each; integers as 2,128:int64)"
        ) from error


def _shapes(inputs: Any) -> str:
    """Returns the sizes of tensors as text in the form of --input, with their dtypes."""
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    return " and ".join(
        f"{','.join(map(str, one.shape)) or 'no dimensions'} ({str(one.dtype).removeprefix('torch.')})"
        for one in tensors
    )


def _write_weights(file: Path, suffix: str, weights: dict[str, Any]) -> None:
    if suffix == ".pt":
        torch.save(weights, file)
        return
    others = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConfigError(f"safetensors holds only tensors, not {', '.join(others)}; write a .pt file")
    from safetensors.torch import save_file

    save_file(weights, file, metadata={"format": "pt"})


def _write_program(file: Path, suffix: str, program: torch.export.ExportedProgram) -> None:
    if suffix == ".pt2":
        torch.export.save(program, file)
        return
    graph = torch.onnx.export(program, verbose=False)
    assert graph is not None
    graph.save(file)


def _write_and_rename(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a temporary file with ``write``, and renames it to ``path`` when it is complete; raises CheckpointError."""
    unfinished = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        write(unfinished)
        unfinished.chmod(mode)  # safetensors creates files that only their owner can read
        unfinished.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}; give another file") from error
    finally:
        unfinished.unlink(missing_ok=True)
