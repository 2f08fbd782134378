# SPDX-License-Identifier: Apache-2.0
"""The live page: its data (``history``, ``merge``) and its answers (``page``). Needs no vLLM."""
