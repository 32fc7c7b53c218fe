"""Translates errors within a capture: CUDA's errors become a reason with the user's line; the user's own pass unchanged."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import torch

from fabricamp.engine.graph.batches import PLACEHOLDERS
from fabricamp.errors import NotCapturableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CAPTURE_WORDS: Final = re.compile(
    r"stream is capturing|capturing (blocking )?stream|capturing stage|(during|inside) (a )?(CUDA graph(s|'s)? )?capture\b"
    r"|graph capture|graph's capture|captured in a CUDA graph|capture of a CUDA graph|capture sequence|in capture mode"
    r"|capture was not initiated|capture must end|uncaptured work|cudaErrorStreamCapture|cudaErrorCapturedEvent",
    re.IGNORECASE,
)
"""Words of CUDA, torch, cuBLAS, NCCL, CuPy and fabricamp's optimizers in errors that occur only because of a capture."""
_BROKEN_BEFORE: Final = "previous error during capture"
"""CUDA's words at the end of a capture in which a call has failed."""


@contextlib.contextmanager
def explained_errors() -> Iterator[None]:
    """A context around a capture and its end, which translates the errors that CUDA raises because of the capture.

    Raises :class:`NotCapturableError` with the user's line, from CUDA's error.  An error of the user's code leaves the context as
    the same object, with its causes, also if the end of the broken capture raises another error.
    """
    handled = sys.exception()  # fit may be called in an except block: that error is not one of the capture
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a step may raise anything; all of it is raised again
        errors = _chain(error, handled)
        # torch.cuda.graph ends the capture after a failed step, too, and may raise then, with the step's error as __context__.
        is_broken = False
        if len(errors) > 1 and _is_from_the_end(error):
            is_broken = _BROKEN_BEFORE in str(error)
            del errors[0]
        step_error = errors[0]
        known = next((one for one in errors if isinstance(one, NotCapturableError | torch.OutOfMemoryError)), None)
        cause = next((one for one in reversed(errors) if _is_from_capture(one)), step_error if is_broken else None)
        if known is not None:
            _raise_unchanged(known)
        if cause is not None:
            raise NotCapturableError(_reason(cause)) from cause
        for placeholder in PLACEHOLDERS:
            if placeholder.__name__ in str(step_error):
                reason = f"the step uses {placeholder.STANDS_FOR}{_at_line(step_error)}; {placeholder.CURE}"
                raise NotCapturableError(reason) from step_error
        _raise_unchanged(step_error)


def reason_of_failure(error: Exception) -> str:
    """Returns the reason of a failed capture in one line; raises ``error`` itself if it is one of the user's code."""
    if isinstance(error, NotCapturableError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "the graph's memory does not fit beside what is allocated; give a smaller batch"
    raise error


def _chain(error: BaseException, handled: BaseException | None) -> list[BaseException]:
    """Returns the error, its cause, the cause of that, and so on, up to ``handled``, which was handled before the capture."""
    chain: list[BaseException] = []
    now: BaseException | None = error
    while now is not None and now is not handled and all(now is not one for one in chain):
        chain.append(now)
        now = now.__cause__ or now.__context__
    return chain


def _is_from_the_end(error: BaseException) -> bool:
    """Whether ``torch.cuda.graph`` raised the error at the end of its block."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename == torch.cuda.graphs.__file__ and frame.name == "__exit__" for frame in frames)


def _is_from_capture(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _CAPTURE_WORDS.search(str(error)) is not None


def _raise_unchanged(error: BaseException) -> NoReturn:
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context  # raise has set it to the error being handled, that of the capture's end


# -- the line of the user's code ---------------------------------------------------------------------------------------------------

# Each path ends with a separator, so that folders with the same prefix (torch, torchvision) are not confused.
_OWN_FOLDER: Final = f"{Path(__file__).parents[2]}{os.sep}"
_TORCHS_FOLDER: Final = f"{Path(torch.__file__).parent}{os.sep}"
_LIBRARIES: Final = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_GENERATED: Final = re.compile(r"<(?!ipython-input|stdin)")
"""Matches the names of generated code without a file; a notebook's cells and a piped script are the user's own code."""


def _reason(error: BaseException) -> str:
    first = str(error).partition("\n")[0]
    return f"the step does something that cannot be captured{_at_line(error)} ({type(error).__name__}: {first})"


def _at_line(error: BaseException) -> str:
    line = _line_of_user_code(error)
    return f" at {line}" if line else ""


def _line_of_user_code(error: BaseException) -> str:
    """Returns the innermost line of the user's code that led to the error, else of a library; empty if there is neither."""
    frames = [
        frame
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if not frame.filename.startswith((_OWN_FOLDER, _TORCHS_FOLDER)) and not _GENERATED.match(frame.filename)
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return _shown(own or frames)


def _shown(frames: Sequence[traceback.FrameSummary]) -> str:
    """Returns file, number and text of the first line; leaves out the text if the code has no file."""
    if not frames:
        return ""
    text = f": {frames[0].line}" if frames[0].line else ""
    return f"{frames[0].filename}:{frames[0].lineno}{text}"
