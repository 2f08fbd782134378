# SPDX-License-Identifier: Apache-2.0
"""A request that thinks fast and answers at reading speed, through the openai client.

Start a server with ``vllm-slo serve tiny --port 8000``, then run ``python examples/stages.py``. The
built-in model writes Python and does not think: the end of its first line stands for what would be
``</think>``. Behind vLLM's ``--reasoning-parser`` no text is needed:
``{"ttft_ms": 2000, "thinking_tpot_ms": 40, "tpot_ms": 100}`` says the same.
"""

import sys

from openai import OpenAI

client = OpenAI(
    base_url=sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1", api_key="-"
)
end_of_thinking = sys.argv[2] if len(sys.argv) > 2 else "\n"
slo = {
    "ttft_ms": 2000,
    "stages": [{"until": end_of_thinking, "tpot_ms": 40}, {"tpot_ms": 100}],
}
answer = client.completions.create(
    model=client.models.list().data[0].id,
    prompt="def read(path):\n    ",
    max_tokens=120,
    temperature=0,
    extra_body={"slo": slo},
)
report = answer.model_extra["slo"]
print("promised:", report["promised"], " attained:", report["attained"])
for name, asked, stage in zip(("thinking", "answer"), slo["stages"], report["stages"], strict=True):
    print(
        f"{name}: {stage['tokens']} tokens, at most {asked['tpot_ms']} ms a token asked, "
        f"{stage['tpot_ms']} ms in the worst window, attained: {stage['attained']}"
    )
