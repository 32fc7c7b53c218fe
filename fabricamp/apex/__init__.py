"""apex's API on fabricamp's implementations: ``from fabricamp.apex import amp``, or :func:`install` and ``import apex``.

It contains only names, global state and adapters.  Scripts run unchanged under ``python -m fabricamp.apex script.py``.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any, Final

from fabricamp.apex.install import install

if TYPE_CHECKING:
    from fabricamp.apex import (
        RNN,
        amp,
        contrib,
        fp16_utils,
        fused_dense,
        mlp,
        multi_tensor_apply,
        normalization,
        optimizers,
        parallel,
    )

__all__ = [
    "RNN",
    "DeprecatedFeatureWarning",
    "amp",
    "check_cudnn_version_and_warn",
    "contrib",
    "deprecated_warning",
    "fp16_utils",
    "fused_dense",
    "install",
    "mlp",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
]


class DeprecatedFeatureWarning(FutureWarning):
    """The category of the warnings of :func:`deprecated_warning`."""


def deprecated_warning(msg: str) -> None:
    """Issues the warning ``msg``, on rank 0 only."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=2)


def check_cudnn_version_and_warn(global_option: str, required_cudnn_version: int) -> bool:
    """Returns whether cuDNN is at least of ``required_cudnn_version``; if not, warns that ``global_option`` needs this version."""
    import torch

    version: int = (torch.backends.cudnn.version() or 0) if torch.backends.cudnn.is_available() else 0
    if version >= required_cudnn_version:
        return True
    found = f"cuDNN {version}" if version else "no cuDNN"
    warnings.warn(f"{global_option} needs cuDNN {required_cudnn_version}; found: {found}", stacklevel=2)
    return False


# The names that are not defined above are modules.
_PARTS: Final = frozenset(__all__).difference(globals())


def __getattr__(name: str) -> Any:
    # Imported on first use, so that a script that needs one part does not wait for the import of all.
    if name in _PARTS:
        return importlib.import_module(f"fabricamp.apex.{name}")
    from fabricamp.apex._not_offered import NOT_OFFERED
    from fabricamp.errors import nearest

    if f"apex.{name}" in NOT_OFFERED:
        raise AttributeError(f"fabricamp.apex has no {name}: {NOT_OFFERED[f'apex.{name}']} (fabricamp help from-apex)")
    raise AttributeError(f"module 'fabricamp.apex' has no attribute {name!r}{nearest(name, _PARTS)}")


def __dir__() -> list[str]:
    return __all__
