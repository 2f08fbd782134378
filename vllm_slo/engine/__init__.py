# SPDX-License-Identifier: Apache-2.0
"""The home of vLLM and torch: what turns vLLM's objects into views, and plans into its steps.

Empty on purpose: :mod:`vllm_slo.engine.serving.cpu_alias` is imported while vLLM itself is half
loaded.
"""
