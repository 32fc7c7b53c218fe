"""Recurrent networks under O1, which torch.autocast casts by itself."""

from __future__ import annotations


def has_old_rnns() -> bool:
    """Returns whether torch's recurrent layers are those of before 1.0: no."""
    return False
