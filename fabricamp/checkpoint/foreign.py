"""Checkpoints of other libraries: Lightning 2.x's, and apex's file ``{'model', 'optimizer', 'amp'}``.

First :func:`translated`, which gives a file that they wrote fabricamp's keys; then what they need to load a file of fabricamp.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from fabricamp._utils.types import StateDict
from fabricamp.checkpoint.compiled_names import plain_name
from fabricamp.errors import CheckpointError

VERSION = "pytorch-lightning_version"
"""The key by which Lightning recognises a checkpoint."""

_LAYOUT = "2.6.0"
"""The Lightning version whose layout the counters follow."""

_APEX = frozenset({"model", "optimizer", "amp"})


def translated(state: StateDict, path: str) -> StateDict:
    """Returns ``state`` with fabricamp's keys if Lightning or apex wrote it, else ``state`` itself.

    Raises :class:`CheckpointError` if it has their keys, but not their layout.
    """
    try:
        if VERSION in state and "fabricamp_version" not in state:
            return _from_lightning(state)
        if "state_dict" not in state and state.keys() >= _APEX:
            return _from_apex(state)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}, with the keys {', '.join(map(repr, state)):.300}, does not have its library's layout "
            f"({type(error).__name__}: {error}); use an older one"
        ) from None
    return state


def _from_lightning(state: StateDict) -> StateDict:
    """Returns a Lightning checkpoint with fabricamp's keys.

    Lightning counts optimizer steps; a manual loop with several optimizers is assumed to step in every batch.
    """
    result = {**state, "source": "lightning"}
    loop = state.get("loops", {}).get("fit_loop", {})
    position: StateDict = {"epoch": state.get("epoch", 0)}
    if "epoch_progress" in loop:
        epochs = loop["epoch_progress"]["current"]
        batches = loop["epoch_loop.batch_progress"]
        current = batches["current"]
        in_epoch = epochs["ready"] > epochs["processed"]
        # Lightning leaves the epoch's end out if the file is from a hook of its last batch.  After the validation that follows this
        # batch the end is still to come, and after an error in the batch the batch itself.
        in_last_hook = in_epoch and bool(batches["is_last_batch"]) and current["completed"] < current["processed"]
        position = {
            "epoch": int(epochs["processed"]) + int(in_last_hook),
            "batch_idx": int(current["processed"]) if in_epoch and not in_last_hook else 0,
            "batches_done": int(batches["total"]["processed"]),
        }
        if len(state.get("optimizer_states", ())) > 1:
            result["global_step"] = min(int(state["global_step"]), position["batches_done"])
    result["loops"] = {**state.get("loops", {}), "fit": position}
    if "amp_scaling_state" in state:  # Lightning 1 with apex
        result["amp"] = _of_apex_scalers(state["amp_scaling_state"])
    scaler = state.get("MixedPrecision") or state.get("native_amp_scaling_state")
    if scaler:
        result["amp"] = _scaler_state([(scaler["scale"], scaler["_growth_tracker"])])
    return result


def _from_apex(state: StateDict) -> StateDict:
    optimizers = state["optimizer"]
    return {
        "source": "apex",
        "state_dict": state["model"],
        "optimizer_states": list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers],
        "amp": _of_apex_scalers(state["amp"]),
    }


def _of_apex_scalers(amp: StateDict) -> dict[str, Any]:
    scalers = {
        int(number[1]): value for name, value in amp.items() if (number := re.fullmatch(r"loss_scaler(\d+)", name))
    }
    return _scaler_state([(scalers[key]["loss_scale"], scalers[key]["unskipped"]) for key in sorted(scalers)])


def _scaler_state(scales: list[tuple[float, int]]) -> dict[str, Any]:
    """Returns the state of a Precision with these (scale, applied steps since its last change), without pending step statuses."""
    from fabricamp.ops import StepState
    from fabricamp.precision import StepStatus

    if not scales:
        return {}
    scalers = [{"scale": float(scale), "growth": int(growth)} for scale, growth in scales]
    last_status = StepStatus(
        applied=True, scale=scalers[0]["scale"], loss=float("nan"), applied_steps=0, skipped_steps=0
    )
    return {
        "loss_scale": "dynamic",
        "scaler": {
            "step_state": scalers[0],
            "scalers": scalers,
            "ring": torch.zeros(1, StepState.WORDS, dtype=torch.int32, device="cpu"),
            "steps": 0,
            "last_status": last_status._asdict(),
        },
    }


def fit_names(weights: StateDict, names: set[str]) -> StateDict:
    """Returns ``weights`` renamed to ``names``: without DistributedDataParallel's ``module.``, and with a submodule's prefix.

    An apex script saves its network, which may be ``self.net`` of a TrainingModule, and either may be compiled.  If no prefix fits,
    names stay the same.
    """
    plain = {plain_name(name): value for name, value in weights.items()}
    if plain and all(name.startswith("module.") for name in plain):
        plain = {name.removeprefix("module."): value for name, value in plain.items()}
    own = {plain_name(name): name for name in names}
    prefixes = {"", *(name[: name.index(".") + 1] for name in own if "." in name)}
    fitting = [prefix for prefix in sorted(prefixes) if {prefix + name for name in plain} == own.keys()]
    return {own[f"{fitting[0]}{name}"]: value for name, value in plain.items()} if fitting else plain


def apex_scales(amp: StateDict) -> dict[str, dict[str, Any]]:
    """Returns apex's ``amp.state_dict()``: the scale of each loss, and the number of steps since its last change.

    ``amp`` is a Precision's ``state_dict()``; without dynamic scaling there is one constant scale.
    """
    scalers = amp.get("scaler", {}).get("scalers")
    if scalers is None:
        scale = amp.get("loss_scale", 1.0)
        scalers = [{"scale": 1.0 if scale == "dynamic" else scale, "growth": 0}]
    return {
        f"loss_scaler{index}": {"loss_scale": float(scaler["scale"]), "unskipped": int(scaler["growth"])}
        for index, scaler in enumerate(scalers)
    }


def lightning_keys(
    *, epochs: int, batches: int, batches_in_all: int, steps: int, automatic: bool, ended: bool, ending: bool
) -> dict[str, Any]:
    """Returns dotted keys and values for finished ``epochs``, ``batches`` of the next epoch, and ``steps``.

    ``ended``: the file is from the end of an epoch, and not from before or after training.  ``ending``: it is from between an
    epoch's last batch and the epoch's end.  The last batch then counts as not completed, and Lightning resumes with the next epoch.
    """
    none = _progress(0)
    idle = {"state_dict": {}, "batch_progress": {"total": none, "current": none, "is_last_batch": False}}
    begun = _progress(epochs, ready=epochs + (batches > 0))
    optimizer = {
        "step": {"total": _counts(steps * automatic), "current": _counts(0)},
        "zero_grad": {"total": _started(steps * automatic), "current": _started(0)},
    }
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": steps - ending},
        "epoch_loop.batch_progress": {
            "total": {**_progress(batches_in_all), "completed": batches_in_all - ending},
            "current": {**_progress(batches), "completed": batches - ending},
            "is_last_batch": ended or ending,
        },
        "epoch_loop.scheduler_progress": {"total": _counts(0), "current": _counts(0)},
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer},
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": {
            "total": _counts(steps * (not automatic)),
            "current": _counts(0),
        },
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": idle["batch_progress"],
        "epoch_progress": {"total": begun, "current": begun},
    }
    return {
        VERSION: _LAYOUT,
        "loops.fit_loop": fit,
        "loops.validate_loop": idle,
        "loops.test_loop": idle,
        "loops.predict_loop": {"state_dict": {}, "batch_progress": {"total": none, "current": none}},
    }


def _progress(done: int, ready: int | None = None) -> dict[str, int]:
    ready = done if ready is None else ready
    return {"ready": ready, "started": ready, "processed": done, "completed": done}


def _counts(done: int) -> dict[str, int]:
    return {"ready": done, "completed": done}


def _started(done: int) -> dict[str, int]:
    return {**_counts(done), "started": done}
