# SPDX-License-Identifier: Apache-2.0
"""Which API key may ask for which objectives, and the seal on what was checked.

The process that receives a request checks it and seals its flat keys with a secret that the
server's processes share. The scheduler accepts internal keys only with a seal. Where access is
checked it accepts no SLO key without one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from vllm_slo.errors import ConfigError, ForbiddenSLOError, InvalidSLOError
from vllm_slo.slo.access_config import AccessConfig, GrantConfig, KeyConfig
from vllm_slo.slo.keys import INTERNAL_KEYS, SEAL_KEY, is_slo_key
from vllm_slo.slo.model import SLO

SEAL_VARIABLE: Final = "VLLMSLO_SEAL"
"""Environment variable with the secret of the seal. The first process of a server makes it up, and
its children inherit it. Where engines run on other machines, the operator sets it on all."""
_NO_OBJECTIVES: Final = frozenset(
    {
        "value",
        "tier",
        "on_unattainable",
        "max_wait_ms",
        "max_waiting",
        "expected_output_tokens",
        "tenant",
        "speculation",
        "session_id",
        "session_rounds",
        "session_last",
        "slo_class",
    }
)
"""Fields of an SLO that set no objective. Every other field counts as one."""
_PACE: Final = ("session_e2e_ms", "session_rounds", "expected_output_tokens")
"""Fields that determine how fast a session's rounds must be: they act like objectives."""
_NOTHING: Final = GrantConfig(classes=[], tiers=["best_effort"], objectives=False)


@dataclass(frozen=True, slots=True)
class _Grant:
    """What one key may ask for, and the tenant of its requests; None: they have none."""

    may: GrantConfig
    tenant: str | None


class Seal:
    """A keyed digest over the flat SLO keys of one request.

    It proves that the keys were checked and have not changed since. A seal that is copied is valid
    for the same keys and values only.

    ``secret``: shared by the processes that seal and that check.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    @classmethod
    def from_environment(cls) -> Seal | None:
        """The seal of this server; None where the environment holds no secret."""
        secret = os.environ.get(SEAL_VARIABLE)
        return cls(secret) if secret else None

    @classmethod
    def of_checked(cls) -> Seal:
        """The seal, where access is checked.

        Raises:
            ConfigError: the environment holds no secret, so no request can prove that it was
                checked.
        """
        seal = cls.from_environment()
        if seal is None:
            raise ConfigError(
                f"access: {SEAL_VARIABLE} is not set in the engine's process; set the same secret "
                "for every process of the server, or leave access out where there are no clients"
            )
        return seal

    @classmethod
    def prepare(cls) -> Seal:
        """Make up the secret for this process and its children, unless there is one."""
        return cls(os.environ.setdefault(SEAL_VARIABLE, secrets.token_hex(32)))

    def of(self, flat: Mapping[str, Any]) -> str:
        """Seal of the SLO keys among `flat`, hexadecimal; other keys do not count."""
        text = "\n".join(f"{key}={_written(flat[key])}" for key in sorted(filter(_is_sealed, flat)))
        sealed = text.encode(errors="backslashreplace")
        return hmac.new(self._secret, sealed, hashlib.sha256).hexdigest()

    def check(self, extra: Mapping[str, Any] | None) -> None:
        """Refuse SLO keys without a valid seal.

        Raises:
            InvalidSLOError: `extra` has SLO keys, and they are not sealed.
        """
        if extra is None or not any(map(_is_sealed, extra)):
            return
        given = extra.get(SEAL_KEY)
        if not isinstance(given, str) or not hmac.compare_digest(
            given.encode(errors="surrogatepass"), self.of(extra).encode()
        ):
            raise InvalidSLOError(
                "slo",
                "SLO keys came by a way on which access is not checked",
                "send them over HTTP; several machines of one server need the same "
                f"{SEAL_VARIABLE} in their environment",
            )

    def sealed(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """`flat` with its seal."""
        return {**flat, SEAL_KEY: self.of(flat)}


def check_internal(extra: Mapping[str, Any] | None, seal: Seal | None) -> None:
    """Refuse internal keys without a valid seal.

    ``seal``: of this server; None: it has none, so no internal key is valid.

    Raises:
        InvalidSLOError: `extra` has internal keys, and they are not sealed.
    """
    internal = next((key for key in INTERNAL_KEYS if extra and key in extra), None)
    if internal is None:
        return
    try:
        if seal is not None:
            seal.check(extra)
            return
    except InvalidSLOError:
        pass
    fix = f"leave it out; several machines of one server need the same {SEAL_VARIABLE}"
    raise InvalidSLOError(internal, "is not a field of an SLO", fix)


def _is_sealed(key: object) -> bool:
    return is_slo_key(key) and key != SEAL_KEY


def _written(value: object) -> str:
    """A value as it is sealed. 1 and 1.0 are equal, since not every encoding keeps the type."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return f"{value:x}"  # Python limits the length of decimal digits
    return repr(value) if isinstance(value, str | float) else type(value).__name__


class Access:
    """The API keys of one server and their grants.

    Raises:
        ConfigError: a key cannot be read, or two names have the same key; one line without the key.
    """

    def __init__(self, config: AccessConfig, environ: Mapping[str, str] = os.environ) -> None:
        self._grants: dict[bytes, _Grant] = {}
        for name, key in config.keys.items():
            digest = _digest_of(name, key, environ)
            if digest in self._grants:
                raise ConfigError(f"access.keys.{name}: another name has the same key; remove one")
            self._grants[digest] = _Grant(key, key.tenant or name)
        others = config.others
        self._others = _Grant(others or _NOTHING, None if others is None else others.tenant)

    def ruled(
        self,
        slo: SLO,
        raw_headers: Iterable[tuple[bytes, bytes]],
        classes: Mapping[str, SLO],
        *,
        own: bool,
    ) -> SLO:
        """The SLO that a request may have, with its tenant.

        Args:
            slo: of the request, its class applied.
            raw_headers: ASGI headers, with the key.
            own: whether the request states the SLO itself. If not, it is of the default class; a
                key that may not have that class is served best effort.

        Raises:
            ForbiddenSLOError: the key may not ask for that; names the field.
        """
        grant = self._grant(bearer_of(raw_headers))
        try:
            _check(slo, grant, classes)
        except ForbiddenSLOError:
            if own:
                raise
            return SLO(tier="best_effort", tenant=grant.tenant)
        return replace(slo, tenant=grant.tenant)

    def _grant(self, key: bytes | None) -> _Grant:
        """The grant of a key. All are compared, so the time does not tell which one matched."""
        granted = self._others
        if key is not None:
            given = hashlib.sha256(key).digest()
            for digest, grant in self._grants.items():
                if hmac.compare_digest(given, digest):
                    granted = grant
        return granted


def bearer_of(raw_headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key of a request as vLLM reads it: of the first ``Authorization: Bearer``."""
    value = next((v for name, v in raw_headers if name.lower() == b"authorization"), b"")
    scheme, _, key = value.partition(b" ")
    return key if scheme.lower() == b"bearer" else None


def _digest_of(name: str, key: KeyConfig, environ: Mapping[str, str]) -> bytes:
    if key.sha256 is not None:
        return bytes.fromhex(key.sha256)
    if key.env is not None:
        source, secret = f"env: the variable {key.env}", environ.get(key.env, "")
    else:
        source = f"file: {key.file}"
        try:
            secret = Path(str(key.file)).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"access.keys.{name}.{source}: {reason}") from error
    if not secret:
        raise ConfigError(f"access.keys.{name}.{source} holds no key")
    return hashlib.sha256(secret.encode()).digest()


def _check(slo: SLO, grant: _Grant, classes: Mapping[str, SLO]) -> None:
    """Refuse what the grant does not cover. Values that the class of the SLO sets are allowed.

    Raises:
        ForbiddenSLOError: names the field.
    """
    may = grant.may
    if slo.tenant is not None and slo.tenant != grant.tenant:
        raise _forbidden("tenant", slo.tenant, f"leave it out, or say {grant.tenant or 'nothing'}")
    if slo.slo_class is not None and may.classes is not None and slo.slo_class not in may.classes:
        raise _forbidden("class", slo.slo_class, f"allowed: {', '.join(may.classes) or 'none'}")
    if slo.effective_tier not in may.tiers:
        raise _forbidden("tier", slo.effective_tier, f"allowed: {', '.join(may.tiers)}")
    usual = classes.get(slo.slo_class or "", SLO())
    for spec in fields(SLO):
        given, of_class = getattr(slo, spec.name), getattr(usual, spec.name)
        own = given is not None and given != of_class
        if own and not may.objectives and spec.name not in _NO_OBJECTIVES:
            raise _forbidden(spec.name, given, "use the objectives of a class")
        if own and spec.name == "e2e_ms" and may.limits_pace:
            raise _forbidden(spec.name, f"{given:g}", "use a class that sets it")
        if own and slo.session_id is not None and may.limits_pace and spec.name in _PACE:
            raise _forbidden(spec.name, given, "use a class that sets the pace of its sessions")
    limits = [
        ("ttft_ms", slo.ttft_ms, usual.ttft_ms, may.min_ttft_ms),
        ("tpot_ms", slo.tightest_tpot_ms, usual.tightest_tpot_ms, may.min_tpot_ms),
    ]
    for name, given, of_class, least in limits:
        if given is not None and least is not None and given < min(least, of_class or least):
            raise _forbidden(name, f"{given:g}", f"allowed: {least:g} or more")
    if slo.value > (most := max(may.max_value, usual.value)):
        raise _forbidden("value", f"{slo.value:g}", f"allowed: at most {most:g}")


def _forbidden(field: str, given: object, fix: str) -> ForbiddenSLOError:
    return ForbiddenSLOError(field, f"{given} is not allowed with this key", fix)
