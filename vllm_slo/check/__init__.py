# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo check``: what a file is, whether it is valid, and what in it is surely not meant."""
