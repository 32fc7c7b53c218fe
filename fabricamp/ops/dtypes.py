"""The half dtypes, defined once."""

from __future__ import annotations

from typing import Final

import torch

HALF_DTYPES: Final = frozenset({torch.float16, torch.bfloat16})
