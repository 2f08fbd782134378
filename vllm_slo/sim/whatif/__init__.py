# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo whatif``: a trace as it was served, as stock vLLM would, and as vllm-slo would."""
