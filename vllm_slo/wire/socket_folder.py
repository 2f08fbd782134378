# SPDX-License-Identifier: Apache-2.0
"""Private folders for Unix sockets."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

LONGEST: Final = 80
"""Bytes that the path of such a folder may have. A socket's path has at most 107 (unix(7)), and
HAProxy keeps ten of them for itself."""


def make_socket_folder(prefix: str) -> Path:
    """A new folder that only this user may open: where temporary files are, or, if the paths of
    sockets there would be too long, in ``/tmp``.

    Raises:
        OSError: it cannot be made.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if len(bytes(folder)) <= LONGEST:
        return folder
    folder.rmdir()
    # A new folder there is as private as any other.
    return Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))  # nosec B108
