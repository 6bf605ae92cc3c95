"""Self-play of two policies: the one that is trained against an earlier one, which `posttrain serve` serves.

    posttrain serve runs/earlier --port 8001
    seq 0 99 | sed 's/.*/{"prompt": "go", "seed": &}/' > seeds.jsonl
    OPPONENT_URL=http://127.0.0.1:8001/v1 posttrain grpo configs/grpo.yaml --data.train seeds.jsonl \\
        --rollout.agent examples/self_play.py:nim --reward.env OPPONENT_URL

The game is Nim: take 1, 2 or 3 of the stones in turn; who takes the last one wins. Each player has a conversation of
its own. Only the learner's tokens are trained: those of the opponent come from another endpoint. For the next round,
serve the run that has just ended.
"""

from __future__ import annotations

import os
import random
import re
from typing import Any

RULES = "Nim: take 1, 2 or 3 stones in turn; who takes the last one wins. Reply with the number only."


def take(client: Any, model: str, messages: list[dict[str, str]], stones: int) -> int | None:
    """Ask a player for a move; None if it is not one. The conversation goes on with the reply."""
    messages.append({"role": "user", "content": f"There are {stones} stones. How many do you take?"})
    reply = client.chat.completions.create(model=model, messages=messages, max_tokens=8)
    text = reply.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    number = re.search(r"[123]", text)
    return min(int(number[0]), stones) if number else None


def nim(example: dict[str, Any], client: Any) -> dict[str, float]:
    """Play one game; the reward of the learner is 1 for a win, and -1 for a move that is none."""
    import openai

    rng = random.Random(example["seed"])
    stones, learner = rng.randint(5, 12), rng.randrange(2)
    opponent = openai.OpenAI(base_url=os.environ["OPPONENT_URL"], api_key=os.environ.get("OPPONENT_KEY", "none"))
    name = opponent.models.list().data[0].id
    players = [(client, "policy") if player == learner else (opponent, name) for player in (0, 1)]
    talks = [[{"role": "system", "content": f"You are player {player + 1}. {RULES}"}] for player in (0, 1)]
    player = 0
    while True:
        taken = take(*players[player], talks[player], stones)
        if taken is None and player == learner:
            return {"win": 0.0, "invalid": -1.0}
        if taken is None:  # the game goes on with a move for the opponent, so that the learner plays in every game
            taken = rng.randint(1, min(3, stones))
        stones -= taken
        if not stones:
            return {"win": float(player == learner), "invalid": 0.0}
        player = 1 - player
