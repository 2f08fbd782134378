# SPDX-License-Identifier: Apache-2.0
"""The runtime interface of HAProxy: which replica is in which slot."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_slo.router.haproxy_config import SLOTS

logger = logging.getLogger("vllm_slo.front")

PATIENCE_S: Final = 5.0
RETRY_S: Final = 0.05
_BACKENDS: Final = ("replicas", "last", "fallback")


@dataclass(frozen=True, slots=True)
class Place:
    """What a slot holds.

    Attributes:
        host: IP address.
        fallback: whether HAProxy may choose this slot itself while the decision service is gone.
    """

    host: str
    port: int
    fallback: bool = False

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


class ProxyAdmin:
    """Keeps HAProxy's slots as they are wanted, over restarts of HAProxy.

    A name keeps its slot until it is forgotten. `generation` is that of the HAProxy which has all
    wanted slots; 0 before the first.
    """

    def __init__(self, path: Path) -> None:
        self.generation = 0
        self.token = ""
        self._path = path
        self._slots: dict[str, int] = {}
        self._wanted: dict[str, Place] = {}
        self._made: dict[str, Place] = {}
        self._freed: set[int] = set()
        self._made_token = ""
        self._running_generation = 0
        self._changed = asyncio.Event()
        self._settled = asyncio.Condition()

    # --- what is wanted --------------------------------------------------------------------------

    def want(self, name: str, place: Place) -> None:
        """Give a replica a slot, or change it.

        Raises:
            ValueError: no slot is left.
        """
        if name not in self._slots:
            free = set(range(1, SLOTS + 1)) - {*self._slots.values(), *self._freed}
            if not free:
                raise ValueError(f"all {SLOTS} slots are taken; start another front")
            self._slots[name] = min(free)
        if self._wanted.get(name) != place:
            self._wanted[name] = place
            self._changed.set()

    def forget(self, name: str) -> None:
        """Free the slot of a replica that has left."""
        self._wanted.pop(name, None)
        self._made.pop(name, None)
        if (slot := self._slots.pop(name, None)) is not None:
            self._freed.add(slot)
            self._changed.set()

    def started(self, generation: int) -> None:
        """HAProxy was started anew, with empty slots."""
        self._running_generation = generation
        self._made.clear()
        self._made_token = ""
        self._changed.set()

    def slot(self, name: str) -> str:
        """The server name of a replica's slot."""
        return f"r{self._slots[name]}"

    def is_placed(self, name: str) -> bool:
        """Whether HAProxy reaches the replica in its slot, used in fallback or not."""
        made, wanted = self._made.get(name), self._wanted.get(name)
        return made is not None and wanted is not None and made.address == wanted.address

    async def cut(self, name: str) -> None:
        """End all connections to a replica."""
        if (slot := self._slots.get(name)) is not None:
            await self._try([f"shutdown sessions server {b}/r{slot}" for b in _BACKENDS])

    async def settled(self, generation: int) -> None:
        """Wait until this HAProxy, or a newer one, has its slots; at most `PATIENCE_S`."""
        if self.generation >= generation:  # as nearly always
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S), self._settled:
                await self._settled.wait_for(lambda: self.generation >= generation)

    # --- making it so ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Make the slots as they are wanted, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            generation, token = self._running_generation, self.token
            due = {n: p for n, p in self._wanted.items() if self._made.get(n) != p}
            freed = set(self._freed)
            commands = [f"set server fallback/r{slot} state maint" for slot in sorted(freed)]
            for name, place in due.items():
                commands += self._commands(name, place)
            if token != self._made_token:
                commands.append(f"experimental-mode on; set var proc.slo_token str({token})")
            if not generation or (commands and not await self._try(commands)):
                await asyncio.sleep(RETRY_S)
                self._changed.set()
                continue
            if generation == self._running_generation:
                self._made.update(due)
                self._freed -= freed
                self._made_token = token
                async with self._settled:
                    self.generation = generation
                    self._settled.notify_all()

    def set_token(self, token: str) -> None:
        """The token that HAProxy itself shows to replicas while the decision service is gone."""
        if token != self.token:
            self.token = token
            self._changed.set()

    def _commands(self, name: str, place: Place) -> list[str]:
        slot = self.slot(name)
        moved = [
            f"set server {backend}/{slot} addr {place.host} port {place.port}"
            for backend in _BACKENDS
        ]
        state = "ready" if place.fallback else "maint"
        return [*moved, f"set server fallback/{slot} state {state}"]

    async def _try(self, commands: Sequence[str]) -> bool:
        """Whether HAProxy took all commands."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return all([await self._command(command) for command in commands])
        except (OSError, TimeoutError) as error:
            logger.debug("HAProxy's admin socket: %r", error)
            return False

    async def _command(self, command: str) -> bool:
        """Whether HAProxy took a command."""
        answer = await ask(self._path, command)
        refused = not command.startswith("shutdown ") and _is_refusal(answer)
        if refused:
            logger.error("HAProxy refuses '%s': %s", command.split(" str(")[0], answer)
        return not refused


async def ask(admin: Path, command: str) -> str:
    """HAProxy's answer to one command.

    Raises:
        OSError: it does not answer.
    """
    reader, writer = await asyncio.open_unix_connection(str(admin))
    try:
        writer.write(command.encode() + b"\n")
        return (await reader.read()).decode().strip()
    finally:
        writer.close()


def _is_refusal(answer: str) -> bool:
    return bool(answer) and not answer.startswith(
        ("no need to change", "IP changed", "port changed")
    )
