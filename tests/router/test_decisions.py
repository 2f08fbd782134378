# SPDX-License-Identifier: Apache-2.0
"""Decisions for a data plane: where a request goes, what it is told, and that every count ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from fake_replica import state

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.routing.state_stream import StateEncoder
from vllm_slo.router.body_reader import LARGE_BYTES
from vllm_slo.router.cluster import Cluster
from vllm_slo.router.decisions import Decision, Decisions, Refusal
from vllm_slo.router.front_metrics import FrontMetrics
from vllm_slo.router.prompts import CHUNK_BYTES
from vllm_slo.router.replica_spec import ReplicaSpec
from vllm_slo.router.request_reader import Request
from vllm_slo.router.upstream import Upstream

COMPLETIONS = "/v1/completions"
LOADED = {"committed": [[1.0, 1_000_000]], "backlog_tokens": 100_000}
"""A replica that has promised more than it can do."""
SLO = {"ttft_ms": 5_000}


class Plane:
    """A data plane without bytes: replicas whose state stream the test speaks."""

    def __init__(self, *names: str, asks_again: bool = True, **config: Any) -> None:
        self.config = SLOConfig.model_validate(config)
        self.cluster = Cluster(self.config.routing)
        self.cluster.front = ""
        self.metrics = FrontMetrics()
        for name in names:
            spec = ReplicaSpec(name, f"http://10.0.0.{len(self.cluster.listed) + 1}:8000", "secret")
            self.cluster.listed[name] = Upstream(spec, 60.0, 60.0)
            self.speak(name)
        self.decisions = Decisions(self.cluster, self.metrics, self.config, asks_again=asks_again)

    def speak(self, name: str, **changes: Any) -> None:
        line = StateEncoder().line(state(changes)).strip()
        self.cluster.listed[name].hear(line, time.monotonic())

    def outstanding(self) -> int:
        """Requests that any account still has."""
        shadows = sum(each.virtual.outstanding + each.running for each in self.cluster.all())
        in_flight = self.metrics.in_flight._value.get()
        return shadows + self.decisions.running + int(in_flight)

    def counted(self, result: str) -> float:
        return float(self.metrics.requests.labels(result)._value.get())

    def retries(self, reason: str) -> float:
        return float(self.metrics.retries.labels(reason)._value.get())

    async def decide(self, **given: Any) -> Decision:
        decision = await self.decisions.decide(*_request(**given))
        assert isinstance(decision, Decision), decision
        return decision

    async def refused(self, **given: Any) -> Refusal:
        refusal = await self.decisions.decide(*_request(**given))
        assert isinstance(refusal, Refusal), refusal
        assert self.outstanding() == 0
        return refusal


def _request(
    body: Any = None,
    path: str = COMPLETIONS,
    method: str = "POST",
    headers: Sequence[tuple[bytes, bytes]] = (),
    total_bytes: int | None = None,
    among: Any = None,
) -> tuple[Request, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body or {"prompt": "x"}).encode()
    all_headers = [(b"content-type", b"application/json"), *headers]
    return Request(method, path, all_headers, data, time.monotonic(), total_bytes), among


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_a_promise_goes_where_the_shadow_gives_it() -> None:
    async def main() -> None:
        plane = Plane("a", "b")
        plane.speak("a", **LOADED)
        for _ in range(4):  # whoever's turn it is
            decision = await plane.decide(body={"prompt": "x", "slo": SLO})
            assert decision.promised and decision.replica.name == "b"
            plane.decisions.began(decision.exchange)
            plane.decisions.ended(decision.exchange)
        assert plane.counted("promised") == 4
        assert plane.outstanding() == 0

    run(main())


def test_headers_towards_the_replica() -> None:
    async def main() -> None:
        plane = Plane("a", "b")
        sent = [(b"x-vllm-slo-ticket", b"9"), (b"x-vllm-slo-made-up", b"1"), (b"x-other", b"2")]
        decision = await plane.decide(body={"prompt": "x", "slo": SLO}, headers=sent)
        assert decision.headers["x-vllm-slo-token"] == "secret"
        assert 0.0 <= float(decision.headers["x-vllm-slo-age-ms"]) < 10_000.0
        assert int(decision.headers["x-vllm-slo-ticket"]) > 1_000_000
        assert decision.headers["x-vllm-slo-unattainable"] == "decline"  # another may promise it
        assert decision.removed == ("x-vllm-slo-made-up",)
        assert [spec.name for spec in decision.fallbacks] == [
            name for name in "ab" if name != decision.replica.name
        ]

    run(main())


def test_a_data_plane_that_cannot_ask_again_has_replicas_serve() -> None:
    async def main() -> None:
        promised = Plane("a", "b", asks_again=False)
        decision = await promised.decide(body={"prompt": "x", "slo": SLO})
        assert "x-vllm-slo-unattainable" not in decision.headers
        configured = Plane("a", asks_again=False, routing={"backup": "best_effort"})
        decision = await configured.decide(body={"prompt": "x", "slo": SLO})
        assert decision.headers["x-vllm-slo-unattainable"] == "best_effort"
        plain = await configured.decide(path="/v1/models", method="GET", body=b"")
        assert "x-vllm-slo-unattainable" not in plain.headers

    run(main())


def test_after_a_refusal_the_next_replica_is_asked() -> None:
    async def main() -> None:
        plane = Plane("a", "b")
        asked = {"prompt": "x", "slo": {**SLO, "on_unattainable": "decline"}}
        first = await plane.decide(body=asked)
        second = plane.decisions.again(first.exchange, 1.5, "prefill")
        assert isinstance(second, Decision) and second.exchange == first.exchange
        assert second.replica.name != first.replica.name
        assert int(second.headers["x-vllm-slo-ticket"]) > int(first.headers["x-vllm-slo-ticket"])
        assert "x-vllm-slo-unattainable" not in second.headers  # nobody is left
        assert plane.cluster.listed[first.replica.name].virtual.outstanding == 0
        refusal = plane.decisions.again(second.exchange, 0.25, "decode")
        assert isinstance(refusal, Refusal) and refusal.status == 429
        assert refusal.headers["retry-after-ms"] == "250" and refusal.headers["Retry-After"] == "1"
        assert refusal.headers["x-slo-reason"] == "prefill"  # of the first
        error = json.loads(refusal.body)["error"]
        assert (error["type"], error["param"], error["code"]) == ("slo_unattainable", "slo", 429)
        assert plane.counted("declined") == 1 and plane.outstanding() == 0
        assert plane.metrics.refused_after_promise._value.get() == 2

    run(main())


def test_after_a_failure_other_replicas_are_tried_as_often_as_configured() -> None:
    async def main() -> None:
        plane = Plane("a", "b", "c", routing={"retries": 1})
        first = await plane.decide()
        second = plane.decisions.again(first.exchange, None, "silence")
        assert isinstance(second, Decision) and second.replica != first.replica
        assert plane.retries("silence") == 1
        last = plane.decisions.again(first.exchange)
        assert isinstance(last, Refusal) and last.status == 502
        assert plane.counted("unavailable") == 1 and plane.outstanding() == 0

    run(main())


def test_no_replica_is_ready() -> None:
    async def main() -> None:
        for path, shape in ((COMPLETIONS, "error"), ("/v1/messages", "type"), ("/v1/models", "")):
            refusal = await Plane().refused(path=path)
            assert refusal.status == 503 and refusal.headers["Retry-After"] == "1"
            assert not shape or shape in json.loads(refusal.body)
        plane = Plane("a")
        plane.cluster.listed["a"].draining = True
        assert (await plane.refused()).status == 503
        assert plane.counted("unavailable") == 1

    run(main())


def test_a_decline_is_in_the_shape_of_the_api() -> None:
    async def main() -> None:
        plane = Plane("a", decline_status=409)
        plane.speak("a", **LOADED)
        asked = {"prompt": "x", "slo": {**SLO, "on_unattainable": "decline"}}
        refusal = await plane.refused(body=asked)
        assert refusal.status == 409 and refusal.headers["x-slo-reason"] == "prefill"
        asked = {"messages": [], "slo": {**SLO, "on_unattainable": "decline"}}
        refusal = await plane.refused(body=asked, path="/v1/messages")
        assert json.loads(refusal.body)["type"] == "error"
        assert plane.metrics.declined.labels("custom")._value.get() == 2

    run(main())


def test_a_mistake_in_a_carrier_is_refused() -> None:
    async def main() -> None:
        plane = Plane("a")
        refusal = await plane.refused(body={"prompt": "x", "slo": {"ttft_ms": -1}})
        error = json.loads(refusal.body)["error"]
        assert (refusal.status, error["param"]) == (400, "ttft_ms")
        assert plane.counted("invalid") == 1
        quote = await plane.refused(body={"slo": {"ttft_ms": -1}}, path="/v1/slo/quote")
        assert quote.status == 400 and plane.counted("invalid") == 1

    run(main())


@pytest.mark.parametrize(
    "path", ["/vllm-slo/state", "/vllm-slo%2Fstate", "//VLLM-slo/state", "/v1/../vllm-slo/state"]
)
def test_paths_that_the_token_opens_are_refused(path: str) -> None:
    async def main() -> None:
        assert (await Plane("a").refused(path=path, method="GET", body=b"")).status == 404

    run(main())


def test_a_gateway_may_remove_a_prefix_of_the_path() -> None:
    async def main() -> None:
        plane = Plane("a", "b")
        plane.speak("a", **LOADED)
        for path in ("/llm/v1/completions", "/llm/v1/slo/quote"):
            decision = await plane.decide(body={"prompt": "x", "slo": SLO}, path=path)
            assert decision.replica.name == "b"
            plane.decisions.ended(decision.exchange)

    run(main())


def test_what_generates_nothing_goes_round() -> None:
    async def main() -> None:
        plane = Plane("a", "b")
        plane.speak("a", **LOADED)
        seen = []
        for _ in range(4):
            decision = await plane.decide(path="/v1/models", method="GET", body=b"")
            seen.append(decision.replica.name)
            assert "x-vllm-slo-unattainable" not in decision.headers
            plane.decisions.began(decision.exchange)
            plane.decisions.ended(decision.exchange)
        assert seen in (["a", "b"] * 2, ["b", "a"] * 2)
        assert plane.metrics.first_byte._sum.get() == 0.0 and plane.outstanding() == 0
        assert all(plane.counted(result) == 0 for result in ("no_slo", "promised"))

    run(main())


def test_a_quote_asks_whom_the_request_would_and_counts_as_none() -> None:
    async def main() -> None:
        plane = Plane("a", "b")
        plane.speak("a", **LOADED)
        for _ in range(3):
            decision = await plane.decide(body={"prompt": "x", "slo": SLO}, path="/v1/slo/quote")
            assert decision.replica.name == "b"
            plane.decisions.began(decision.exchange)
            plane.decisions.ended(decision.exchange)
        assert plane.counted("promised") == 0 and plane.outstanding() == 0

    run(main())


def test_only_the_named_replicas_are_chosen() -> None:
    async def main() -> None:
        plane = Plane("a", "b", "c")
        plane.speak("c", **LOADED)
        for path in (COMPLETIONS, "/v1/models", "/v1/slo/quote"):
            for _ in range(3):
                decision = await plane.decide(
                    body={"prompt": "x", "slo": SLO}, path=path, among={"c"}
                )
                assert decision.replica.name == "c" and decision.fallbacks == ()
                plane.decisions.ended(decision.exchange)
            assert (await plane.refused(path=path, among=())).status == 503

    run(main())


def test_fallbacks_have_the_same_token_and_take_over() -> None:
    async def main() -> None:
        plane = Plane("a", "b", "c")
        plane.cluster.listed["c"].spec = ReplicaSpec("c", "http://10.0.0.3:8000", "other")
        plane.speak("b", **LOADED)
        plane.speak("c", **LOADED)
        decision = await plane.decide(body={"prompt": "x", "slo": SLO})
        assert decision.replica.name == "a" and decision.promised
        assert [spec.name for spec in decision.fallbacks] == ["b"]
        plane.decisions.served(decision.exchange, "a")
        plane.decisions.served(decision.exchange, "unknown")
        assert plane.retries("connection") == 0
        plane.decisions.served(decision.exchange, "b")
        assert plane.retries("connection") == 1
        shadows = {name: each.virtual for name, each in plane.cluster.listed.items()}
        assert (shadows["a"].outstanding, shadows["b"].outstanding) == (0, 1)
        ticket = int(decision.headers["x-vllm-slo-ticket"])
        plane.speak("b", tickets={"": frozenset({ticket})}, seen={"": ticket})
        assert shadows["b"].load_tokens == 0  # the replica's own account has it
        plane.decisions.began(decision.exchange)
        plane.decisions.ended(decision.exchange)
        assert plane.counted("best_effort") == 1 and plane.counted("promised") == 0
        assert plane.outstanding() == 0

    run(main())


def test_answers_teach_prefixes_and_the_length_of_prompts() -> None:
    async def main() -> None:
        plane = Plane("a", "b")
        prompt = "word " * 400
        first = await plane.decide(body={"prompt": prompt})
        unlearnt = plane.cluster.listed[first.replica.name].virtual.load_tokens
        plane.decisions.began(first.exchange, prompt_tokens=400)
        plane.decisions.ended(first.exchange, prompt_tokens=400)
        for _ in range(3):  # whose turn it is does not matter: the prompt is cached there
            again = await plane.decide(body={"prompt": prompt})
            assert again.replica == first.replica
            plane.decisions.ended(again.exchange)
        other = await plane.decide(body={"prompt": prompt[::-1]})
        learnt = plane.cluster.listed[other.replica.name].virtual.load_tokens
        assert learnt < unlearnt - 20

    run(main())


def test_ended_without_a_beginning_counts_no_result() -> None:
    async def main() -> None:
        plane = Plane("a")
        decision = await plane.decide()
        plane.decisions.ended(decision.exchange, client_left=True)
        plane.decisions.ended(decision.exchange, client_left=True)  # once is enough
        plane.decisions.began(decision.exchange)
        assert plane.metrics.client_gone._value.get() == 1
        assert plane.counted("no_slo") == 0 and plane.outstanding() == 0
        refused = await plane.decide()
        plane.decisions.declined(refused.exchange)
        plane.decisions.began(refused.exchange)
        plane.decisions.ended(refused.exchange)
        assert plane.counted("declined") == 1 and plane.counted("no_slo") == 0
        broken = await plane.decide()
        plane.decisions.failed(broken.exchange)
        plane.decisions.began(broken.exchange)
        plane.decisions.ended(broken.exchange)
        assert plane.counted("unavailable") == 1 and plane.counted("no_slo") == 0
        assert len(plane.cluster.listed["a"].prefixes) == 0

    run(main())


# --- bodies of which only the beginning is there ----------------------------------------------


def test_the_beginning_of_a_body_is_enough_for_the_prefix_and_the_size() -> None:
    async def main() -> None:
        plane = Plane("a", "b")
        prompt = "word " * 4_000
        whole = json.dumps({"model": "m", "prompt": prompt}).encode()
        first = await plane.decide(body=whole)
        plane.decisions.began(first.exchange)
        plane.decisions.ended(first.exchange)
        for _ in range(3):
            cut = whole[: 8 * CHUNK_BYTES]
            again = await plane.decide(body=cut, total_bytes=len(whole))
            assert again.replica == first.replica
            tokens = plane.cluster.listed[again.replica.name].virtual.load_tokens
            assert 0.8 * 5_700 < tokens + 8 * CHUNK_BYTES / 3.5 < 1.2 * 5_720
            plane.decisions.ended(again.exchange)

    run(main())


def test_carriers_count_where_they_are_whole() -> None:
    async def main() -> None:
        plane = Plane("a", "b")
        plane.speak("a", **LOADED)
        early = json.dumps({"slo": SLO, "prompt": "x" * 5_000}).encode()[:2_000]
        late = json.dumps({"prompt": "x" * 5_000, "slo": {"ttft_ms": 5_000, "tpot_ms": 5}})
        cut = late.encode()[:-10]
        headers = [(b"x-slo-ttft-ms", b"5000")]
        for body, carriers, promised in (
            (early, (), True),
            (cut, (), False),  # the carrier itself is cut off
            (cut, headers, True),
        ):
            decision = await plane.decide(body=body, headers=carriers, total_bytes=6_000)
            assert decision.promised is promised
            plane.decisions.ended(decision.exchange)

    run(main())


@pytest.mark.parametrize("body", [b"", b"{", b'{"pro', b"[1, 2", b"\xff\xfe", b'{"prompt": "a\xe4'])
def test_any_beginning_is_routed(body: bytes) -> None:
    async def main() -> None:
        plane = Plane("a")
        slo = [(b"x-slo-ttft-ms", b"5000")]
        decision = await plane.decide(body=body or b" ", headers=slo, total_bytes=3_500)
        assert decision.promised  # carriers in headers are always there
        assert plane.cluster.listed["a"].virtual.load_tokens > 900  # by the length of the whole
        plane.decisions.ended(decision.exchange)
        assert plane.outstanding() == 0

    run(main())


def test_token_ids_and_media_that_are_cut_off() -> None:
    async def main() -> None:
        plane = Plane("a")

        async def tokens(request: dict[str, Any], share: float) -> float:
            whole = json.dumps(request).encode()
            cut = whole[: int(len(whole) * share)]
            decision = await plane.decide(body=cut, total_bytes=len(whole))
            load = plane.cluster.listed["a"].virtual.load_tokens
            plane.decisions.ended(decision.exchange)
            return load

        ids = await tokens({"prompt": [1_234] * 1_000}, 0.25)
        assert 900 < ids < 1_100
        url = {"type": "image_url", "image_url": {"url": "data:" + "A" * 100_000}}
        image = await tokens({"messages": [{"role": "user", "content": [url]}]}, 0.25)
        assert 1_024 < image < 1_100

    run(main())


@pytest.mark.slow
def test_a_large_beginning_is_read_by_the_other_process() -> None:
    async def main() -> None:
        plane = Plane("a")
        slow = {"ttft_ms": 60_000}  # the process takes a while to start
        body = json.dumps({"slo": slow, "prompt": "x" * 2 * LARGE_BYTES}).encode()
        decision = await plane.decide(body=body[: LARGE_BYTES + 1], total_bytes=len(body))
        assert decision.promised
        plane.decisions.ended(decision.exchange)
        plane.decisions.close()

    run(main())
