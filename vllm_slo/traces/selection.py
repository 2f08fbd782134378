# SPDX-License-Identifier: Apache-2.0
"""A part of a trace: a stretch of time, a number of rows, a share of them, another speed."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path

from msgspec.structs import replace

from vllm_slo import arguments
from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.files import detect, format_name, in_time_order, read
from vllm_slo.traces.request import TraceRequest
from vllm_slo.traces.times import is_dated, moment_of, parse_date_s, seconds_of

Moment = float | datetime


@dataclass(frozen=True, slots=True)
class Selection:
    """Which requests of a trace count. They are cut, then thinned, then counted.

    Attributes:
        from_s, to_s: the stretch [from, to): seconds after the first request, or moments with a
            time zone for a trace that has dates; None: no bound.
        rows: at most so many requests, the first of the file; None: all.
        thin: share of the requests that stays, drawn at random; above 0, at most 1.
        speed: times are divided by it; above 0.
        seed: of the draw.
    """

    from_s: Moment | None = None
    to_s: Moment | None = None
    rows: int | None = None
    thin: float = 1.0
    speed: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """A selected part of a trace, by time; the first request arrives at 0.

    Attributes:
        source: the file's name.
        format: the usual name of its format.
        requests: each with at least one prompt token and one output token.
        left_out: selected rows that could not be used: without prompt tokens, or completed without
            an output token.
        estimated: requests that were declined, aborted or failed before their first token. Their
            `output_tokens` is that of a completed request of their class, drawn at random.
        speed: by which the recorded times of arrival are divided; outcomes are as recorded.
    """

    source: str
    format: str
    requests: tuple[TraceRequest, ...]
    left_out: int
    estimated: int = 0
    speed: float = 1.0

    def think_s(self, before: TraceRequest, request: TraceRequest) -> float | None:
        """Seconds from the end of an answer to the next request of its session, at this speed;
        None: the end was not recorded."""
        if before.served is None or before.served.e2e_s is None:
            return None
        return max(0.0, request.at_s - before.at_s - before.served.e2e_s / self.speed)


def selected(
    requests: Iterable[TraceRequest], selection: Selection, start_s: float = math.nan
) -> Iterator[TraceRequest]:
    """The selected requests, in the order given; one is held at a time.

    ``start_s`` is the time of the first request; without it, that of the first one given.

    Raises:
        TraceError: the selection has dates and the trace has none.
    """
    draw, thin, speed = random.Random(selection.seed).random, selection.thin, selection.speed
    left = selection.rows or -1
    rest = iter(requests)
    first = next(rest, None)
    if first is None:
        return
    start_s = first.at_s if math.isnan(start_s) else start_s
    low = _bound(selection.from_s, start_s, -math.inf)
    high = _bound(selection.to_s, start_s, math.inf)
    for request in chain((first,), rest):
        # Each row takes its own draw, so that a row stays or goes wherever the stretch begins.
        if (thin < 1.0 and draw() >= thin) or not low <= request.at_s < high:
            continue
        yield request if speed == 1.0 else _faster(request, start_s, speed)
        left -= 1
        if left == 0:
            return


def _faster(request: TraceRequest, start_s: float, speed: float) -> TraceRequest:
    return replace(request, at_s=start_s + (request.at_s - start_s) / speed)


def _bound(moment: Moment | None, start_s: float, open_end: float) -> float:
    if moment is None:
        return open_end
    if not isinstance(moment, datetime):
        return start_s + moment
    if not is_dated(start_s):
        raise TraceError(
            f"{moment.isoformat()}: the trace has no dates; give seconds after its first request"
        )
    return seconds_of(moment)


def select(path: Path, selection: Selection) -> Iterator[TraceRequest]:
    """The selected requests of a file or folder, in its order; one is held at a time.

    A file whose first request may not be the earliest is read twice if ``from`` or ``to`` counts
    from its first request.

    Raises:
        TraceError: as `files.read` and `selected`.
    """
    form = detect(path)
    start_s = math.nan
    from_start = any(isinstance(m, float | int) for m in (selection.from_s, selection.to_s))
    if from_start and not in_time_order(form):
        start_s = min((request.at_s for request in read(path, form)), default=start_s)
    return selected(read(path, form), selection, start_s)


def load(path: Path, selection: Selection = Selection()) -> Recording:
    """The selected requests of a trace that can be sent or simulated, by time.

    Raises:
        TraceError: the trace cannot be read, or nothing of it is selected.
    """
    chosen = list(select(path, selection))
    if not chosen:
        raise no_rows(path, selection)
    chosen.sort(key=lambda request: request.at_s)
    usable, estimated = _with_lengths(chosen, selection.seed)
    if not usable:
        raise TraceError(f"{path} has no rows with prompt and output tokens")
    first_s = usable[0].at_s
    requests = tuple(replace(request, at_s=request.at_s - first_s) for request in usable)
    left_out = len(chosen) - len(usable)
    name = format_name(detect(path))
    return Recording(path.name, name, requests, left_out, estimated, selection.speed)


def no_rows(path: Path, selection: Selection) -> TraceError:
    """The error for a trace of which nothing is selected."""
    where = "" if selection == Selection() else " in this selection"
    return TraceError(f"{path} has no rows{where}")


def _with_lengths(chosen: list[TraceRequest], seed: int) -> tuple[list[TraceRequest], int]:
    """(requests with a prompt and an answer, how many answers' lengths are estimated)."""
    by_class: dict[str, list[int]] = {}
    for request in chosen:
        if request.output_tokens and not _cut_short(request):
            by_class.setdefault(request.slo_class, []).append(request.output_tokens)
    everyone = [length for lengths in by_class.values() for length in lengths]
    drawn = random.Random(f"lengths/{seed}")
    usable, estimated = [], 0
    for request in chosen:
        if not request.prompt_tokens:
            continue
        if request.output_tokens:
            usable.append(request)
        elif _cut_short(request) and everyone:
            length = drawn.choice(by_class.get(request.slo_class, everyone))
            usable.append(replace(request, output_tokens=length))
            estimated += 1
    return usable, estimated


def _cut_short(request: TraceRequest) -> bool:
    return request.served is not None and request.served.end != "completed"


def add_selection_arguments(parser: argparse.ArgumentParser) -> None:
    """``--from``, ``--to``, ``--rows``, ``--thin``, ``--speed``."""
    group = parser.add_argument_group("part of the trace")
    add = group.add_argument
    when = "seconds after its first request, or a date and time (UTC without a zone)"
    add(
        "--from",
        dest="from_",
        metavar="WHEN",
        type=_moment,
        help=f"leave out what came before: {when}",
    )
    add("--to", metavar="WHEN", type=_moment, help="leave out what came then or later")
    add("--rows", metavar="N", type=arguments.whole(1), help="at most so many requests")
    add("--thin", metavar="SHARE", type=arguments.share(), default=1.0,
        help="keep this share of the requests, drawn at random (default: 1)")  # fmt: skip
    add("--speed", metavar="FACTOR", type=arguments.number(0, above=True), default=1.0,
        help="divide all times by it: 2 doubles the rate (default: 1)")  # fmt: skip


def selection_of(args: argparse.Namespace) -> Selection:
    """The selection of parsed arguments.

    Raises:
        TraceError: the stretch ends before it begins.
    """
    low, high = args.from_, args.to
    same_kind = isinstance(low, datetime) == isinstance(high, datetime)
    if None not in (low, high) and same_kind and low >= high:
        raise TraceError("--to: must be later than --from")
    return Selection(low, high, args.rows, args.thin, args.speed)


def _moment(text: str) -> Moment:
    try:
        float(text)
    except ValueError:
        try:
            return moment_of(parse_date_s(text))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text[:80]!r} is neither a number of seconds nor a date and time"
            ) from None
    return arguments.number(0)(text)
