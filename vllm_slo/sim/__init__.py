# SPDX-License-Identifier: Apache-2.0
"""vLLM's real scheduler objects in virtual time, without a model."""
