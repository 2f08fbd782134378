# SPDX-License-Identifier: Apache-2.0
"""The picker's certificate: the operator's, read again when it changes, or one made here."""

from __future__ import annotations

import datetime
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from vllm_slo.errors import ConfigError

logger = logging.getLogger("vllm_slo.endpoint_picker")

VALID_DAYS: Final = 3_650
"""Gateways do not check a certificate that is made here: it only has to outlive the process."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key.

    Attributes:
        files: certificate chain and key, PEM; None: a self-signed one is made.
    """

    files: tuple[Path, Path] | None

    def __str__(self) -> str:
        return "self-signed" if self.files is None else str(self.files[0])

    def credentials(self) -> Any:
        """What gRPC needs to serve with it.

        Raises:
            ConfigError: a file cannot be read, or certificate and key do not belong together.
        """
        if self.files is None:
            return grpc.ssl_server_credentials([_self_signed()])
        changed = _Changed(*self.files)
        return grpc.dynamic_ssl_server_credentials(changed.configuration, changed, False)


class _Changed:
    """Called by gRPC before each handshake: the new certificate, or None if it is the last one."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._pair = _read(*self._files)
        self.configuration = _configuration(self._pair)

    def __call__(self) -> Any:
        try:
            pair = _read(*self._files)
        except ConfigError as error:
            logger.warning("the certificate stays as it was: %s", error)
            return None
        if pair == self._pair:
            return None
        self._pair = pair
        logger.info("the certificate has changed")
        return _configuration(pair)


def _configuration(pair: tuple[bytes, bytes]) -> Any:
    return grpc.ssl_server_certificate_configuration([pair])


def _read(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """Key and certificate as gRPC takes them.

    Raises:
        ConfigError: a file cannot be read, or they do not belong together.
    """
    contents = []
    for flag, path in (("--tls-key", key), ("--tls-cert", certificate)):
        try:
            contents.append(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{flag} {path}: {error.strerror}") from error
    try:
        private = serialization.load_pem_private_key(contents[0], None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--tls-key {key}: no private key in PEM without a password") from error
    try:
        first = x509.load_pem_x509_certificates(contents[1])[0]
    except (ValueError, IndexError) as error:
        raise ConfigError(f"--tls-cert {certificate}: no certificate in PEM") from error
    if _public(first.public_key()) != _public(private.public_key()):
        raise ConfigError(f"--tls-cert {certificate} does not belong to --tls-key {key}")
    return contents[0], contents[1]


def _public(key: Any) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    encoded: bytes = key.public_bytes(serialization.Encoding.DER, form)
    return encoded


def _self_signed() -> tuple[bytes, bytes]:
    """A new key and a certificate of it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "vllm-slo endpoint picker")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return (
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        certificate.public_bytes(serialization.Encoding.PEM),
    )
