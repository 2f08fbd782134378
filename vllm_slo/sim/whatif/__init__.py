# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo whatif``: a recorded trace as it was served, as stock vLLM would, as vllm-slo would."""
