"""The tensor table: one launch updates any number of tensors of any size and dtype.

A row holds the tensors of one parameter (the parameter, its gradient, its state).  A column is one role (gradient, parameter, ...)
over all rows.  Each row is cut into chunks of ``CHUNK_SIZE`` elements; one thread block works on one chunk.  The addresses stay in
device memory; only those of column 0 (the gradients) are expected to change between steps.

The metadata is one int64 matrix: ``_lines`` on the host, ``_uploaded`` on the device.  A line of the matrix is one property of
all rows of the table: word ``lines[line * rows + row]``.  With C columns and K cells (kernels/common.cuh reads the same lines)::

    line          one int64 per row of the table
    ------------  -------------------------------------------------------------------------------------------
    0             number of the row's first chunk, in 0 ... chunks - 1 (= index of the block that works on it)
    1  _SIZE      number of elements; a row without elements still has one chunk
    2  _INFO      bits 0-7: kind     number of the row's dtypes among all kinds of the table
                  bit 8:    aligned  1 if the addresses of all columns are multiples of 16 bytes
                  bits 16+: group    number of the group whose scalars the row reads
    3  _COLUMNS   address of column 0 (gradient); 0: kernels skip the row
    4             address of column 1 (parameter); 0 here and below: the row does not have this column
    ...
    2 + C         address of column C - 1
    3 + C         address of cell 0 (one value, such as the step count); 0: the row does not have this cell
    ...
    2 + C + K     address of cell K - 1; if ``flags`` is this cell: an fp32, 0.0: kernels skip the row
    3 + C + K     number 0 of the row itself, such as the key of its draws; only in tables with numbers
    ...

A fused optimizer's columns are gradient, parameter, the rule's states, half copy; its cells are the rule's cells, a count of
steps or the scales of states that are codes (:func:`~fabricamp.ops.rules.cells_of`), then the flag.
Between steps only lines 2 and 3 are uploaded again; the addresses of a captured step are uploaded to a matrix of their own.
Beside the matrix, device memory holds the row of each chunk (int32), a counter of finished chunks per row (int32, see
``last_of_row`` in common.cuh), and the scalars (fp64, one line per group).
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from fabricamp.ops import bridge
from fabricamp.ops.bridge import Kind
from fabricamp.ops.layouts import Layouts, addresses, anchors, dtypes, elements_of, same_layout
from fabricamp.ops.shards import SharedRows
from fabricamp.ops.uploads import CAPTURES, is_capturing, lasting_memory, upload
from fabricamp.torch_private import are_at

CHUNK_SIZE: Final = 32768  # 16 Ki to 64 Ki are within 4 % of each other; this is best where tensors are many and small
THREADS: Final = 512
_SIZE: Final = 1
_INFO: Final = 2
_COLUMNS: Final = 3  # lines before the columns: first chunk, size, info
_CHANGING: Final = slice(
    _INFO, _COLUMNS + 1
)  # the lines that change between steps: alignment, and addresses of column 0
_ALIGNMENT: Final = 16
_MOST_TABLES: Final = 32
_dtype: Final = operator.attrgetter("dtype")
_device: Final[Callable[[Any], int]] = Tensor.get_device
_NUMBERS: Final = frozenset({float, int, bool})
_Struct: Final = bridge.structure("common.cuh", "Table")


class Table:
    """Rows of tensors on one device, ready for any kernel that takes their columns.

    ``columns`` are lists of equal length; an entry is None if the row does not have the column.  Kernels skip a row if its column
    0 is None.  ``cells`` are columns of single values (step counts) or of tensors of other shapes, ``numbers`` columns of numbers
    that stay (int64).  ``flags`` is the index of an fp32 cell: kernels skip the rows in which this cell is 0.  ``groups`` gives the
    group number of each row: the row reads the ``scalars`` of this group.
    ``shared``: describes the rows that are shards of tensors on several ranks.
    Column 0 is only read, unless a launch says otherwise (``first_written``); the other columns may be written.
    """

    def __init__(
        self,
        columns: Sequence[Sequence[Tensor | None]],
        *,
        device: torch.device,
        cells: Sequence[Sequence[Tensor | None]] = (),
        numbers: Sequence[Sequence[int]] = (),
        flags: int = -1,
        groups: Sequence[int] | None = None,
        chunk_size: int | None = None,
        shared: SharedRows | None = None,
    ) -> None:
        self.device = device
        self.shared = shared
        self._columns = [list(column) for column in columns]
        self._flag_cell = flags
        self._chunk_size = chunk_size or CHUNK_SIZE
        self._dense_copies: list[dict[int, _DenseCopy]] = [{} for _ in columns]
        """For each column: the dense copies, by row."""
        self.has_dense_copies = False
        """Whether a tensor has a dense copy: the table then needs the tensor, else the addresses of its tensors only."""
        self._anchors = anchors(self._columns)
        self._layouts = Layouts(self._anchors)
        self._kinds: dict[Kind, int] = {}
        self._kernels: dict[tuple[str, str], bridge.Kernel] = {}
        self._numbers: Tensor | None = None
        self._scalars: tuple[tuple[float | Tensor, ...], ...] = ()
        self.has_scalars = False
        """Whether :meth:`set_scalars` was called, and not :meth:`forget_scalars` since."""
        self._device_scalars: Tensor | None = None

        count = len(self._columns[0])
        self._groups = np.zeros(count, np.int64) if groups is None else np.asarray(groups, np.int64)
        first_number = _COLUMNS + len(self._columns) + len(cells)
        self._first_number = first_number if numbers else 0
        self._lines = np.zeros((first_number + len(numbers), count), np.int64)
        for index, of_rows in enumerate(numbers):
            self._lines[first_number + index] = of_rows
        self._lay_out_chunks()
        for index in range(1, len(self._columns)):
            self._set_addresses(index)
        for index, cell in enumerate(cells):
            line = _COLUMNS + len(self._columns) + index
            self._lines[line] = [0 if value is None else value.data_ptr() for value in cell]

        self.present: list[int] | None = None
        """The rows whose column 0 is not None; None: all rows."""
        self._all_rows = list(range(count))
        # What is known of column 0; empty lists if nothing is known, or if a row has no tensor there.
        self._pointers: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._devices: list[int] = []
        self._last_tuple: tuple[Tensor | None, ...] | None = None
        self._held = np.zeros(0, np.int64)
        self._whole: dict[int, Tensor] = {}
        """The addresses of column 0 in captured matrices without held rows, by the number of the capture."""

        self._uploaded = lasting_memory(self._lines.shape, torch.int64, device)
        upload(self._lines, self._uploaded)
        self._struct = _Struct()
        self._captures = CAPTURES.get(device.type)
        # The matrix and struct of eager steps, saved here while the table uses those of a capture.
        self._eager: tuple[Tensor, ctypes.Structure] | None = None
        self.captured: list[Tensor] = []
        """The metadata matrices of captures: a graph reads its matrix in each replay, so these are never written again."""
        self.refresh(self._columns[0])

    # -- the matrix ------------------------------------------------------------------------------------------------------------

    def _lay_out_chunks(self) -> None:
        sizes = [0 if anchor is None else elements_of(anchor) for anchor in self._anchors]
        chunks = np.maximum((np.asarray(sizes, np.int64) + self._chunk_size - 1) // self._chunk_size, 1)
        self._lines[0] = np.concatenate(([0], np.cumsum(chunks)[:-1])) if sizes else 0
        self._lines[_SIZE] = sizes
        rows = np.repeat(np.arange(len(sizes), dtype=np.int32), chunks)
        self._chunks = len(rows)
        words = lasting_memory((len(rows) + len(sizes),), torch.int32, self.device)
        upload(np.concatenate((rows, np.zeros(len(sizes), np.int32))), words)
        self._chunk_rows = words[: len(rows)]
        self._tickets = words[len(rows) :]

    def _set_addresses(self, index: int) -> None:
        """Writes the addresses of a column; a tensor with another layout than its row's is replaced by a dense copy."""
        dense_copies: dict[int, _DenseCopy] = {}
        addresses = self._lines[_COLUMNS + index]
        for row, tensor in enumerate(self._columns[index]):
            anchor = self._anchors[row]
            if tensor is None or anchor is None:
                addresses[row] = 0
                continue
            if tensor.device != self.device:
                raise ValueError(f"a table on {self.device} got a tensor on {tensor.device}; make one table per device")
            if same_layout(tensor, anchor):
                # An empty tensor has address 0, which would mean that the row does not have the column.
                addresses[row] = bridge.address_of(tensor) or _ALIGNMENT
                continue
            dense = torch.empty_like(anchor, dtype=tensor.dtype)
            dense_copies[row] = _DenseCopy(tensor.detach(), dense)
            addresses[row] = dense.data_ptr()
        self._dense_copies[index] = dense_copies
        self.has_dense_copies = any(self._dense_copies)

    def _describe(self) -> None:
        """Writes line ``_INFO``: each row's kind, alignment and group."""
        before = len(self._kinds)
        kinds = []
        for row in range(self.rows):
            tensors = [column[row] for column in self._columns]
            if tensors[0] is None:
                kinds.append(0)  # kernels skip this row, so its kind does not matter
                continue
            if len({tensor.is_complex() for tensor in tensors if tensor is not None}) > 1:
                raise ValueError(f"row {row} of a table has complex and real tensors")
            # Kernels read a complex row as real numbers, twice as many.
            kind = tuple([None if tensor is None else tensor.dtype.to_real() for tensor in tensors])
            kinds.append(self._kinds.setdefault(kind, len(self._kinds)))
        aligned = self._lines[_COLUMNS : _COLUMNS + len(self._columns)] % _ALIGNMENT == 0
        self._others_aligned = aligned[1:].all(axis=0)
        self._kinds_and_groups = np.asarray(kinds, np.int64) | (self._groups << 16)
        self._lines[_INFO] = self._kinds_and_groups | (aligned.all(axis=0).astype(np.int64) << 8)
        if len(self._kinds) != before:
            self._kernels.clear()  # they are compiled for the kinds

    # -- column 0, new in every step ---------------------------------------------------------------------------------------------

    def refresh(self, gradients: Sequence[Tensor | None], *, trust: bool = True) -> None:
        """Sets the tensors of column 0; uploads their addresses only if one of them has changed.

        ``trust=False`` checks the dtypes again even if no address has changed.  If ``gradients`` is the same tuple as in the last
        call, its addresses are assumed to be unchanged, without a look.  The table keeps no gradient alive, except those of such
        a tuple, and until :meth:`release` those with a dense copy.
        """
        if self._captures is not None and self._captures.under_way():
            self._refresh_captured(gradients)
            return
        if self._eager is not None:  # the first eager step after a capture
            self._uploaded, self._struct = self._eager
            self._eager = None
            self._last_tuple = None
            trust = False
        if trust and self._last_tuple is not None and gradients is self._last_tuple:
            return
        self._last_tuple = None
        # Nearly every step: the allocator gives backward the memory of the last step's gradients again.
        if trust and self._are_unmoved(gradients) and self._layouts.fit(gradients):
            self._keep_tuple(gradients)
            return
        pointers = addresses(gradients)
        # Dense copies belong to the tensors of the last call, so they have to be made again.
        if not trust or self._dense_copies[0] or not self._layouts.fit(gradients):
            self._set_unknown(gradients, pointers)
        elif pointers != self._pointers:
            # Where no address is that of a None, each gradient has to be of the dtype and on the device of the last one.
            if (
                -1 in pointers
                or list(map(_dtype, gradients)) != self._dtypes
                or list(map(_device, gradients)) != self._devices
            ):
                self._set_unknown(gradients, pointers)
            else:
                self._set_moved(pointers)
        self._keep_tuple(gradients)

    def _are_unmoved(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether each row has a gradient, at the address of the last one, whose values kernels read there."""
        if not self._dtypes or self._dense_copies[0] or len(gradients) != len(self._pointers):
            return False
        try:
            listed = gradients if isinstance(gradients, list) else list(gradients)
            return are_at(listed, self._pointers, self._all_rows)  # type: ignore[arg-type]
        except (AttributeError, RuntimeError):  # there is a None now, or a sparse gradient
            return False

    def _keep_tuple(self, gradients: Sequence[Tensor | None]) -> None:
        if isinstance(gradients, tuple) and not self._dense_copies[0]:
            self._last_tuple = gradients

    def _refresh_captured(self, gradients: Sequence[Tensor | None]) -> None:
        """Sets the tensors of launches that are being captured, in a new metadata matrix."""
        if self._eager is None:
            self._eager = self._uploaded, self._struct
        self._uploaded = lasting_memory(self._lines.shape, torch.int64, self.device)
        self._struct = _Struct()
        self.captured.append(self._uploaded)
        self._set_unknown(gradients, addresses(gradients))

    @property
    def holds_captured(self) -> bool:
        """Whether the last :meth:`refresh` was during a capture."""
        return self._eager is not None

    def _set_unknown(self, gradients: Sequence[Tensor | None], pointers: list[int]) -> None:
        """Sets column 0 from tensors about which nothing is known: addresses, dtypes, devices and layouts are read."""
        self._pointers = []  # nothing is known if this raises
        self._columns[0] = list(gradients)
        self._set_addresses(0)
        self._describe()
        self._lines[_COLUMNS, self._held] = 0
        self._columns[0] = []  # the table keeps no gradient alive
        if self._eager is None:
            upload(self._lines[_CHANGING], self._uploaded[_CHANGING])
        else:  # a capture has a matrix of its own, of which nothing is uploaded yet
            upload(self._lines, self._uploaded)
        self._dtypes = []
        self.present = None
        if -1 in pointers:
            self.present = [row for row, pointer in enumerate(pointers) if pointer != -1]
        else:
            self._dtypes = dtypes(gradients)
            self._devices = list(map(_device, gradients))
            if not self._dense_copies[0]:
                self._layouts.learn(gradients)
        self._pointers = pointers

    def _set_moved(self, pointers: list[int]) -> None:
        """Sets column 0 from tensors that differ from the last ones in their addresses only (one per row, none is None)."""
        column = np.asarray(pointers, np.int64)
        without_address = column == 0
        if (self._lines[_SIZE][without_address] > 0).any():
            raise ValueError("a tensor with elements has no memory of its own: it is a DTensor, or another wrapper")
        column[without_address] = _ALIGNMENT
        column[self._held] = 0
        self._lines[_COLUMNS] = column
        aligned = self._others_aligned & (column % _ALIGNMENT == 0)
        self._lines[_INFO] = self._kinds_and_groups | (aligned.astype(np.int64) << 8)
        upload(self._lines[_CHANGING], self._uploaded[_CHANGING])
        self._pointers = pointers

    def release(self) -> None:
        """Drops the gradients that have a dense copy; the next :meth:`refresh` reads everything again."""
        if self._dense_copies[0]:
            self._dense_copies[0] = {}
            self.has_dense_copies = any(self._dense_copies)
            self._pointers = []
            self._dtypes = []

    def hold(self, rows: Sequence[int]) -> None:
        """Makes kernels skip these rows, as if they had no gradient, in eager launches and in replays, until the next call."""
        self._held = np.asarray(rows, np.int64)
        for number, matrix in enumerate(self.captured):
            addresses = self._whole.setdefault(number, matrix[_COLUMNS].clone()).clone()
            addresses[torch.from_numpy(self._held).to(self.device)] = 0
            matrix[_COLUMNS].copy_(addresses)
        if not rows:
            self._whole.clear()
        # The next refresh reads everything again.
        self._pointers = []
        self._dtypes = []
        self._last_tuple = None

    # -- scalars ---------------------------------------------------------------------------------------------------------------

    def set_scalars(self, groups: Sequence[Sequence[float | Tensor]]) -> None:
        """Sets the scalars of every group.

        The host's numbers are uploaded, without waiting, only if one of them has changed.  Tensors are copied in every call.
        """
        host_only = _NUMBERS.issuperset(map(type, chain.from_iterable(groups)))
        scalars = tuple(map(tuple, groups)) if host_only else self._host_scalars(groups)
        if scalars != self._scalars:
            if self._device_scalars is None:
                shape = len(scalars), len(scalars[0])
                self._device_scalars = lasting_memory(shape, torch.float64, self.device)
            upload(np.asarray(scalars, np.float64), self._device_scalars)
            self._scalars = scalars
        self.has_scalars = True
        if host_only:
            return
        for row, group in enumerate(groups):
            for column, scalar in enumerate(group):
                if self._is_on_device(scalar) and self._device_scalars is not None:
                    self._device_scalars[row, column].copy_(scalar.reshape(()), non_blocking=True)

    def _host_scalars(self, groups: Sequence[Sequence[float | Tensor]]) -> tuple[tuple[float | Tensor, ...], ...]:
        """Returns the scalars that the host knows, and 0 in place of the others."""
        return tuple(
            [tuple([0.0 if self._is_on_device(scalar) else float(scalar) for scalar in group]) for group in groups]
        )

    def _is_on_device(self, scalar: float | Tensor) -> TypeGuard[Tensor]:
        """Whether a scalar is in device memory, so the host does not know its value."""
        return isinstance(scalar, Tensor) and (scalar.device == self.device or scalar.device.type != "cpu")

    @property
    def scalars(self) -> Tensor:
        """The scalars of every group on the device (fp64, groups x scalars); call :meth:`forget_scalars` after writing to them."""
        assert self._device_scalars is not None
        return self._device_scalars

    def forget_scalars(self) -> None:
        """Makes the next :meth:`set_scalars` upload the scalars even if they have not changed."""
        self._scalars = ()
        self.has_scalars = False

    # -- a launch --------------------------------------------------------------------------------------------------------------

    def launch(
        self,
        file: str,
        function: str,
        *arguments: Tensor | float | None,
        blocks: int | None = None,
        first_written: int = 1,
    ) -> None:
        """Runs ``function(table, *arguments)`` of ``<file>.cu``, with one block per chunk unless ``blocks`` is given.

        The kernel may write the columns from ``first_written`` on: their dense copies are copied back.
        """
        has_dense_copies = self.has_dense_copies
        if has_dense_copies:
            for copies in self._dense_copies:
                for copy in copies.values():
                    copy.dense.copy_(copy.tensor)
        run = self._kernels.get((file, function))
        if run is None:
            run = bridge.kernel(file, function, tuple(self._kinds), self.device)
            self._kernels[file, function] = run
        struct = self._struct
        # Made at the first launch, and again if the table got its scalars after it.
        if not struct.lines or (not struct.scalars and self._device_scalars is not None):
            struct = self._as_struct()
            self._struct = struct
        run(self._chunks if blocks is None else blocks, THREADS, struct, *arguments)
        if has_dense_copies:
            for copies in self._dense_copies[first_written:]:
                for copy in copies.values():
                    copy.tensor.copy_(copy.dense)

    def _as_struct(self) -> ctypes.Structure:
        scalars = self._device_scalars
        return _Struct(
            lines=self._uploaded.data_ptr(),
            chunk_rows=self._chunk_rows.data_ptr(),
            scalars=0 if scalars is None else scalars.data_ptr(),
            tickets=self._tickets.data_ptr(),
            rows=self.rows,
            chunk_size=self._chunk_size,
            columns=len(self._columns),
            scalars_per_group=len(self._scalars[0]) if self._scalars else 0,
            flag_cell=self._flag_cell,
            first_number=self._first_number,
        )

    # -- for ops that reduce ---------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self._lines.shape[1])

    @property
    def chunks(self) -> int:
        """The number of chunks, and of blocks in a launch."""
        return self._chunks

    def row_of_chunk(self, chunk: int) -> int:
        """Returns the row of a chunk."""
        return int(np.searchsorted(self._lines[0], chunk, side="right")) - 1

    @functools.cached_property
    def partial(self) -> Tensor:
        """Memory for one fp32 number per chunk."""
        return torch.empty(self._chunks, dtype=torch.float32, device=self.device)

    def numbers(self, count: int) -> Tensor:
        """Returns memory for ``count`` fp64 numbers, in which one launch of an op leaves its results for the next launch."""
        if self._numbers is None or len(self._numbers) < count:
            self._numbers = torch.empty(count, dtype=torch.float64, device=self.device)
        return self._numbers

    # -- for the cache of table_of ---------------------------------------------------------------------------------------------

    def drop_tensors(self) -> None:
        """Drops the references to the tensors; their addresses stay valid until their memory is freed."""
        self._columns = [[] for _ in self._columns]
        self._anchors = []


class _DenseCopy(NamedTuple):
    """A tensor with another memory order than its row's, and the dense copy that the kernels use instead."""

    tensor: Tensor
    dense: Tensor


_tables: dict[tuple[object, ...], Table] = {}
_captured: dict[int, Table] = {}
"""Tables that a graph uses, kept for good: nothing reports when the graph is deleted."""


def table_of(*columns: Sequence[Tensor]) -> Table:
    """Returns a table of these tensors: a cached one if it was built before for the same memory, shapes and dtypes."""
    tensors = list(chain.from_iterable(columns))
    shapes = map(Tensor.size, tensors), map(Tensor.stride, tensors)
    kinds = dtypes(tensors)
    key = (columns[0][0].device, len(columns), *addresses(tensors), *kinds, *chain(*shapes))
    if any(kind.is_complex for kind in set(kinds)):
        # A conjugate has the memory, shape and dtype of its base.
        key += (*map(Tensor.is_conj, tensors), *map(Tensor.is_neg, tensors))
    table = _tables.get(key)
    if table is None:
        table = Table(columns, device=columns[0][0].device)
        if len(_tables) >= _MOST_TABLES:
            del _tables[next(iter(_tables))]
        # Only a table without dense copies is cached: the others need their tensors, and the cache must keep none alive.
        if not table.has_dense_copies:
            table.drop_tensors()
            _tables[key] = table
    if is_capturing(table.device):
        _captured[id(table)] = table
    return table
