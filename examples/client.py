# SPDX-License-Identifier: Apache-2.0
"""Two requests with different objectives to a running server, through the openai client.

Start one with ``vllm-slo serve tiny --port 8000``, then run ``python examples/client.py``.
"""

import sys

from openai import OpenAI

client = OpenAI(
    base_url=sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1", api_key="-"
)
model = client.models.list().data[0].id

for slo in ({"ttft_ms": 500, "tpot_ms": 50}, {"tier": "best_effort"}):
    answer = client.completions.create(
        model=model,
        prompt="def parse(self, text):\n    ",
        max_tokens=40,
        temperature=0,
        extra_body={"slo": slo},
    )
    print(slo, "->", answer.model_extra.get("slo"))
    print(answer.choices[0].text)
