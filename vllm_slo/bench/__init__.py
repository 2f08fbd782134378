# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo bench``: open-loop load on any OpenAI endpoint, measured against objectives.

In-process use: ``run_bench`` if all servers are up; ``measure_zero_load``, ``build_workload``,
``bench_server`` and ``finish`` for servers that are started one after the other.
"""
