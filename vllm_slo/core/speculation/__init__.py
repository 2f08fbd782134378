# SPDX-License-Identifier: Apache-2.0
"""How many drafts are made and verified, by whom, and for whom."""
