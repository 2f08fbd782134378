# SPDX-License-Identifier: Apache-2.0
"""Numbers on their way to the device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of the numbers on the device. The host does not wait for it: on CUDA the copy is
    made from pinned memory, which torch keeps until the copy is done."""
    host = torch.from_numpy(numbers)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
