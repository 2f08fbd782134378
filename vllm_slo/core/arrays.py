# SPDX-License-Identifier: Apache-2.0
"""Names of array types. A docstring says the shape of an array, as in ``(n,)``.

The number of axes is part of the type, since compiled code is made for it (`core.jit`).
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = Annotated[NDArray[np.float64], 1]
Floats2D: TypeAlias = Annotated[NDArray[np.float64], 2]
Floats3D: TypeAlias = Annotated[NDArray[np.float64], 3]
Ints: TypeAlias = Annotated[NDArray[np.int64], 1]
Ints2D: TypeAlias = Annotated[NDArray[np.int64], 2]
Bools: TypeAlias = Annotated[NDArray[np.bool_], 1]
Marks: TypeAlias = Annotated[NDArray[np.int8], 1]
Parents: TypeAlias = Annotated[NDArray[np.int32], 1]
"""The parent of each node of a tree, or of several, by its index within the tree; -1: the root."""
