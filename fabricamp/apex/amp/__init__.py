"""apex's amp over fabricamp's precisions: ``initialize``, ``scale_loss``, and the names around them."""

from fabricamp.apex.amp import amp, compat, frontend, handle, lists, opt, rnn_compat, scaler, utils, wrap
from fabricamp.apex.amp._amp_state import _amp_state, master_params
from fabricamp.apex.amp.amp import (
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from fabricamp.apex.amp.frontend import initialize, load_state_dict, shutdown, state_dict
from fabricamp.apex.amp.handle import disable_casts, scale_loss
from fabricamp.apex.amp.utils import cast_to_model_type

__all__ = [
    "_amp_state",
    "amp",
    "cast_to_model_type",
    "compat",
    "disable_casts",
    "float_function",
    "frontend",
    "half_function",
    "handle",
    "init",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "opt",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "rnn_compat",
    "scale_loss",
    "scaler",
    "shutdown",
    "state_dict",
    "utils",
    "wrap",
]
