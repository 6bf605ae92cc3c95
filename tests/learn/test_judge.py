"""A model that was trained here on verdicts serves as a judge: with the same questions it gives what it was taught."""

import json
import shutil

from posttrain.models.paths import resolve_path
from posttrain.rewards.base import Completion, Rewards
from posttrain.rewards.rubric import messages, rubric_of
from posttrain.train.launch import train

RUBRIC = {"criteria": ["quality"], "scale": [1, 9], "explain": False, "max_tokens": 48}


def test_a_trained_judge(tmp_path):
    """The toy model is too small to read completions; that every verdict is 7 of 9 is what it can learn."""
    rubric = rubric_of(RUBRIC | {"model": "none"})
    verdict = {"role": "assistant", "content": json.dumps({"scores": {"quality": 7}})}
    rows = [{"messages": [*messages(rubric, f"{number}?", ["a" * number], None), verdict]} for number in range(1, 13)]
    (tmp_path / "verdicts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tmp_path / "start"
    shutil.copytree(resolve_path("pico"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    train(
        "sft",
        model={"path": str(model)},
        data={"train": [str(tmp_path / "verdicts.jsonl")], "max_length": 4096},
        train={"max_steps": 15, "batch_size": 4, "learning_rate": 3e-3, "lr_scheduler": "constant"},
        save={"every_steps": 0},
        output_dir=str(tmp_path / "run"),
        quiet=True,
    )
    file = tmp_path / "rubric.yaml"
    file.write_text(json.dumps(RUBRIC | {"model": str(tmp_path / "run"), "cache": str(tmp_path / "cache")}))
    asked = [
        Completion(
            prompt=prompt,
            messages=[{"role": "user", "content": prompt}],
            text=text,
            finish="stop",
            tokens=2,
            columns={},
        )
        for prompt, text in (("3?", "bb"), ("Why?", "no"), ("4?", "aaaa"))
    ]
    with Rewards([f"judge:{file}"], timeout_seconds=60) as rewards:
        rewards.check()
        verdicts = [verdict for (verdict,) in rewards.score(asked)]
    assert [verdict.value for verdict in verdicts] == [0.75] * 3, verdicts
    assert all(verdict.counts["requests"] == 1 for verdict in verdicts)
