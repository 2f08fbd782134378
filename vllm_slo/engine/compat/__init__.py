# SPDX-License-Identifier: Apache-2.0
"""Every private name of vLLM that is used, each with what it is for; the one place that knows
versions of vLLM."""
