# SPDX-License-Identifier: Apache-2.0
"""Exceptions of our own code that are held: each is logged once, with its traceback."""

from __future__ import annotations

from types import TracebackType
from typing import Final

from vllm.logger import init_logger

from vllm_slo.errors import VllmSLOError

__all__ = ["Context", "FaultLog", "Held", "Reported", "part_of"]

logger = init_logger(__name__)

MOST_LOGGED: Final = 64
"""Different faults that are logged; further ones are not."""


class FaultLog:
    """Logs each fault once: those of one type and one line of code are the same.

    ``consequence``: a sentence on what happens instead.
    """

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence
        self._logged: set[tuple[str, str, int]] = set()

    def note(self, error: Exception) -> None:
        """A fault was held."""
        module, line = _place(error)
        fault = type(error).__name__, module, line
        if fault in self._logged or len(self._logged) >= MOST_LOGGED:
            return
        self._logged.add(fault)
        logger.error(
            "vllm-slo: %s failed in %s, line %d: %r. %s The same fault is not logged again.",
            *(part_of(error), module, line, error, self._consequence),
            exc_info=error,
        )


class Context:
    """A context that ends at an exception which it holds; what follows goes on without. It may be
    entered again and again, also within another one."""

    __slots__ = ()

    def holds(self, error: Exception) -> bool:
        """Note an exception; False: it is raised."""
        raise NotImplementedError

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return isinstance(error, Exception) and self.holds(error)


class Held(Context):
    """Holds faults, and logs them. Mistakes of users (`VllmSLOError`) are no faults.

    ``consequence``: a sentence on what happens instead.
    """

    __slots__ = ("_log",)

    def __init__(self, consequence: str) -> None:
        self._log = FaultLog(consequence)

    def holds(self, error: Exception) -> bool:
        if isinstance(error, VllmSLOError):
            return False
        self._log.note(error)
        return True


class Reported(Held):
    """As `Held`, in a process that cannot count faults: another one is told of them.

    ``among_ranks``: several processes do the same, and none may go on alone. A lack of memory is
    raised then: the others may have enough. What a policy makes of its arguments fails in all of
    them alike, and is held.
    """

    __slots__ = ("_among_ranks", "_parts")

    def __init__(self, consequence: str, *, among_ranks: bool = False) -> None:
        super().__init__(consequence)
        self._among_ranks = among_ranks
        self._parts: list[str] = []

    def holds(self, error: Exception) -> bool:
        if self._among_ranks and isinstance(error, MemoryError):
            return False
        holds = super().holds(error)
        if holds:
            self._parts.append(part_of(error))
        return holds

    def take(self) -> list[str]:
        """The parts that have failed since the last call, once for each fault."""
        parts, self._parts = self._parts, []
        return parts


def part_of(error: BaseException) -> str:
    """The part of vllm-slo in which an exception was raised, as a metric label: of a policy its
    folder in ``core``, of the scheduler's parts their module, else the folder in ``engine``."""
    names = _place(error)[0].split(".")
    place = 3 if names[:3] == ["vllm_slo", "engine", "scheduling"] else 2
    return names[min(place, len(names) - 1)]


def _place(error: BaseException) -> tuple[str, int]:
    """(module, line) of ours that was the innermost when an exception was raised."""
    found, trace = ("vllm_slo", 0), error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        if module.startswith("vllm_slo."):
            found = module, trace.tb_lineno
        trace = trace.tb_next
    return found
