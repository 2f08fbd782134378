# SPDX-License-Identifier: Apache-2.0
"""The live page: what it keeps (``history``) and what it answers (``page``). Needs no vLLM."""
