# SPDX-License-Identifier: Apache-2.0
"""What one step computes."""
