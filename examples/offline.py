# SPDX-License-Identifier: Apache-2.0
"""Prompts with different objectives in one offline engine. Run ``python examples/offline.py``."""

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import SamplingParams

from vllm_slo import LLM, SLO
from vllm_slo.engine.serving.llm import report_of


def main() -> None:
    """Generate for an interactive and a batch prompt at once."""
    llm = LLM("tiny", enforce_eager=True, max_model_len=1024)
    prompts = ["def main(args):\n    ", "class Reader:\n    "]
    slos = [SLO(ttft_ms=1000, tpot_ms=100), SLO(tier="best_effort")]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0), slo=slos)
    for output in outputs:
        print(report_of(output))
        print(output.prompt + output.outputs[0].text)


if __name__ == "__main__":
    main()
