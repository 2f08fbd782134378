# SPDX-License-Identifier: Apache-2.0
"""Jobs and answers of several parts, each with a pace of its own."""
