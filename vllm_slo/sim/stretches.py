# SPDX-License-Identifier: Apache-2.0
"""Which stretches of a long trace stand for it: the busiest, and others at random.

A plan has to keep its objectives at the busiest time, and hours of a quiet trace say nothing about
that. So of a long trace only some stretches are simulated, of equal duration.
"""

from __future__ import annotations

import math

import numpy as np

from vllm_slo.sim.arrivals import Floats
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.traffic import Traffic


def chosen(
    traffic: Traffic, hardware: Hardware, windows: int, requests: int, seed: int
) -> tuple[Traffic, ...]:
    """``windows`` stretches of about ``requests`` requests, the busiest first.

    The busiest one takes most of an engine's time or memory. The others are drawn at random. A
    trace that is no longer than all of them is cut into parts of equal duration.
    """
    total = len(traffic.recording.requests)
    pieces = max(1, math.floor(total / requests))
    if pieces <= windows:
        return tuple(traffic.parts(windows))
    loads = _loads(traffic, hardware, pieces)
    busiest = int(np.argmax(loads))
    others = [place for place in np.flatnonzero(loads).tolist() if place != busiest]
    rng = np.random.default_rng([seed, *b"stretches"])
    drawn = rng.choice(others, min(windows - 1, len(others)), replace=False).tolist()
    step_s = traffic.duration_s / pieces
    places = (busiest, *sorted(drawn))
    parts = (traffic.cut(place * step_s, (place + 1) * step_s) for place in places)
    return tuple(part for part in parts if part.recording.requests)


def _loads(traffic: Traffic, hardware: Hardware, pieces: int) -> Floats:
    """Engine seconds, or seconds of the whole KV cache, that each stretch needs; shape (pieces,).

    An estimate from lengths alone, to compare stretches: every prompt is computed, and answers come
    at the pace of an engine whose KV cache is full.
    """
    requests, model = traffic.recording.requests, hardware.step_time
    prompt = np.array([request.prompt_tokens for request in requests], dtype=float)
    answer = np.array([request.output_tokens for request in requests], dtype=float)
    held = answer * (prompt + answer / 2)
    slope_s = max(term[0] for term in model.terms)
    work_s = slope_s * (prompt + answer) + model.pair_s * (prompt**2 / 2 + held) + model.kv_s * held
    pace_s = model.predict_s(hardware.max_num_seqs, hardware.kv_tokens)
    memory_s = held * pace_s / hardware.kv_tokens
    at_s = np.array([request.at_s for request in requests])
    places = np.minimum((at_s / traffic.duration_s * pieces).astype(np.int64), pieces - 1)
    return np.maximum(*(np.bincount(places, need, pieces) for need in (work_s, memory_s)))
