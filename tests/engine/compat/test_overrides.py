# SPDX-License-Identifier: Apache-2.0
"""The list of overridden methods is that of the subclasses, and vLLM has every one of them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.platforms import current_platform

from vllm_slo.engine.compat.overrides import OVERRIDDEN, SINCE
from vllm_slo.engine.compat.version import OLDEST, is_at_least

pytestmark = pytest.mark.versions


def class_of(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


@pytest.mark.parametrize(("base", "subclass"), OVERRIDDEN)
def test_every_override_is_listed_and_is_one(base: str, subclass: str) -> None:
    if base.endswith("CPUWorker") and not current_platform.is_cpu():
        pytest.skip("it replaces functions of torch.cuda")
    theirs, ours = class_of(base), class_of(subclass)
    assert issubclass(ours, theirs)
    listed = OVERRIDDEN[base, subclass]
    assert all(name in vars(ours) for name in listed)
    assert all(hasattr(theirs, name) == is_at_least(SINCE.get(name, OLDEST)) for name in listed)
    private = {name for name in vars(ours) if name[0] == "_" != name[1] and hasattr(theirs, name)}
    assert private - {"_abc_impl"} <= listed.keys()
