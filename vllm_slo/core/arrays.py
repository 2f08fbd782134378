# SPDX-License-Identifier: Apache-2.0
"""Names of array types. A docstring says the shape of an array, as in ``(n,)``."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]
Marks: TypeAlias = NDArray[np.int8]
Parents: TypeAlias = NDArray[np.int32]
"""The parent of each node of a tree, or of several, by its index within the tree; -1: the root."""
