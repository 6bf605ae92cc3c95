"""Against the real thing: megatron-core builds the model, loads what we wrote and computes what transformers does."""

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.convert.conversion import convert
from posttrain.convert.megatron import CheckpointLayout
from posttrain.convert.source import open_source
from tests.tiny import tiny_folder
from tests.unit.convert.models import converted, core

pytest.importorskip("megatron.core")

TOKENS = torch.arange(1, 25)[None] * 37 % 104


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    """A group of one process, on a CPU: what megatron-core asks of CUDA is answered."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(megatron_random.CudaRNGStatesTracker, "fork", lambda self, name="": contextlib.nullcontext())
    # It forgets to define this name where Transformer Engine is not installed.
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def megatron_model(hf):
    """GPTModel with the configuration of a Llama, Qwen2 or Mixtral."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = getattr(hf, "num_local_experts", None)
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        num_moe_experts=experts,
        moe_router_topk=hf.num_experts_per_tok if experts else 2,
        moe_ffn_hidden_size=hf.intermediate_size if experts else None,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none" if experts else "aux_loss",
        moe_grouped_gemm=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(experts, moe_grouped_gemm=False, normalization="RMSNorm"),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(hf.rope_parameters["rope_theta"]),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
    ).eval()


@torch.no_grad()
def logits_of(model):
    length = TOKENS.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return model(TOKENS, torch.arange(length)[None], mask).float()


def tensors(state):
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen2_untied", "mixtral"])
def test_megatron_core_loads_what_we_write_and_computes_the_same(name, tmp_path, one_rank):
    folder = tiny_folder(name, tmp_path)
    source = open_source(folder, "hf", None, None)
    convert(source, tmp_path / "core", CheckpointLayout("mcore"))
    written = torch.load(tmp_path / "core/iter_0000001/mp_rank_00/model_optim_rng.pt", weights_only=False)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = megatron_model(hf.config)
    assert written["model"].keys() == tensors(model.state_dict()).keys()
    model.load_state_dict(written["model"], strict=False)
    with torch.no_grad():
        expected = hf(input_ids=TOKENS, use_cache=False).logits
    assert (logits_of(model) - expected).abs().max() < 1e-4
    assert expected.std() > 0.1  # they say something


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_what_megatron_core_saved_becomes_a_hugging_face_model(name, tmp_path, one_rank):
    original = tiny_folder(name, tmp_path)
    config = AutoModelForCausalLM.from_pretrained(original).config
    torch.manual_seed(7)
    model = megatron_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    place = tmp_path / "saved/iter_0000005/mp_rank_00"
    place.mkdir(parents=True)
    (tmp_path / "saved/latest_checkpointed_iteration.txt").write_text("5")
    torch.save({"model": model.state_dict(), "iteration": 5}, place / "model_optim_rng.pt")
    source = open_source(tmp_path / "saved", "mcore", original, None)
    convert(source, tmp_path / "hf", CheckpointLayout())
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        found = hf(input_ids=TOKENS, use_cache=False).logits
    assert (logits_of(model) - found).abs().max() < 1e-4


def test_bloom_has_the_names_and_shapes_that_megatron_core_gives(tiny, tmp_path, one_rank):
    """But for the norm of its embeddings, which only MindSpeed-LLM's has; nor does Megatron core know its attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        normalization="LayerNorm",
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=101,
        max_sequence_length=32,
        position_embedding_type="none",
        share_embeddings_and_output_weights=True,
    )
    converted(tiny("bloom"), tmp_path / "core", CheckpointLayout("mcore"))
    written = core(tmp_path / "core", single="mp_rank_00")["model"]
    norm = {f"embedding.word_embeddings.norm.{kind}": torch.Size([16]) for kind in ("weight", "bias")}
    expected = {name: tensor.shape for name, tensor in tensors(model.state_dict()).items()}
    assert {name: tensor.shape for name, tensor in written.items()} == expected | norm


def test_deepseek_has_the_names_and_shapes_that_megatron_core_gives(tiny, tmp_path, one_rank, monkeypatch):
    """With the layer for later tokens. Its attention does not run on a CPU; it can be built."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    build = DotProductAttention.__init__
    monkeypatch.setattr(
        DotProductAttention,
        "__init__",
        lambda self, *a, k_channels=0, v_channels=0, **options: build(self, *a, **options),
    )
    for name in dir(multi_latent_attention):  # without Transformer Engine they are no types, but used as such
        if name.startswith("TE") and not isinstance(getattr(multi_latent_attention, name), type):
            monkeypatch.setattr(multi_latent_attention, name, type(name, (), {}))
    config = MLATransformerConfig(
        num_layers=4,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        add_bias_linear=False,
        gated_linear_unit=True,
        normalization="RMSNorm",
        qk_layernorm=True,
        q_lora_rank=6,
        kv_lora_rank=6,
        qk_head_dim=6,
        qk_pos_emb_head_dim=4,
        v_head_dim=5,
        num_moe_experts=4,
        moe_layer_freq=[0, 1, 1, 1],
        moe_ffn_hidden_size=8,
        moe_shared_expert_intermediate_size=16,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        mtp_num_layers=1,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=101,
        max_sequence_length=32,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )
    converted(tiny("deepseek_v3-later"), tmp_path / "core", CheckpointLayout("mcore"))
    written = core(tmp_path / "core", single="mp_rank_00")["model"]
    expected = {name: tensor.shape for name, tensor in tensors(model.state_dict()).items()}
    assert {name: tensor.shape for name, tensor in written.items()} == expected
    assert any(name.startswith("mtp.layers.0.eh_proj") for name in written)
