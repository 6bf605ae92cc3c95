"""An agent as a command: the example comes as JSON in standard input, the last line that is printed is the reward.

posttrain grpo configs/grpo.yaml --rollout.agent "python examples/agent_command.py"
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request


def ask(messages: list[dict[str, str]]) -> str:
    """Send a request to the endpoint that the environment variables name."""
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 16}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


if __name__ == "__main__":
    example = json.load(sys.stdin)
    reply = ask(example["messages"])
    print(float(example["completion"] in reply))
