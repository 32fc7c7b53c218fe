"""Watches torch's compiler during a run: logs recompilations and code that stays eager, each once, with the reason."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Final

from fabricamp.errors import ConfigError
from fabricamp.torch_private import Compilation, compilations_since, is_limit_hit, last_compilation

if TYPE_CHECKING:
    from fabricamp.state import RunState

_LOG = logging.getLogger("fabricamp")

_ATTRIBUTE: Final = re.compile(r"^(?P<name>(?:module|self)\.[\w.\[\]'\"]+|\w+) == ")
"""Matches, in the text of a guard, the attribute or argument whose value torch treats as a constant."""
_RESUMED: Final = re.compile(r"torch_dynamo_resume_in_\w+_at_(?P<line>\d+)")
"""Matches torch's name of the rest of a function after a line that it cannot compile."""


class CompilationWatch:
    """A context around each call of compiled code; its exit logs what torch compiled during the call."""

    def __init__(self, state: RunState, *, speaks: bool) -> None:
        self._state = state
        self._speaks = speaks
        self.name = ""
        """The name of the function or module called next, for records without a name."""
        self._before: Compilation | None = None
        self._told: set[str] = set()

    def __enter__(self) -> None:
        self._before = last_compilation()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Logs recompilations and code left eager; under fullgraph=True, torch's error at its limit gets the cure."""
        if last_compilation() is self._before:
            return
        for record in compilations_since(self._before):
            line = self._line(record)
            if line and error is not None and is_limit_hit(error):
                raise ConfigError(f"compile: {line}") from error
            if line and error is None:
                self._say(line, record)

    def _line(self, record: Compilation) -> str:
        """Returns the log line for a compilation; an empty string for the first compilation of a function."""
        # If torch cannot compile the code around a module's call, it compiles the function that runs the call.
        name = self.name if record.co_name in (None, "__call__") else record.co_name
        resumed = _RESUMED.fullmatch(name)
        if resumed:
            name = f"{self.name} from line {resumed['line']} on"
        reason = _reason(record.recompile_reason)
        if record.fail_reason is not None and _hits_limit(record):
            return f"{name} has been compiled too often, and runs eagerly where its code does not fit: {reason}; {_cure(reason)}"
        if record.fail_reason is not None:
            first = str(record.fail_reason).strip().partition("\n")[0]
            return f"{name} runs eagerly, as torch cannot compile it: {first}; TORCH_LOGS=graph_breaks shows the line"
        if record.recompile_reason is None:
            return ""
        return f"{name} was compiled again in step {self._state.global_step}: {reason}"

    def _say(self, line: str, record: Compilation) -> None:
        failed = record.fail_reason is not None
        key = f"{record.co_name or self.name} {failed}"
        if key in self._told:
            return
        self._told.add(key)
        if self._speaks:
            _LOG.log(logging.WARNING if failed else logging.INFO, "compile: %s", line)

    def say_hooked(self) -> None:
        """Logs that modules run eagerly because of hooks on all modules."""
        if "hooked" in self._told:
            return
        self._told.add("hooked")
        if self._speaks:
            _LOG.warning(
                "compile: modules run eagerly while a hook is registered for all modules (register_module_forward_hook and the "
                "like); register it on the modules themselves"
            )


def _hits_limit(record: Compilation) -> bool:
    return record.fail_type == "FailOnRecompileLimitHit" or "recompile limit exceeded" in (record.fail_reason or "")


def _reason(text: str | None) -> str:
    """Returns the condition of torch's guard that did not hold, without torch's number, hint and stack."""
    line = str(text).partition("\n")[0]
    line = re.sub(r"^\d+/\d+: ", "", line)
    return line.partition("  #")[0].partition("(HINT")[0].strip()


def _cure(reason: str) -> str:
    match = _ATTRIBUTE.match(reason)
    if match:
        name = match["name"].partition(".")[2] or match["name"]
        return (
            f"torch compiles anew for each value of {name!r}: use the value in __init__, or keep it in a tensor "
            "(register_buffer) that forward computes with"
        )
    if "size mismatch" in reason or "stride mismatch" in reason:
        return "give batches of fewer sizes (drop_last=True, padding to a few lengths), or dynamic=True"
    return "TORCH_LOGS=recompiles shows all reasons"
