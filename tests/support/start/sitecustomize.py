# SPDX-License-Identifier: Apache-2.0
"""Run first by every Python process of the tests: garbage is collected less often.

Importing vLLM makes some 700,000 objects that stay. Looking through them again and again takes a
fifth of that import, and the tests start a hundred processes that import it.
"""

import gc

gc.set_threshold(100_000, 50, 100)
