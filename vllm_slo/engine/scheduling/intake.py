# SPDX-License-Identifier: Apache-2.0
"""What an arriving request asks for: its keys are checked, and its SLO is read."""

from __future__ import annotations

from vllm.v1.request import Request

from vllm_slo.config.model import SLOConfig
from vllm_slo.engine.scheduling import request_facts
from vllm_slo.engine.scheduling.stage_marks import StageMarks
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.errors import ConfigError, InvalidSLOError
from vllm_slo.slo.access import Seal, check_internal
from vllm_slo.slo.keys import asks_for_slo, has_slo_key
from vllm_slo.slo.model import SLO


class Intake:
    """Reads the SLOs of requests as they arrive.

    Args:
        config: classes, the default class, whether access is checked.
        seal: proves who wrote the internal keys; None: that of the environment.

    Attributes:
        classes: the configured classes by name.

    Raises:
        ConfigError: a class asks for stages whose ends cannot be found here.
    """

    def __init__(
        self, config: SLOConfig, marks: StageMarks, seal: Seal | None, clock: StepClock
    ) -> None:
        self.classes = config.slo_classes()
        for name, slo in self.classes.items():
            try:
                marks.check(slo)
            except InvalidSLOError as error:
                raise ConfigError(f"classes.{name}.{error}") from None
        self._default = config.default_class
        self._marks = marks
        self._clock = clock
        self._checks_access = config.access is not None
        self._seal = seal or (Seal.of_checked() if self._checks_access else Seal.from_environment())

    def check(self, request: Request) -> None:
        """Check who wrote a request's internal keys.

        Raises:
            InvalidSLOError: somebody without the seal.
        """
        extra = request.sampling_params.extra_args
        if self._checks_access and self._seal is not None:
            self._seal.check(extra)
        check_internal(extra, self._seal)

    def has_slo(self, request: Request) -> bool:
        """Whether a request asks for an SLO or gets the default class. Whether what it asks for is
        valid is not looked at."""
        if request.sampling_params is None:
            return False
        default = self._default is not None and self._takes_default(request)
        return default or asks_for_slo(request.sampling_params.extra_args)

    def read(self, request: Request) -> tuple[SLO | None, float]:
        """The SLO of a request that has just arrived, and when it arrived at the server, or at the
        front ahead of it, on the engine's clock.

        Raises:
            InvalidSLOError: it asks for something that cannot be.
        """
        before_s = request_facts.age_before_s(request)
        slo = self._slo_of(request, request.arrival_time - before_s)
        clock = self._clock.clock
        age_s = request_facts.age_s(request, clock.epoch_s())
        return slo, clock.monotonic_s() - age_s - before_s

    def _slo_of(self, request: Request, arrival_epoch_s: float) -> SLO | None:
        """The SLO of a request. Where access is checked, the check has named the default class;
        and where a prompt comes in parts, nobody can say when it has arrived, so it has none."""
        extra = request.sampling_params.extra_args
        slo = None
        if has_slo_key(extra):
            slo = SLO.from_extra_args(extra, classes=self.classes, arrival_s=arrival_epoch_s)
        if slo is not None:
            if request.resumable and slo.has_objective:
                raise InvalidSLOError("slo", "the prompt comes in parts", "leave objectives out")
            self._marks.check(slo)
        elif self._default and self._takes_default(request):
            return self.classes[self._default]
        return slo

    def _takes_default(self, request: Request) -> bool:
        """Whether a request without an SLO is one of the default class."""
        exempt = self._checks_access or request.resumable or request_facts.is_exempt(request)
        return not exempt
