"""What lies where, against slicing written out by hand."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.convert.megatron import CheckpointLayout, stage_layers
from posttrain.convert.parameters import shape_of
from posttrain.convert.stored_tensors import cover_error
from posttrain.core.errors import UsageError
from posttrain.core.files import read_json
from tests.unit.convert.models import assert_equal, converted, core, weights

# the tiny models: hidden 16, 4 heads of 4 in 2 groups, feed-forward 24, vocabulary 101, 4 layers


def test_a_llama_over_two_tensor_ranks_and_two_stages(tiny, tmp_path):
    converted(tiny("llama"), tmp_path / "core", CheckpointLayout("mcore", tp=2, pp=2), vocabulary_multiple=8)
    hf = weights(tiny("llama"))
    for tp in (0, 1):
        ranks = [core(tmp_path / "core", tp, pp, None)["model"] for pp in (0, 1)]
        # 101 rows padded to 112: the second rank has rows 56 to 100 and eleven copies of the last
        table = torch.cat([hf["model.embed_tokens.weight"], hf["model.embed_tokens.weight"][100:].repeat(11, 1)])
        assert torch.equal(ranks[0]["embedding.word_embeddings.weight"], table[tp * 56 : tp * 56 + 56])
        head = torch.cat([hf["lm_head.weight"], hf["lm_head.weight"][100:].repeat(11, 1)])
        assert torch.equal(ranks[1]["output_layer.weight"], head[tp * 56 : tp * 56 + 56])
        assert "output_layer.weight" not in ranks[0] and "embedding.word_embeddings.weight" not in ranks[1]
        assert torch.equal(ranks[1]["decoder.final_layernorm.weight"], hf["model.norm.weight"])
        for pp, rank in enumerate(ranks):
            for local in (0, 1):
                theirs, ours = f"model.layers.{2 * pp + local}.", f"decoder.layers.{local}."
                q, k, v = (hf[f"{theirs}self_attn.{x}_proj.weight"] for x in "qkv")
                # one group a rank: its two heads of queries, its key, its value
                expected = torch.cat([q[tp * 8 : tp * 8 + 8], k[tp * 4 : tp * 4 + 4], v[tp * 4 : tp * 4 + 4]])
                assert torch.equal(rank[f"{ours}self_attention.linear_qkv.weight"], expected)
                out = hf[f"{theirs}self_attn.o_proj.weight"][:, tp * 8 : tp * 8 + 8]
                assert torch.equal(rank[f"{ours}self_attention.linear_proj.weight"], out)
                gate, up = hf[f"{theirs}mlp.gate_proj.weight"], hf[f"{theirs}mlp.up_proj.weight"]
                rows = slice(tp * 12, tp * 12 + 12)
                assert torch.equal(rank[f"{ours}mlp.linear_fc1.weight"], torch.cat([gate[rows], up[rows]]))
                down = hf[f"{theirs}mlp.down_proj.weight"][:, rows]
                assert torch.equal(rank[f"{ours}mlp.linear_fc2.weight"], down)
                norm = hf[f"{theirs}post_attention_layernorm.weight"]
                assert torch.equal(rank[f"{ours}pre_mlp_layernorm.weight"], norm)


def test_groups_are_interleaved_and_biases_follow(tiny, tmp_path):
    converted(tiny("llama-biased"), tmp_path / "core", CheckpointLayout("mcore"))
    hf, rank = weights(tiny("llama-biased")), core(tmp_path / "core", single="mp_rank_00")["model"]
    for kind in ("weight", "bias"):
        q, k, v = (hf[f"model.layers.3.self_attn.{x}_proj.{kind}"] for x in "qkv")
        expected = torch.cat([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]])
        assert torch.equal(rank[f"decoder.layers.3.self_attention.linear_qkv.{kind}"], expected)
    # behind a sum over ranks the bias is whole on each of them
    converted(tiny("llama-biased"), tmp_path / "two", CheckpointLayout("mcore", tp=2))
    second = core(tmp_path / "two", single="mp_rank_01")["model"]
    assert torch.equal(second["decoder.layers.0.mlp.linear_fc2.bias"], hf["model.layers.0.mlp.down_proj.bias"])
    assert torch.equal(
        second["decoder.layers.0.mlp.linear_fc1.bias"],
        torch.cat([hf[f"model.layers.0.mlp.{x}_proj.bias"][12:] for x in ("gate", "up")]),
    )


def test_more_tensor_ranks_than_groups(tiny, tmp_path):
    """The rows q q k v | q q k v of two groups over four ranks: half a group each."""
    converted(tiny("llama-biased"), tmp_path / "core", CheckpointLayout("mcore", tp=4))
    hf = weights(tiny("llama-biased"))
    for kind in ("weight", "bias"):
        q, k, v = (hf[f"model.layers.3.self_attn.{x}_proj.{kind}"] for x in "qkv")
        expected = torch.cat([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]])
        for tp in range(4):
            rank = core(tmp_path / "core", single=f"mp_rank_{tp:02d}")["model"]
            found = rank[f"decoder.layers.3.self_attention.linear_qkv.{kind}"]
            assert torch.equal(found, expected[tp * 8 : tp * 8 + 8])


def test_experts_over_expert_ranks_one_by_one_and_grouped(tiny, tmp_path):
    hf = weights(tiny("mixtral"))
    name = "model.layers.2.block_sparse_moe.experts.{}.{}.weight"
    for layout in (
        CheckpointLayout("mcore", tp=2, pp=2, ep=2),
        CheckpointLayout("mcore", tp=2, pp=2, ep=2, experts="grouped"),
    ):
        out = tmp_path / layout.experts
        converted(tiny("mixtral"), out, layout)
        rank = core(out, tp=1, pp=1, ep=1)["model"]  # experts 2 and 3 of layers 2 and 3
        fc1 = [torch.cat([hf[name.format(e, w)][12:] for w in ("w1", "w3")]) for e in (2, 3)]
        fc2 = [hf[name.format(e, "w2")][:, 12:] for e in (2, 3)]
        if layout.experts == "single":
            for local in (0, 1):
                place = f"decoder.layers.0.mlp.experts.local_experts.{local}."
                assert torch.equal(rank[f"{place}linear_fc1.weight"], fc1[local])
                assert torch.equal(rank[f"{place}linear_fc2.weight"], fc2[local])
        else:  # as GroupedMLP looks at them
            first = rank["decoder.layers.0.mlp.experts.weight1"]
            second = rank["decoder.layers.0.mlp.experts.weight2"]
            assert first.shape == (16, 48) and second.shape == (24, 16)
            assert torch.equal(first.view(2, 16, -1), torch.stack([matrix.T for matrix in fc1]))
            assert torch.equal(second.view(2, -1, 16), torch.stack([matrix.T for matrix in fc2]))
        router = hf["model.layers.2.block_sparse_moe.gate.weight"]
        assert torch.equal(rank["decoder.layers.0.mlp.router.weight"], router)


def test_virtual_stages_noop_layers_and_tied_embeddings(tiny, tmp_path):
    layout = CheckpointLayout("mcore", pp=2, layers_per_virtual_stage=1, noop=(1, 4))
    converted(tiny("llama-tied"), tmp_path / "core", layout, vocabulary_multiple=1)
    hf = weights(tiny("llama-tied"))
    # six layers, 1 and 4 empty: 0 . 1 2 . 3; the first stage has 0, 2, 4, the second 1, 3, 5
    norms = {(0, 0): 0, (0, 1): 1, (1, 1): 2, (1, 2): 3}
    for pp in (0, 1):
        state = core(tmp_path / "core", 0, pp, None)
        assert {key for key in state if key.startswith("model")} == {"model0", "model1", "model2"}
        for chunk in range(3):
            model = state[f"model{chunk}"]
            if (pp, chunk) in norms:
                expected = hf[f"model.layers.{norms[pp, chunk]}.input_layernorm.weight"]
                assert torch.equal(model["decoder.layers.0.input_layernorm.weight"], expected)
            else:
                assert not [key for key in model if "layers" in key]
    assert torch.equal(state["model2"]["output_layer.weight"], hf["model.embed_tokens.weight"])


def test_a_stage_without_weights_has_its_file(tiny, tmp_path):
    converted(tiny("llama"), tmp_path / "core", CheckpointLayout("mcore", pp=3, noop=(2, 3)))
    assert core(tmp_path / "core", 0, 1, None)["model"] == {}
    converted(tmp_path / "core", tmp_path / "hf", CheckpointLayout(), "mcore")
    assert_equal(tiny("llama"), tmp_path / "hf")


def test_an_uneven_pipeline():
    assert stage_layers(CheckpointLayout("mcore", pp=4, layers_per_stage=(11, 13, 19, 21)), 64) == [
        [range(11)],
        [range(11, 24)],
        [range(24, 43)],
        [range(43, 64)],
    ]


def test_gpt2_is_transposed(tiny, tmp_path):
    converted(tiny("gpt2"), tmp_path / "core", CheckpointLayout("mcore", tp=2))
    hf, rank = weights(tiny("gpt2")), core(tmp_path / "core", single="mp_rank_01")["model"]
    q, k, v = hf["transformer.h.1.attn.c_attn.weight"].T.split(16)
    heads = [torch.cat([x[h * 4 : h * 4 + 4] for x in (q, k, v)]) for h in (2, 3)]
    assert torch.equal(rank["decoder.layers.1.self_attention.linear_qkv.weight"], torch.cat(heads))
    assert torch.equal(rank["embedding.position_embeddings.weight"], hf["transformer.wpe.weight"])
    assert torch.equal(rank["decoder.layers.1.mlp.linear_fc1.weight"], hf["transformer.h.1.mlp.c_fc.weight"].T[32:])


def test_fused_families_are_taken_apart_in_the_right_order(tiny, tmp_path):
    for name, qkv in (("phi3", "self_attn.qkv_proj"), ("internlm2", "attention.wqkv")):
        converted(tiny(name), tmp_path / name, CheckpointLayout("mcore"))
        fused = weights(tiny(name))[f"model.layers.0.{qkv}.weight"]
        found = core(tmp_path / name, single="mp_rank_00")["model"]["decoder.layers.0.self_attention.linear_qkv.weight"]
        if name == "phi3":
            q, k, v = fused.split([16, 8, 8])
            fused = torch.cat([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]])
        assert torch.equal(found, fused)


def test_bloom_keeps_its_order_and_the_norm_of_its_embeddings(tiny, tmp_path):
    hf = weights(tiny("bloom"))
    converted(tiny("bloom"), tmp_path / "core", CheckpointLayout("mcore", tp=2, pp=2))
    for tp in (0, 1):
        first, last = (core(tmp_path / "core", tp, pp, None)["model"] for pp in (0, 1))
        for kind in ("weight", "bias"):
            fused = hf[f"transformer.h.1.self_attention.query_key_value.{kind}"]  # q k v of each head, as Megatron's
            found = first[f"decoder.layers.1.self_attention.linear_qkv.{kind}"]
            assert torch.equal(found, fused[tp * 24 : tp * 24 + 24])
            norm = hf[f"transformer.word_embeddings_layernorm.{kind}"]
            assert torch.equal(first[f"embedding.word_embeddings.norm.{kind}"], norm)
        assert not any("word_embeddings.norm" in name for name in last)
        assert torch.equal(last["output_layer.weight"], first["embedding.word_embeddings.weight"])  # tied
    model = AutoModelForCausalLM.from_pretrained(tiny("bloom"))
    read_as = model.transformer.h[1].self_attention._reshape(
        hf["transformer.h.1.self_attention.query_key_value.weight"].T[None]
    )
    converted(tiny("bloom"), tmp_path / "one", CheckpointLayout("mcore"))
    whole = core(tmp_path / "one", single="mp_rank_00")["model"]["decoder.layers.1.self_attention.linear_qkv.weight"]
    for place, theirs in enumerate(read_as):  # [1, heads, hidden, head_dim]
        assert torch.equal(theirs[0].transpose(1, 2), whole.view(4, 3, 4, 16)[:, place])
    written = {"model_type": "bloom", "n_embed": 16, "n_layer": 4, "num_attention_heads": 4, "vocab_size": 101}
    assert shape_of(written) == shape_of(read_json(tiny("bloom") / "config.json"))  # as the first ones wrote it
    converted(tiny("bloom"), tmp_path / "legacy", CheckpointLayout("legacy"))
    embeddings = core(tmp_path / "legacy", single="mp_rank_00")["model"]["language_model"]["embedding"]
    assert embeddings["word_embeddings"].keys() == {"weight", "norm.weight", "norm.bias"}


def test_a_bias_of_the_head_is_shared_and_padded_like_the_head(tiny, tmp_path):
    converted(tiny("phimoe-biased"), tmp_path / "core", CheckpointLayout("mcore", tp=2), vocabulary_multiple=8)
    bias = weights(tiny("phimoe-biased"))["lm_head.bias"]
    padded = torch.cat([bias, bias[100:].repeat(11)])
    for tp in (0, 1):
        rank = core(tmp_path / "core", single=f"mp_rank_{tp:02d}")["model"]
        assert torch.equal(rank["output_layer.bias"], padded[tp * 56 : tp * 56 + 56])
        assert len(rank["output_layer.weight"]) == 56


def test_legacy_names_are_nested(tiny, tmp_path):
    converted(tiny("qwen2"), tmp_path / "legacy", CheckpointLayout("legacy", pp=2))
    first, last = (core(tmp_path / "legacy", 0, pp, None)["model"] for pp in (0, 1))
    hf = weights(tiny("qwen2"))
    embedding = hf["model.embed_tokens.weight"]
    assert torch.equal(first["language_model"]["embedding"]["word_embeddings"]["weight"], embedding)
    assert torch.equal(last["word_embeddings_for_head"]["weight"], embedding)
    encoder = last["language_model"]["encoder"]
    assert torch.equal(encoder["layers.0.mlp.dense_4h_to_h.weight"], hf["model.layers.2.mlp.down_proj.weight"])
    assert torch.equal(encoder["final_norm.weight"], hf["model.norm.weight"])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tp": 3}, "--tensor_parallel_size 3 does not divide"),
        ({"tp": 8}, "--tensor_parallel_size 8 does not divide the attention heads"),
        ({"format": "legacy", "tp": 4}, "key-value heads"),
        ({"pp": 3}, "--pipeline_parallel_size 3 does not divide the layers"),
        ({"pp": 2, "layers_per_stage": (1, 2)}, "whose sum is 4"),
        ({"pp": 2, "layers_per_virtual_stage": 3}, "--layers_per_virtual_stage"),
        ({"pp": 2, "layers_per_virtual_stage": 1, "layers_per_stage": (2, 2)}, "cannot be combined"),
        ({"ep": 2}, "no experts"),
        ({"noop": (9,)}, "--noop_layers"),
    ],
)
def test_what_cannot_be_cut_is_refused(options, complaint, tiny, tmp_path):
    with pytest.raises(UsageError, match=complaint):
        converted(tiny("llama"), tmp_path / "core", CheckpointLayout(**({"format": "mcore"} | options)))
    assert not list(tmp_path.iterdir())


def test_gaps_and_overlaps_are_noticed():
    assert cover_error((4, 2), ((0, 2, 0, 2), (2, 4, 0, 2))) == ""
    assert "4 of 8" in cover_error((4, 2), ((0, 2, 0, 2),))
    assert "twice" in cover_error((4, 2), ((0, 3, 0, 2), (2, 4, 0, 2)))
    assert "is outside" in cover_error((4, 2), ((0, 5, 0, 2),))
