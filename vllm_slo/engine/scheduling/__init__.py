# SPDX-License-Identifier: Apache-2.0
"""The parts of the scheduler: who is live, what is promised, what a step computes."""
