"""Facts of GPUs that a plan needs: their memory, and what torch's matrix products keep for themselves."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from fabricamp.errors import ConfigError, nearest

_MIB: Final = 2**20


class Card(NamedTuple):
    """A GPU: its name, its memory in bytes as CUDA reports it, and cuBLAS's workspace for each handle and stream."""

    name: str
    memory: int
    workspace: int


_HOPPER: Final = 32 * _MIB
_OTHERS: Final = 8 * _MIB + 128 * 1024  # ":4096:2:16:8", torch's default

CARDS: Final = {
    card.name: card
    for card in (
        Card("H200", 143_771 * _MIB - 490 * _MIB, _HOPPER),
        Card("H100", 81_559 * _MIB - 450 * _MIB, _HOPPER),
        Card("H100-94GB", 95_830 * _MIB - 450 * _MIB, _HOPPER),
        Card("H20", 97_871 * _MIB - 450 * _MIB, _HOPPER),
        Card("B200", 183_359 * _MIB - 600 * _MIB, _HOPPER),
        Card("A100", 81_920 * _MIB - 770 * _MIB, _OTHERS),
        Card("A100-40GB", 40_960 * _MIB - 560 * _MIB, _OTHERS),
        Card("A10G", 23_028 * _MIB - 300 * _MIB, _OTHERS),
        Card("A6000", 49_140 * _MIB - 500 * _MIB, _OTHERS),
        Card("L4", 23_034 * _MIB - 490 * _MIB, _OTHERS),
        Card("L40S", 46_068 * _MIB - 690 * _MIB, _OTHERS),
        Card("RTX-4090", 24_564 * _MIB - 400 * _MIB, _OTHERS),
        Card("RTX-5090", 32_607 * _MIB - 400 * _MIB, _OTHERS),
        Card("RTX-3090", 24_576 * _MIB - 300 * _MIB, _OTHERS),
        Card("V100", 16_384 * _MIB - 220 * _MIB, _OTHERS),
        Card("V100-32GB", 32_768 * _MIB - 270 * _MIB, _OTHERS),
        Card("T4", 15_360 * _MIB - 440 * _MIB, _OTHERS),
    )
}
"""By name; memory is that of nvidia-smi less what the driver keeps."""


def card_of(name: str | None) -> Card:
    """Returns the card of this name; None: the present GPU.  Raises :class:`ConfigError` with the table if there is none."""
    known = ", ".join(CARDS)
    if name is None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"plan needs to know the GPU, and this machine has none; give card= (--card on the command line), one of {known}"
            )
        facts = torch.cuda.get_device_properties(0)
        hopper_or_later = torch.cuda.get_device_capability(0) >= (9, 0)
        return Card(facts.name, facts.total_memory, _HOPPER if hopper_or_later else _OTHERS)
    found = {key.lower(): card for key, card in CARDS.items()}.get(str(name).lower())
    if found is None:
        raise ConfigError(f"card={name!r} is not known{nearest(str(name), list(CARDS))} (known: {known})")
    return found
