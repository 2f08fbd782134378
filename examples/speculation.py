# SPDX-License-Identifier: Apache-2.0
"""Token trees of a draft model in one offline engine. Run ``python examples/speculation.py``."""

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import SamplingParams

from vllm_slo import LLM


def main() -> None:
    """Generate with trees, then say how much of what the draft guessed was accepted."""
    llm = LLM(
        "tiny",
        draft_model="tiny",
        enforce_eager=True,
        max_model_len=1024,
        disable_log_stats=False,  # for the counts below
    )
    prompts = ["def main(args):\n    ", "class Reader:\n    "]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0))
    for output in outputs:
        print(output.prompt + output.outputs[0].text)
    said = {metric.name: metric for metric in llm.get_metrics()}
    trees, guessed, accepted = (
        said[f"vllm:spec_decode_num_{what}"].value
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    print(f"{trees} trees, {accepted} of {guessed} draft tokens accepted:", end=" ")
    print(f"{1 + accepted / trees:.2f} tokens a tree instead of 1")


if __name__ == "__main__":
    main()
