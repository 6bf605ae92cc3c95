"""The model card says what was used, without paths of this machine."""

import pytest

from posttrain.publish.card import plain


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/me/data/chat.jsonl", "chat.jsonl"),
        ("clients/acme.jsonl", "acme.jsonl"),
        ("clients/acme/*.parquet", "*.parquet"),
        ("rewards/mine.py:score", "mine.py:score"),
        ("runs/first/reference", "reference"),
        ("runs/secret", "secret"),
        ("http://10.0.0.7:8000/v1", "(an address)"),
        ("openai/gsm8k", "openai/gsm8k"),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        (0.5, "0.5"),
    ],
)
def test_values_without_the_directories_of_this_machine(value, shown, tmp_path, monkeypatch):
    (tmp_path / "runs/secret").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert plain(value) == shown
