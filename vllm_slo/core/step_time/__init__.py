# SPDX-License-Identifier: Apache-2.0
"""How long a step takes, and how many tokens fit into a time."""
