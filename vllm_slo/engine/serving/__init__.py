# SPDX-License-Identifier: Apache-2.0
"""How an engine is started: the plugin, the command line, `LLM`, profiles.

Empty on purpose: :mod:`vllm_slo.engine.serving.cpu_alias` is imported while vLLM itself is half
loaded."""
