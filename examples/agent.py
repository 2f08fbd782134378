# SPDX-License-Identifier: Apache-2.0
"""A tool loop of three rounds as one session, through the openai client.

Start a server with ``vllm-slo serve tiny --port 8000``, then run ``python examples/agent.py``. The
whole job is to take 20 seconds at most, tools included; what is left of that is divided anew in
every round, and the conversation stays in the prefix cache while the tool works.
"""

import sys
import time
import uuid

from openai import OpenAI

ROUNDS = 3

client = OpenAI(
    base_url=sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1", api_key="-"
)
model = client.models.list().data[0].id
session = f"agent-{uuid.uuid4().hex[:8]}"


def tool(text: str) -> str:
    """Stands for whatever an agent calls; it counts words, slowly."""
    time.sleep(0.3)
    return f"{len(text.split())} words"


messages = [{"role": "user", "content": "Write a function that reads a file."}]
for number in range(1, ROUNDS + 1):
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=40,
        temperature=0,
        extra_body={
            "slo": {
                "ttft_ms": 1500,
                "session_id": session,
                "session_e2e_ms": 20_000,
                "session_rounds": ROUNDS,
                "session_last": number == ROUNDS,
            }
        },
    )
    text = answer.choices[0].message.content or ""
    report = answer.model_extra["slo"]
    job = report["session"]
    print(
        f"round {job['round']}: first token after {report['ttft_ms']:.0f} ms, promised: "
        f"{report['promised']}, attained: {report['attained']}; the job after "
        f"{job['elapsed_ms'] / 1000:.1f} s: attained so far: {job['attained']}"
    )
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"The tool says: {tool(text)}. Go on."},
    ]
