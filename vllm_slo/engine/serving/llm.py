# SPDX-License-Identifier: Apache-2.0
"""``vllm_slo.LLM``: vLLM's ``LLM`` with our scheduler and an ``slo`` argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm
from vllm import RequestOutput, SamplingParams

from vllm_slo import tiny
from vllm_slo.config import profiles
from vllm_slo.config.class_names import SCHEDULER
from vllm_slo.config.model import CONFIG_KEY, SLOConfig
from vllm_slo.config.serve_args import TINY, tiny_arguments, tree_arguments, with_draft
from vllm_slo.config.speculation import DRAFT_KEY, SERVERS_KEY, pool_value
from vllm_slo.engine.compat.version import check_vllm
from vllm_slo.errors import ConfigError, InvalidSLOError
from vllm_slo.slo.access import Seal
from vllm_slo.slo.keys import QUOTE_KEY
from vllm_slo.slo.model import SLO
from vllm_slo.slo.verdicts import REPORT_KEY, unpack_quote
from vllm_slo.wire.draft_socket import check_verifier

SLOs = SLO | Sequence[SLO | None] | None


class LLM(vllm.LLM):
    """vLLM's offline engine, scheduling by the objective of each prompt.

    Args:
        model: as for ``vllm.LLM``; ``"tiny"`` is the built-in model.
        draft_model: name or folder of a small model of the same vocabulary that drafts token trees,
            which ``model`` verifies; ``"tiny"`` is the built-in one. Answers do not change. Of a
            list of models, the smallest first, the fastest chain is chosen all the time.
            Sets ``worker_cls`` and ``speculative_config``, and on CPU ``block_size``, on CUDA
            ``attention_backend`` and ``compilation_config`` where these are not given.
        draft_servers: in place of ``draft_model`` the address where draft servers may connect
            (``vllm-slo draft-server``), ``tcp://HOST:PORT`` or ``ipc://PATH``. They share a secret
            with this engine: ``speculation.draft_token_file`` of the configuration names the file
            that holds it, or the environment variable ``VLLMSLO_DRAFT_TOKEN`` holds it. Sets the
            same arguments.
        slo_config: a YAML file, or its contents as a mapping.
        kwargs: everything ``vllm.LLM`` takes.

    Raises:
        ConfigError: the configuration, the address or the token for draft servers cannot be used,
            another ``scheduler_cls`` is given, or the folder of the draft model shows that it
            cannot be used. Other faults of a draft model appear in the engine, see ProfileError.
        IncompatibleVLLMError: the installed vLLM is not supported.
        ProfileError: the configured step-time profile is missing or broken. That it is of another
            model appears in the engine: as this error where the engine runs in this process, else
            as vLLM's RuntimeError with this error in the log.
    """

    def __init__(
        self,
        model: str,
        *,
        draft_model: str | Path | Sequence[str | Path] | None = None,
        draft_servers: str | None = None,
        slo_config: str | Path | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_vllm()
        other = kwargs.setdefault("scheduler_cls", SCHEDULER)
        if other != SCHEDULER:
            raise ConfigError(f"scheduler_cls: vllm_slo.LLM needs {SCHEDULER}, not {other!r}")
        additional = dict(kwargs.pop("additional_config", None) or {})
        if slo_config is not None:
            inline = isinstance(slo_config, dict)
            additional[CONFIG_KEY] = slo_config if inline else str(slo_config)
        if draft_model is not None:
            pool = [draft_model] if isinstance(draft_model, str | Path) else draft_model
            additional[DRAFT_KEY] = pool_value([str(name) for name in pool])
        if draft_servers is not None:
            additional[SERVERS_KEY] = draft_servers
        config = SLOConfig.from_additional_config(additional)
        if config.access is not None:
            raise ConfigError("access: there are no clients here; leave it out of LLM's slo_config")
        speculation = config.speculation
        if speculation.draft_servers is not None:
            check_verifier(speculation.draft_servers, speculation.draft_token_file, "draft_servers")
        if config.profile is not None:
            profiles.load(config.profile)  # only the engine knows whether the profile is its own
        self._slo_classes = config.slo_classes()
        self._seal = Seal.prepare()
        name = str(tiny.path("target")) if model == TINY else model
        kwargs.update(tree_arguments(speculation, _given(kwargs)))
        if model == TINY:
            kwargs.update(tiny_arguments(kwargs))
        additional = with_draft(additional, speculation, name, kwargs.get("tokenizer"))
        super().__init__(name, additional_config=additional, **kwargs)

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slo: SLOs = None,
        **kwargs: Any,
    ) -> list[RequestOutput]:
        """As ``vllm.LLM.generate``, with one SLO for all prompts or one for each.

        A declined prompt (``on_unattainable="decline"``) comes back without tokens; its
        ``outputs[0].stop_reason`` is ``"slo_declined:<milliseconds to wait>:<reason>"``.

        Raises:
            InvalidSLOError: as many SLOs as prompts are needed, or one names an unknown class.
        """
        params = self._with_slo(_count(prompts), sampling_params, slo)
        return super().generate(prompts, params, **kwargs)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *args: Any,
        slo: SLOs = None,
        **kwargs: Any,
    ) -> list[RequestOutput]:
        """As ``vllm.LLM.chat``, with one SLO for all conversations or one for each."""
        several = bool(messages) and not isinstance(messages[0], dict)
        params = self._with_slo(len(messages) if several else 1, sampling_params, slo)
        return super().chat(messages, params, *args, **kwargs)

    def quote(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slo: SLOs = None,
    ) -> list[dict[str, Any]]:
        """What each prompt would be promised if it came now. Nothing is generated or changed.

        Returns:
            One answer for each prompt, as ``POST /v1/slo/quote`` gives it; times in milliseconds.

        Raises:
            InvalidSLOError: as `generate`.
        """
        count = _count(prompts)
        params = self._with_slo(count, sampling_params, slo)
        each = list(params) if isinstance(params, Sequence) else [params] * count
        asking = [self._with_keys(sampling, None) for sampling in each]
        for sampling in asking:
            sampling.n = 1
            sampling.extra_args = self._seal.sealed({**(sampling.extra_args or {}), QUOTE_KEY: 1})
        outputs = super().generate(prompts, asking, use_tqdm=False)
        return [_quote_of(output) for output in outputs]

    def _with_slo(self, count: int, params: Any, slo: SLOs) -> Any:
        """Sampling parameters that carry the SLOs, one per prompt; as given without any SLO."""
        given = list(params) if isinstance(params, Sequence) else [params] * count
        for sampling in given:
            SLO.from_extra_args(sampling and sampling.extra_args, classes=self._slo_classes)
        if slo is None:
            return params
        slos = [slo] * count if isinstance(slo, SLO) else list(slo)
        if len(slos) != count or len(given) != count:
            raise InvalidSLOError(
                "slo",
                f"{len(slos)} SLOs and {len(given)} sampling parameters for {count} prompts",
                "give one for all prompts or one for each",
            )
        return list(map(self._with_keys, given, slos))

    def _with_keys(self, params: SamplingParams | None, slo: SLO | None) -> SamplingParams:
        """A copy of the sampling parameters with the keys of an SLO."""
        params = self.get_default_sampling_params() if params is None else params.clone()
        if slo is not None:
            flat = slo.to_extra_args()
            SLO.from_extra_args(flat, classes=self._slo_classes)
            params.extra_args = {**(params.extra_args or {}), **flat}
        return params


def _count(prompts: Any) -> int:
    """The number of prompts; a list of ints is one prompt."""
    several = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    if several and prompts and isinstance(prompts[0], int):
        several = False
    return len(prompts) if several else 1


def _quote_of(output: RequestOutput) -> dict[str, Any]:
    quote = unpack_quote(output.outputs[0].stop_reason)
    assert quote is not None, output
    return quote


def _given(kwargs: Mapping[str, Any]) -> set[str]:
    """Names of the engine's arguments that are given. One at vLLM's default counts as not given."""
    given = {name for name, value in kwargs.items() if value not in (None, "auto")}
    attention = kwargs.get("attention_config")
    if isinstance(attention, Mapping):
        backend = attention.get("backend")
    else:
        backend = getattr(attention, "backend", None)
    return given if backend is None else given | {"attention_config.backend"}


def report_of(output: RequestOutput) -> dict[str, Any] | None:
    """The report on a finished prompt's SLO: tier, promised or the reason why not at first, TTFT
    and TPOT in milliseconds, attained."""
    carrier = output.kv_transfer_params or {}
    report = carrier.get(REPORT_KEY)
    return dict(report) if report is not None else None
