# SPDX-License-Identifier: Apache-2.0
"""Attention over token trees on vLLM's paged KV cache."""
