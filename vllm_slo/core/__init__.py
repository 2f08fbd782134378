# SPDX-License-Identifier: Apache-2.0
"""The policies: pure functions from frozen views to frozen plans.

Nothing here imports vLLM, torch or ray, reads a clock or draws a random number by itself, so the
same code runs in the engine, in the router and in virtual time.
"""
