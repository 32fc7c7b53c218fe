"""Writes a checkpoint folder in the background: selects this rank's content for copying, and writes the copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.ops.shards import local
from fabricamp.torch_private import with_part

if TYPE_CHECKING:
    from fabricamp.strategies.side_process_group import SideProcessGroup


class StagedFolder:
    """``own`` has this rank's shards of ``state``, on rank 0 also all other values; pass a copy of it to :meth:`write`."""

    def __init__(self, path: str, state: dict[str, Any], beside: SideProcessGroup) -> None:
        from fabricamp.checkpoint.shards import split

        rest, self._shards = split(state)
        self._path = path
        self._beside = beside
        self.step: int = state.get("global_step", 0)
        self.own = {"rest": rest if beside.rank == 0 else {}, "parts": [local(one) for one in self._shards.values()]}

    def write(self, copied: dict[str, Any]) -> None:
        """Writes the folder from a copy of ``own``; every rank calls it in a thread."""
        from fabricamp.checkpoint.folder import write_parts

        pairs = zip(self._shards.items(), copied["parts"], strict=True)
        parts = {name: with_part(shard, part) for (name, shard), part in pairs}
        write_parts(self._path, copied["rest"], parts, self._beside)
