"""GGUF files run by llama.cpp itself: `make test-export` builds it, or where llama-cpp-python is installed."""

import numpy as np
import pytest
import torch

from posttrain.models.export import load_source
from posttrain.models.pico import pico_folder
from posttrain.publish.divergence import TEXTS, logprobs_of
from posttrain.publish.formats import export
from tests.unit.publish.models import byte_level, model_folder

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: make test-export")

# As SmolLM2: tied embeddings, groups of query heads, digits split one by one. Rows of 256, so that Q4_K can be used.
SMOLLM2 = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}
MODELS = {
    "pico": lambda folder: pico_folder(),
    "smollm2": lambda folder: model_folder("llama", folder, byte_level("smollm"), **SMOLLM2),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("kind", "limit"), [("f16", 1e-5), ("q8_0", 0.02), ("q4_k_m", 0.2)])
def test_llama_cpp_reads_the_same_tokens_and_computes_the_same(name, kind, limit, tmp_path, capsys):
    source = MODELS[name](tmp_path / "model")
    report = export(str(source), tmp_path / "out", target_format="gguf", gguf_type=kind)
    loaded = load_source(str(source))
    model = loaded.model.float()
    reader = llama_cpp.Llama(
        str(tmp_path / "out" / report["file"]), n_ctx=256, n_batch=256, logits_all=True, n_threads=1, verbose=False
    )
    assert reader.n_vocab() == model.config.vocab_size
    divergences = []
    for text in ("<s>", "12+30=42", *TEXTS[:3]):
        ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert reader.tokenize(text.encode(), add_bos=False, special=True) == ids, text
        ids = ids[: min(64, model.config.max_position_embeddings)]
        reader.reset()
        reader.eval(ids)
        found = torch.from_numpy(np.array(reader.scores[: len(ids)])).log_softmax(-1)
        expected = logprobs_of(model, torch.tensor(ids))
        divergences.append((expected.exp() * (expected - found)).sum(-1))
    kl = float(torch.cat(divergences).mean())
    with capsys.disabled():
        print(f"\n{name} {kind}: KL per token of llama.cpp {kl:.2g}, reported {report['kl']:.2g}")
    assert abs(kl) < limit
