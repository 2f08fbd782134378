# SPDX-License-Identifier: Apache-2.0
"""Records what arrived at one engine and what became of it, without prompts and answers.

The scheduler tells of every arrival, of the tokens of each step and of every end. Here a line is
made of it, `vllm_slo.traces.own_format`. Hashes, text and files are left to the writer's thread.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Container, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from msgspec.structs import replace
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from vllm_slo.config.recording import RecordingConfig, salt_in
from vllm_slo.core.attainment import WindowTPOT
from vllm_slo.core.clock import Clock
from vllm_slo.core.sessions.stages import StagedTPOT
from vllm_slo.engine.telemetry.prompt_hashes import PromptHashes
from vllm_slo.engine.telemetry.recording_files import RecordingFiles, named
from vllm_slo.engine.telemetry.recording_writer import RecordingWriter, WriterSeries
from vllm_slo.engine.telemetry.state import SOCKET_VARIABLE
from vllm_slo.slo.model import SLO
from vllm_slo.slo.verdicts import Declined, unpack
from vllm_slo.traces.names import hashed_name
from vllm_slo.traces.own_format import header_line, request_line
from vllm_slo.traces.request import End, Promise, Served, TraceRequest

__all__ = ["RequestRecorder", "TrackedRequest"]

logger = init_logger(__name__)

MEGABYTE: Final = 1_000_000
_NO_SLO: Final = SLO()


class TrackedRequest(Protocol):
    """What a record says of a request with an SLO; times are on the scheduler's clock.

    Attributes:
        first_token_s: None before it.
        was_promised: whether its objectives ever were.
        late: what it was promised instead, or None.
        late_kept: whether it was kept, given that no token is to come.
    """

    @property
    def tpot(self) -> StagedTPOT: ...
    @property
    def first_token_s(self) -> float | None: ...
    @property
    def last_token_s(self) -> float: ...
    @property
    def was_promised(self) -> bool: ...
    @property
    def late(self) -> object | None: ...
    @property
    def late_kept(self) -> bool: ...


class _Pace:
    """First token and worst window of a request without an SLO.

    Tokens are counted in each step, and handed on when a window ends: the times of the others do
    not matter to it.

    Attributes:
        pending: tokens that have not been handed on.
        due: at how many of them they are.
    """

    __slots__ = ("_tpot", "_window", "due", "first_s", "pending")

    def __init__(self, window: int) -> None:
        self._tpot = WindowTPOT(window)
        self._window = window
        self.first_s: float | None = None
        self.pending = 0
        self.due = 1

    def hand_on(self, now_s: float) -> None:
        """The newest token, which has just come, ends a window, or is the first of all."""
        if self.first_s is None:
            self.first_s = now_s
        self._tpot.add(now_s, self.pending)
        self.pending = 0
        self.due = self._window - self._tpot.open_tokens

    def end(self, tokens: int, now_s: float) -> None:
        """The answer has come to its end just now, with so many tokens."""
        self.pending = tokens - self._tpot.tokens
        if self.pending > 0:
            self.hand_on(now_s)

    @property
    def worst_s(self) -> float | None:
        return self._tpot.worst_s


class _Arrived:
    """A live request; ``pace`` is None where its SLO is tracked."""

    __slots__ = ("arrival_s", "pace", "request", "slo")

    def __init__(
        self, request: Request, slo: SLO | None, arrival_s: float, pace: _Pace | None
    ) -> None:
        self.request = request
        self.slo = slo
        self.arrival_s = arrival_s
        self.pace = pace


class RequestRecorder:
    """The recording of one engine.

    Args:
        salt: of the hashes; a secret.
        begun_s: when the recording began, on the scheduler's clock.
        window: tokens over which a TPOT is judged.

    Requests that only ask for a quote, are a part of another one, or are refused as invalid are
    not told here.
    """

    def __init__(
        self,
        writer: RecordingWriter,
        config: RecordingConfig,
        salt: bytes,
        begun_s: float,
        window: int,
    ) -> None:
        self._writer = writer
        self._begun_s = begun_s
        self._window = window
        self._salt = salt
        self._hashes = PromptHashes(salt, config.block_tokens)
        self._hides_tenants = config.tenants == "hashed"
        self._live: dict[str, _Arrived] = {}
        self._paces: dict[str, _Pace] = {}
        self._finish = weakref.finalize(self, writer.close)  # also when the process ends

    @classmethod
    def of_engine(
        cls,
        config: RecordingConfig,
        vllm_config: VllmConfig,
        clock: Clock,
        series: WriterSeries,
        window: int,
    ) -> RequestRecorder:
        """The recorder of the engine in this process.

        Raises:
            ConfigError: the file cannot be used.
        """
        assert config.path is not None
        salt = salt_in(os.environ)
        created = datetime.fromtimestamp(clock.epoch_s(), UTC)
        header = header_line(created, config.block_tokens, _model_name(vllm_config)).encode()
        path, limits = Path(config.path), (config.max_mb * MEGABYTE, config.files)
        rank = vllm_config.parallel_config.data_parallel_index
        path = named(path, f"rank-{rank}") if rank else path
        # Behind a front there may be several servers with this configuration on this machine.
        begin = RecordingFiles.of_replica if SOCKET_VARIABLE in os.environ else RecordingFiles
        files = begin(path, header, *limits)
        logger.info(
            "vllm-slo: requests are recorded in %s, without prompts and answers.", files.path
        )
        return cls(RecordingWriter(files, series), config, salt, clock.monotonic_s(), window)

    def arrived(self, request: Request, slo: SLO | None, arrival_s: float) -> None:
        """A request has arrived, at a time of the scheduler's clock."""
        pace = None
        if slo is None:
            pace = self._paces[request.request_id] = _Pace(self._window)
        self._live[request.request_id] = _Arrived(request, slo, arrival_s, pace)

    def note_tokens(self, outputs: Mapping[int, EngineCoreOutputs], now_s: float) -> None:
        """A step's tokens have come."""
        if not self._paces:
            return
        find = self._paces.get
        for group in outputs.values():
            for output in group.outputs:
                pace = find(output.request_id)
                if pace is not None:
                    pace.pending += len(output.new_token_ids)
                    if pace.pending >= pace.due:
                        pace.hand_on(now_s)

    def ended(
        self,
        request: Request,
        tracked: TrackedRequest | None,
        attained: bool | None,
        now_s: float,
        *,
        by_itself: bool,
    ) -> None:
        """A request has ended.

        Args:
            tracked: how it did; None where it has no SLO, or was refused before it was tracked.
            attained: whether it kept its objectives; None: it had none, or was cut off.
            by_itself: whether its answer came to its end.
        """
        arrived = self._live.pop(request.request_id, None)
        self._paces.pop(request.request_id, None)
        if arrived is None:
            return
        self._record(arrived, _end_of(request, by_itself=by_itself), tracked, attained, now_s)

    def retain(self, live: Container[str]) -> None:
        """Forget the requests that are not live."""
        for name in [name for name in self._live if name not in live]:
            del self._live[name]
            self._paces.pop(name, None)

    def close(self) -> None:
        """The engine ends: requests that are live have failed. Write what is left."""
        for arrived in self._live.values():
            self._record(arrived, "failed", None, None, self._begun_s)
        self._live.clear()
        self._paces.clear()
        self._finish()

    def _record(
        self,
        arrived: _Arrived,
        end: End,
        tracked: TrackedRequest | None,
        attained: bool | None,
        now_s: float,
    ) -> None:
        request, slo, pace = arrived.request, arrived.slo or _NO_SLO, arrived.pace
        first_s = worst_s = None
        last_s = now_s
        if tracked is not None:
            first_s, last_s = tracked.first_token_s, tracked.last_token_s
            worst_s = tracked.tpot.worst_s
        elif pace is not None:
            if end == "completed":
                pace.end(request.num_output_tokens, now_s)
            first_s, worst_s = pace.first_s, pace.worst_s
        asked = slo.has_objective
        is_late = tracked is not None and tracked.late is not None
        whole = end == "completed" and first_s is not None
        served = Served(
            end,
            _promise_of(tracked) if asked else None,
            None if first_s is None else max(first_s - arrived.arrival_s, 0.0),
            worst_s,
            max(last_s - arrived.arrival_s, 0.0) if whole else None,
            tracked.late_kept if tracked is not None and is_late and whole else None,
            False if asked and end in ("declined", "failed") else attained,
        )
        trace = TraceRequest(
            arrived.arrival_s - self._begun_s,
            request.num_prompt_tokens,
            request.num_output_tokens,
            slo_class=slo.slo_class or "",
            tenant=slo.tenant,
            model=request.lora_request.lora_name if request.lora_request else None,
            session=slo.session_id,
            priority=request.priority,
            ttft_ms=slo.ttft_ms,
            tpot_ms=slo.tightest_tpot_ms,
            e2e_ms=slo.e2e_ms,
            served=served,
        )
        prompt = request.prompt_token_ids or ()
        images = [(f.mm_position.offset, f.identifier) for f in request.mm_features]
        apart = (trace.model or "", request.cache_salt or "")
        make = partial(self._line, trace, prompt, images, apart)
        self._writer.put(make, request.num_prompt_tokens)

    def _line(
        self,
        trace: TraceRequest,
        prompt: Sequence[int],
        images: Sequence[tuple[int, str]],
        apart: Sequence[str],
    ) -> bytes:
        """The line of a request, whose names and prompt are hashed here, in the writer's thread."""
        tenant, session = trace.tenant, trace.session
        if tenant is not None and self._hides_tenants:
            tenant = hashed_name(self._salt, "tenant", tenant)
        if session is not None:
            session = hashed_name(self._salt, "session", session)
        ids = self._hashes.of_prompt(prompt, images, apart)
        written = replace(trace, tenant=tenant, session=session, hash_ids=ids)
        return request_line(written, 0.0).encode()


def _end_of(request: Request, *, by_itself: bool) -> End:
    if by_itself:
        return "completed"
    if isinstance(unpack(request.stop_reason), Declined):
        return "declined"
    return "aborted" if request.status == RequestStatus.FINISHED_ABORTED else "failed"


def _promise_of(tracked: TrackedRequest | None) -> Promise:
    if tracked is None:
        return "none"
    if tracked.late is not None:
        return "late"
    return "in_time" if tracked.was_promised else "none"


def _model_name(vllm_config: VllmConfig) -> str:
    """The name under which a model is served; of a folder on this machine, its last part."""
    names: Any = vllm_config.model_config.served_model_name
    name = str(names if isinstance(names, str) else names[0])
    return Path(name).name if Path(name).is_dir() else name
