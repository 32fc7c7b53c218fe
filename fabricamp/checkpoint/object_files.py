"""Files of states with objects: as ``torch.save`` would write them; fabricamp reads them without opening the objects."""

from __future__ import annotations

import contextlib
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

import torch

from fabricamp.checkpoint import closed_pickle
from fabricamp.checkpoint.archive import Archive
from fabricamp.checkpoint.packing import objects_in
from fabricamp.errors import CheckpointError
from fabricamp.torch_private import load_zipfile, open_zipfile_reader

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fabricamp._utils.types import StateDict

KEY: Final = closed_pickle.KEY


def save(state: StateDict, file: IO[bytes]) -> None:
    """Writes ``state`` as ``torch.save`` does, with the objects of its references in their places."""
    references = [*objects_in(state).values()]
    # Those of a file of version 0.2.0 keep their form: their bytes have other references to tensors.
    if references and all(reference.objects.first is not None for reference in references):
        torch.save(state, file, pickle_module=closed_pickle)
    else:
        torch.save(state, file)


def without_key(state: StateDict) -> StateDict:
    """Returns ``state``, if plain torch has loaded it, without the key of a file's objects; raises if the key is the user's own."""
    if KEY not in state:
        return state
    value = state[KEY]
    if not isinstance(value, list) or len(value) < 8 or not all(type(number) is int for number in value[:4]):
        raise CheckpointError(f"a checkpoint's key {KEY!r} is fabricamp's own; give your value another name")
    return {key: value for key, value in state.items() if key != KEY}


def has_objects(source: str | IO[bytes] | Archive) -> bool:
    """Returns whether the file begins as one that :func:`save` wrote with objects."""
    if isinstance(source, Archive):
        return source.pickle.startswith(closed_pickle.BEGIN)
    if not isinstance(source, str):
        source.seek(0)
    if not zipfile.is_zipfile(source):
        return False
    with zipfile.ZipFile(source) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if not names:
            return False
        with archive.open(names[0]) as member:
            return member.read(len(closed_pickle.BEGIN)) == closed_pickle.BEGIN


def load_closed(source: str | IO[bytes] | Archive, map_location: object, *, mapped: bool) -> StateDict:
    """Returns the state that :func:`save` has written, with references; raises ``zipfile.BadZipFile`` if it is damaged."""
    memory = None
    if mapped and isinstance(source, str):
        memory = torch.UntypedStorage.from_file(source, False, Path(source).stat().st_size)
    try:
        # Not by torch.load: without weights_only it gives a TorchScript archive to torch.jit, and a tar file to its oldest loader,
        # whatever the pickle module.
        with _reader_of(source) as reader:
            state = load_zipfile(reader, map_location, closed_pickle, overall_storage=memory, encoding="utf-8")
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - the pickle may hold anything
        raise zipfile.BadZipFile(f"its plain values cannot be read: {type(error).__name__}") from None
    return cast("StateDict", state)


def _reader_of(source: str | IO[bytes] | Archive) -> AbstractContextManager[Any]:
    if isinstance(source, Archive):
        return contextlib.nullcontext(source)
    if not isinstance(source, str):
        source.seek(0)
    return open_zipfile_reader(source)
