# SPDX-License-Identifier: Apache-2.0
"""How long answers become."""
