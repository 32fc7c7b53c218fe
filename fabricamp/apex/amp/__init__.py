"""apex's mixed precision (amp) on fabricamp's precisions: ``initialize``, ``scale_loss`` and related names."""

from fabricamp.apex.amp import amp as amp
from fabricamp.apex.amp import compat as compat
from fabricamp.apex.amp import frontend as frontend
from fabricamp.apex.amp import handle as handle
from fabricamp.apex.amp import lists as lists
from fabricamp.apex.amp import opt as opt
from fabricamp.apex.amp import rnn_compat as rnn_compat
from fabricamp.apex.amp import scaler as scaler
from fabricamp.apex.amp import utils as utils
from fabricamp.apex.amp import wrap as wrap
from fabricamp.apex.amp._amp_state import _amp_state as _amp_state
from fabricamp.apex.amp._amp_state import master_params as master_params
from fabricamp.apex.amp.amp import float_function as float_function
from fabricamp.apex.amp.amp import half_function as half_function
from fabricamp.apex.amp.amp import init as init
from fabricamp.apex.amp.amp import promote_function as promote_function
from fabricamp.apex.amp.amp import register_float_function as register_float_function
from fabricamp.apex.amp.amp import register_half_function as register_half_function
from fabricamp.apex.amp.amp import register_promote_function as register_promote_function
from fabricamp.apex.amp.frontend import initialize as initialize
from fabricamp.apex.amp.frontend import load_state_dict as load_state_dict
from fabricamp.apex.amp.frontend import shutdown as shutdown
from fabricamp.apex.amp.frontend import state_dict as state_dict
from fabricamp.apex.amp.handle import disable_casts as disable_casts
from fabricamp.apex.amp.handle import scale_loss as scale_loss
from fabricamp.apex.amp.utils import cast_to_model_type as cast_to_model_type
