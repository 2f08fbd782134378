# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo bench``: open-loop load on any OpenAI endpoint, measured against objectives.

In-process use: ``run_bench`` if all servers are up; ``measure_zero_load``, ``build_workload``,
``bench_server`` and ``finish`` for servers that are started one after the other.
"""

from __future__ import annotations

from vllm_slo.bench.client import (
    ClientOptions,
    ServerRun,
    measure_zero_load,
    run_server,
)
from vllm_slo.bench.endpoint import ServerTarget
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.main import (
    WorkloadOptions,
    add_arguments,
    bench_server,
    build_workload,
    finish,
    run,
    run_bench,
)
from vllm_slo.bench.report import BenchReport
from vllm_slo.bench.workload import DEFAULT_CLASSES, ClassSpec, Lengths, Workload
from vllm_slo.bench.zero_load import ZeroLoad

__all__ = [
    "DEFAULT_CLASSES",
    "BenchError",
    "BenchReport",
    "ClassSpec",
    "ClientOptions",
    "Lengths",
    "ServerRun",
    "ServerTarget",
    "Workload",
    "WorkloadOptions",
    "ZeroLoad",
    "add_arguments",
    "bench_server",
    "build_workload",
    "finish",
    "measure_zero_load",
    "run",
    "run_bench",
    "run_server",
]
