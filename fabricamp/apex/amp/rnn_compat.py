"""apex's module for recurrent networks under O1; torch.autocast casts them."""

from __future__ import annotations


def has_old_rnns() -> bool:
    """Returns False: torch's recurrent layers are not those of before torch 1.0."""
    return False
