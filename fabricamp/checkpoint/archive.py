"""A torch zip file in host memory: each member is read once, into the memory in which its tensor stays, and checked meanwhile.

:class:`ArchiveFile` reads, and :class:`Archive` has what was read, on whichever rank: torch loads from it as from a file.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from typing import IO, TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricamp.checkpoint.checksum import check_members, is_sealed
from fabricamp.torch_private import load_zipfile, weights_only_pickle

if TYPE_CHECKING:
    from collections.abc import Mapping

_PICKLE: Final = "data.pkl"
_TORCHSCRIPT: Final = "constants.pkl"
_LOCAL_HEADER: Final = 30  # bytes, before a member's name
_PART: Final = 8 << 20  # bytes that are read at once, and checked while the processor has them at hand


class Archive:
    """The members of a torch zip file, by name and size; their bytes are what is written into :attr:`memories`.

    It has the methods that torch's loader calls of its own reader of zip files.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._members = {name: torch.UntypedStorage(size, device="cpu") for name, size in sizes.items()}
        self._folder = next(iter(sizes)).partition("/")[0]

    @property
    def memories(self) -> list[Tensor]:
        """The bytes of each member, in the order of the names, in the memory that tensors then have."""
        return [_bytes_of(member) for member in self._members.values()]

    @property
    def pickle(self) -> bytes:
        """The pickle of everything but the tensors' values."""
        return self.get_record(_PICKLE)

    def load(self, map_location: Any, *, weights_only: bool) -> Any:
        """Returns what ``torch.load`` of the file does; its tensors have the memory of the members."""
        module = weights_only_pickle if weights_only else pickle
        return load_zipfile(self, map_location, module, encoding="utf-8")

    def without_tensors(self) -> io.BytesIO:
        """Returns a zip file that has the pickle alone."""
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as small:
            small.writestr(f"{self._folder}/version", b"3\n")
            small.writestr(f"{self._folder}/{_PICKLE}", self.pickle)
        file.seek(0)
        return file

    # -- torch's reader of zip files -----------------------------------------------------------------------------------------------

    def has_record(self, name: str) -> bool:
        """Returns whether there is a member of that name."""
        return f"{self._folder}/{name}" in self._members

    def get_record(self, name: str) -> bytes:
        """Returns the bytes of a member; raises ``zipfile.BadZipFile`` if it is missing."""
        return _bytes_of(self._member(name)).numpy().tobytes()

    def get_storage_from_record(self, name: str, size: int, _: type) -> Tensor:
        """Returns the bytes of a member, ``size`` of them, without a copy."""
        member = self._member(name)
        if member.nbytes() != size:
            raise zipfile.BadZipFile(f"{name} has another length than its tensors")
        return _bytes_of(member)

    def serialization_id(self) -> str:
        """Returns the number that torch gives to a file when it is saved."""
        name = ".data/serialization_id"
        return self.get_record(name).decode("ascii", "replace") if self.has_record(name) else ""

    def _member(self, name: str) -> torch.UntypedStorage:
        try:
            return self._members[f"{self._folder}/{name}"]
        except KeyError:
            raise zipfile.BadZipFile(f"it has no member {name}") from None


class ArchiveFile:
    """An open torch zip file, whose members are read in the order in which they lie there.

    Making one reads the directory and the pickle, and raises ``zipfile.BadZipFile`` if they are damaged.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._zip = zipfile.ZipFile(file)
        check_members(self._zip)
        self.sealed = is_sealed(file)
        """Whether the file has a checksum footer."""
        self._members = sorted(self._zip.infolist(), key=lambda member: member.header_offset)
        self._at = 0  # the place in the file of the member's bytes that come next
        self._checksum = 0

    @property
    def is_plain(self) -> bool:
        """Whether its members lie in the file as they are, and it is not a TorchScript archive."""
        length = self._file.seek(0, os.SEEK_END)
        folder = self._members[0].filename.partition("/")[0] if self._members else ""
        names = {member.filename for member in self._members}
        return (
            f"{folder}/{_PICKLE}" in names
            and f"{folder}/{_TORCHSCRIPT}" not in names
            and all(
                member.compress_type == zipfile.ZIP_STORED
                and member.file_size == member.compress_size
                # The directory may say anything, and memory of this size is asked for.
                and member.header_offset + member.file_size <= length
                for member in self._members
            )
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The members' sizes in bytes by name, in the order in which they lie in the file."""
        return {member.filename: member.file_size for member in self._members}

    def read(self) -> Archive:
        """Returns what the file holds."""
        archive = Archive(self.sizes)
        memories = archive.memories
        for index, memory in enumerate(memories):
            size = memory.numel()
            for start in range(0, max(size, 1), _PART):
                self.read_into(memory, index, start, min(start + _PART, size))
        return archive

    def read_into(self, memory: Tensor, index: int, start: int, stop: int) -> None:
        """Reads bytes ``start`` to ``stop`` of a member into its ``memory``; parts are read in order.

        Raises ``zipfile.BadZipFile`` if the checksum of what was read is wrong, once the member is complete.
        """
        member = self._members[index]
        if start == 0:
            self._at = self._begin(member)
            self._checksum = 0
        part: memoryview = memory[start:stop].numpy().data
        self._file.seek(self._at)
        done = 0
        while done < len(part):
            count = _read_into(self._file, part[done:])
            if not count:
                raise EOFError
            done += count
        self._at += len(part)
        self._checksum = zlib.crc32(part, self._checksum)
        if stop == member.file_size and self._checksum != member.CRC:
            raise zipfile.BadZipFile(f"the checksum of {member.filename} is wrong")

    def _begin(self, member: zipfile.ZipInfo) -> int:
        """Returns where the bytes of a member begin, once its header is compared with the directory."""
        try:
            self._zip.open(member).close()
        except zipfile.BadZipFile:
            raise zipfile.BadZipFile(f"the checksum of {member.filename} is wrong") from None
        self._file.seek(member.header_offset)
        header = self._file.read(_LOCAL_HEADER)
        name = int.from_bytes(header[26:28], "little")
        extra = int.from_bytes(header[28:30], "little")
        return member.header_offset + _LOCAL_HEADER + name + extra


def _read_into(file: IO[bytes], part: memoryview) -> int:
    """Reads at most as many bytes as ``part`` has into it; returns their number."""
    if hasattr(file, "readinto"):
        return int(file.readinto(part) or 0)
    content = file.read(len(part))
    part[: len(content)] = content
    return len(content)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
