# SPDX-License-Identifier: Apache-2.0
"""Where the scripts are that tests start."""

from pathlib import Path
from typing import Final

SUPPORT: Final = Path(__file__).resolve().parent
