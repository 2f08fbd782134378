# SPDX-License-Identifier: Apache-2.0
"""The section `recording` of the configuration: a file of what arrived and what became of it."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from vllm_slo.errors import ConfigError
from vllm_slo.slo.access_config import Section

RECORD_KEY: Final = "record"
"""Key of vLLM's `additional_config` that sets `recording.path`; ``vllm-slo serve --record``."""
SALT_VARIABLE: Final = "VLLMSLO_RECORDING_SALT"
"""Environment variable with the salt of hashes, hexadecimal. The first process of a server makes it
up, and its children inherit it, so that the files of its engines have the same ids for the same
prompts. It is never written into a file."""
SALT_BYTES: Final = 16


class RecordingConfig(Section):
    """A file of what arrived and what became of it, without prompts and answers."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="File to write, JSON lines; unset: nothing is recorded. Scope: each engine; "
        "replicas and further data-parallel engines add `.replica-K` or `.rank-K` to the name. A "
        "file that cannot be written, or that is no recording, ends the start.",
    )
    max_mb: int = Field(
        default=64,
        ge=1,
        le=65_536,
        description="Size of a file, MB (10^6 bytes), 1 to 65536, after which it is renamed to "
        "`FILE.1`, that one to `FILE.2`, and so on. Scope: each engine. Too low: few requests are "
        "kept.",
    )
    files: int = Field(
        default=8,
        ge=1,
        le=1_000,
        description="Files that are kept, 1 to 1000; the oldest is deleted. Scope: each engine. "
        "Too low: few requests are kept; too high: the disk fills.",
    )
    block_tokens: int = Field(
        default=64,
        ge=1,
        le=1_000_000,
        description="Prompt tokens that one hash id stands for, 1 to 1000000. Scope: server. Too "
        "low: long prompts make long lines; too high: common beginnings that are shorter are not "
        "seen.",
    )
    tenants: Literal["hashed", "plain"] = Field(
        default="hashed",
        description="Whether tenants are written by name. hashed: under a salted hash, the same in "
        "all files of a server's run. Scope: server. plain: whoever gets the file knows them.",
    )


def check_path(path: str | Path) -> None:
    """Refuse a file that cannot be made or written, without making it.

    Raises:
        ConfigError: one line with the field and the fix.
    """
    try:
        obstacle = _obstacle_of(Path(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise refused(path, f"{reason}; name another file") from error
    if obstacle is not None:
        raise refused(path, obstacle)


def _obstacle_of(file: Path) -> str | None:
    """Why a file cannot be used, and the fix; None: it can be."""
    folder = file.parent
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r}; make it"
    if file.exists() and not stat.S_ISREG(file.stat().st_mode):
        return "it is not a regular file; name another one"
    if file.exists() and not os.access(file, os.R_OK | os.W_OK):
        return "it cannot be written; change its mode or owner"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no file can be made in {str(folder)!r}; change its mode or owner"
    return None


def refused(path: str | Path, reason: str) -> ConfigError:
    """The error for a file that cannot be used; ``reason`` names the fix."""
    return ConfigError(f"recording.path {str(path)!r}: {reason}")


def make_salt() -> str:
    """A new salt, as `SALT_VARIABLE` holds it."""
    return secrets.token_hex(SALT_BYTES)


def share_salt() -> None:
    """Make up the salt for this process and its children, unless there is one.

    Raises:
        ConfigError: as `salt_in`.
    """
    os.environ.setdefault(SALT_VARIABLE, make_salt())
    salt_in(os.environ)


def salt_in(environment: Mapping[str, str]) -> bytes:
    """The salt that a server's processes share; one of its own where there is none.

    Raises:
        ConfigError: the variable does not hold hexadecimal digits.
    """
    given = environment.get(SALT_VARIABLE) or make_salt()
    try:
        salt = bytes.fromhex(given)
    except ValueError:
        salt = b""
    if len(salt) != SALT_BYTES:
        raise ConfigError(
            f"{SALT_VARIABLE}: not {2 * SALT_BYTES} hexadecimal digits; unset it, or set what "
            f"'openssl rand -hex {SALT_BYTES}' prints on all machines of the server"
        )
    return salt
