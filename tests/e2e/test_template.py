"""data.chat_template from the command line: the trained model carries it, and what follows needs not be told again."""

import json

from transformers import AutoTokenizer, GenerationConfig

from posttrain.train.launch import train
from tests.e2e.rows import write_rows


def small(tmp_path, name, model, kind, **data):
    return {
        "model": {"path": str(model)},
        "data": {"train": [write_rows(kind, tmp_path)], **data},
        "out": str(tmp_path / name),
        "steps": 1,
        "quiet": True,
        "update": {"rows_per_step": 2},
    }


def test_the_trained_model_carries_the_template(tmp_path):
    sft = train("sft", **small(tmp_path, "sft", "pico", "chat", template="glm4"))
    model = next((tmp_path / "sft").glob("checkpoints/step-*/model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2="}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "[gMASK]<sop><|user|>\n2+2=<|assistant|>"
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|user|>")]
    assert GenerationConfig.from_pretrained(model).eos_token_id == stops
    shown = json.loads(next((tmp_path / "sft").glob("samples/*.jsonl")).read_text().splitlines()[0])
    assert shown["text"].startswith("[gMASK]<sop><|") and shown["counts"].startswith("\n")

    dpo = train("dpo", **small(tmp_path, "dpo", sft.output_dir, "pair"))
    shown = json.loads(next((tmp_path / "dpo").glob("samples/*.jsonl")).read_text().splitlines()[0])
    assert shown["text"].startswith("[gMASK]<sop><|") and dpo.output_dir
