# SPDX-License-Identifier: Apache-2.0
"""Recorded traffic: what arrived, what became of it, and the files that hold it."""
