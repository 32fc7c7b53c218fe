"""Translates other checkpoints to fabricamp's keys: Lightning 2.x's, and apex's file ``{'model', 'optimizer', 'amp'}``."""

from __future__ import annotations

import re
from typing import Any

import torch

from fabricamp.checkpoint.lightning import VERSION
from fabricamp.errors import CheckpointError

_APEX = frozenset({"model", "optimizer", "amp"})


def translated(state: dict[str, Any]) -> dict[str, Any]:
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
            f"a checkpoint with the keys {', '.join(map(repr, state)):.300} is not laid out as its library does "
            f"({type(error).__name__}: {error}); use an older one"
        ) from error
    return state


def fit_names(weights: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Returns ``weights`` renamed to ``names``: without DistributedDataParallel's ``module.``, and with a submodule's prefix.

    An apex script saves its network, which may be ``self.net`` of a TrainingModule.  If no prefix fits, names stay the same.
    """
    if weights and all(name.startswith("module.") for name in weights):
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    prefixes = {"", *(name[: name.index(".") + 1] for name in names if "." in name)}
    fitting = [prefix for prefix in sorted(prefixes) if {prefix + name for name in weights} == names]
    return {f"{fitting[0]}{name}": value for name, value in weights.items()} if fitting else weights


def apex_scales(amp: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns apex's ``amp.state_dict()``: the scale of each loss, and the number of steps since its last change.

    ``amp`` is a Precision's ``state_dict()``; without dynamic scaling there is one constant scale.
    """
    scalers = amp.get("scaler", {}).get("scalers")
    if scalers is None:
        scale = amp.get("loss_scale", 1.0)
        scalers = [{"scale": 1.0 if scale == "dynamic" else scale, "growth": 0}]
    return {
        f"loss_scaler{index}": {"loss_scale": float(one["scale"]), "unskipped": int(one["growth"])}
        for index, one in enumerate(scalers)
    }


def _from_lightning(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a Lightning checkpoint with fabricamp's keys.

    Lightning counts optimizer steps; a manual loop with several optimizers is assumed to step in every batch.
    """
    result = {**state, "source": "lightning"}
    loop = state.get("loops", {}).get("fit_loop", {})
    position: dict[str, Any] = {"epoch": state.get("epoch", 0)}
    if "epoch_progress" in loop:
        epochs, batches = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]
        in_epoch = epochs["ready"] > epochs["processed"]
        # The file may be from the validation after an epoch's last batch, or from the epoch's end: Lightning steps its schedulers
        # after both.
        ending = bool(batches["is_last_batch"]) if in_epoch else epochs["processed"] > epochs["completed"]
        within = in_epoch and not ending
        position = {
            "epoch": int(epochs["processed"]) + int(in_epoch and ending),
            "batch_idx": int(batches["current"]["processed"]) if within else 0,
            "batches_done": int(batches["total"]["processed"]),
            "schedules_due": ending,
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


def _from_apex(state: dict[str, Any]) -> dict[str, Any]:
    optimizers = state["optimizer"]
    return {
        "source": "apex",
        "state_dict": state["model"],
        "optimizer_states": list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers],
        "amp": _of_apex_scalers(state["amp"]),
    }


def _of_apex_scalers(amp: dict[str, Any]) -> dict[str, Any]:
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
    known = StepStatus(applied=True, scale=scalers[0]["scale"], loss=float("nan"), applied_steps=0, skipped_steps=0)
    return {
        "loss_scale": "dynamic",
        "scaler": {
            "window": scalers[0],
            "scalers": scalers,
            "ring": torch.zeros(1, StepState.WORDS, dtype=torch.int32, device="cpu"),
            "windows": 0,
            "known": known._asdict(),
        },
    }
