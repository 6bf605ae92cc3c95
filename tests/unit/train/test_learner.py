"""The learner: what it computes is what the stock model computes, and what it saves is all it needs to go on."""

from dataclasses import replace
from weakref import WeakSet

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from posttrain.algorithms import ALGORITHMS
from posttrain.checkpoints.tensor_files import load_tensors
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import UsageError
from posttrain.core.types import ForwardRequest, Loss, Objective, Sample, count_units
from posttrain.data.packing import collate
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.models import memory
from posttrain.nn import layers
from posttrain.nn.forward import forward
from posttrain.nn.kernels import reference
from posttrain.train import learner as learners
from posttrain.train.learner import Learner
from posttrain.train.local_generator import copy_of
from tests.tiny import tiny_folder

LENGTHS = (5, 17, 2, 30, 9, 9, 3)
BUDGETS = (1, 20, 10_000)  # a pack each, some packs, one pack


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of tiny models, each made once."""
    made = {}

    def find(name, head="token", **changes):
        key = (name, head, *changes.items())
        if key not in made:
            made[key] = str(tiny_folder(name, tmp_path_factory.mktemp(name), head=head, **changes))
        return made[key]

    return find


def samples(seed=0, lengths=LENGTHS):
    """Ragged samples with gaps in their masks; one of them counts nowhere."""
    rng = np.random.default_rng(seed)
    made = []
    for index, length in enumerate(lengths):
        mask = rng.random(length) < 0.6
        mask[0] = False
        made.append(Sample(tokens=rng.integers(6, 100, length).astype(np.int32), mask=mask & (index != 4), group=index))
    return made


def objective(verb="sft", router_loss=0.0):
    algo = ALGORITHMS[verb](ALGORITHMS[verb].Config())
    request = ForwardRequest(names=frozenset(algo.outputs()), router_loss=router_loss)
    return algo.objective(request)


def learn(learner, seed, chosen=None, rate=1e-2):
    """One step on some samples."""
    chosen = chosen or objective()
    some = samples(seed)
    sums = learner.forward_backward(some, chosen, count_units(some, chosen.unit), sum(map(len, some)))
    return sums, learner.step(rate)


def tensors(learner):
    return {name: tensor.detach().clone() for name, tensor in learner.model.state_dict().items()}


# Looking


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "mixtral", "deepseek_v3"])
def test_logprobs_are_those_of_the_stock_model_in_the_order_of_the_samples(folder, name, budget):
    learner = Learner(ModelConfig(path=folder(name)), TrainConfig(micro_batch_tokens=budget), trainable=False)
    some = samples()
    found = learner.logprobs(some)
    stock = AutoModelForCausalLM.from_pretrained(folder(name)).eval()
    assert [len(stream) for stream in found] == list(LENGTHS)
    for sample, stream in zip(some, found, strict=True):
        ids = torch.tensor(sample.tokens, dtype=torch.long)[None]
        with torch.no_grad():
            expected = stock(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        assert stream.dtype == np.float32 and not stream[~sample.mask].any()
        np.testing.assert_allclose(stream[1:], expected.numpy() * sample.mask[1:], atol=2e-5)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in learner.model.parameters())


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_scores_are_those_of_the_stock_model_in_the_order_of_the_samples(folder, name, budget):
    path = folder(name, "score")
    learner = Learner(ModelConfig(path=path), TrainConfig(micro_batch_tokens=budget), head="score", trainable=False)
    some = samples()
    stock = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        expected = [float(stock(input_ids=torch.tensor(s.tokens, dtype=torch.long)[None]).logits) for s in some]
    found = learner.scores(some)
    assert found == pytest.approx(expected, abs=2e-5) and len(set(found)) == len(some)


def test_a_new_score_head_is_decided_by_the_seed(folder):
    def scores(seed):
        model = ModelConfig(path=folder("llama"))
        return Learner(model, TrainConfig(), head="score", trainable=False, seed=seed).scores(samples())

    assert scores(0) == scores(0) != scores(1)


def test_evaluation_computes_the_loss_and_leaves_no_trace(folder):
    learner = Learner(ModelConfig(path=folder("llama")), TrainConfig(micro_batch_tokens=40))
    before, state = tensors(learner), torch.get_rng_state()
    chosen, recorded = objective(), []

    def loss(out, batch):
        recorded.append(out.logprobs.requires_grad)
        return chosen.loss(out, batch)

    (total, denominator) = learner.evaluate(samples(), replace(chosen, loss=loss))["loss"]
    assert len(recorded) > 1 and not any(recorded)  # nothing is kept for a backward pass
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(learner).items())
    assert learner.model.training and torch.equal(torch.get_rng_state(), state)
    assert denominator is None and total == learner.forward_backward(samples(), objective(), 1, 1)["loss"][0]
    grads = {name: parameter.grad.clone() for name, parameter in learner.model.named_parameters()}
    learner.evaluate(samples(1), objective())  # nor does it touch gradients that are there
    learner.logprobs(samples(1))
    assert all(torch.equal(parameter.grad, grads[name]) for name, parameter in learner.model.named_parameters())


def test_a_learner_that_only_looks_has_no_optimizer(folder):
    learner = Learner(ModelConfig(path=folder("llama")), TrainConfig(), trainable=False)
    with pytest.raises(AssertionError, match="inference"):
        learner.step(1e-3)


# Learning


def test_gradients_add_up_and_can_be_discarded(folder):
    learner = Learner(ModelConfig(path=folder("llama")), TrainConfig())
    before = tensors(learner)
    learner.forward_backward(samples(), objective(), 10, 100)
    once = learner.model.lm_head.weight.grad.clone()
    learner.forward_backward(samples(), objective(), 10, 100)
    assert torch.allclose(learner.model.lm_head.weight.grad, 2 * once)
    learner.discard()
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    learner.step(1e-2)  # nothing is there to apply
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(learner).items())
    learn(learner, 0)
    assert not torch.equal(tensors(learner)["lm_head.weight"], before["lm_head.weight"])


def test_without_adapters_it_is_the_base_model(folder):
    pytest.importorskip("peft")
    model = ModelConfig(path=folder("llama"), lora_rank=4, lora_dropout=0.5)
    learner, some = Learner(model, TrainConfig()), samples()
    base = Learner(ModelConfig(path=folder("llama")), TrainConfig(), trainable=False).logprobs(some)
    for found in (learner.logprobs(some), learner.logprobs(some, adapters=False)):  # new adapters change nothing
        assert all(np.array_equal(a, b) for a, b in zip(found, base, strict=True))
    for seed in range(3):
        learn(learner, seed)
    with_adapters = learner.logprobs(some)
    without = learner.logprobs(some, adapters=False)
    assert all(np.array_equal(a, b) for a, b in zip(without, base, strict=True))
    assert not np.array_equal(with_adapters[1], base[1])
    assert all(np.array_equal(a, b) for a, b in zip(learner.logprobs(some), with_adapters, strict=True))
    _, applied = learn(learner, 4)  # the adapters are still what is trained
    assert applied["grad_norm"] > 0 and not np.array_equal(learner.logprobs(some)[1], with_adapters[1])


def test_the_router_is_balanced_where_that_is_asked(folder):
    plain = Learner(ModelConfig(path=folder("mixtral")), TrainConfig())
    balanced = Learner(ModelConfig(path=folder("mixtral"), router_aux_loss_coef=0.5), TrainConfig())
    some, grads = samples(), []
    for learner, weight in ((plain, 0.0), (balanced, 0.5)):
        sums = learner.forward_backward(some, objective(router_loss=weight), 10, sum(map(len, some)))
        grads.append({name: parameter.grad for name, parameter in learner.model.named_parameters()})
    routers = [name for name in grads[0] if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2 and all(not torch.equal(grads[0][name], grads[1][name]) for name in routers)
    assert torch.equal(grads[0]["lm_head.weight"], grads[1]["lm_head.weight"])  # no router comes after it
    total, tokens = sums["router_balance"]
    assert tokens == sum(map(len, some)) and 1.9 < total / tokens < 4  # 2 of 4 experts: 2 is even, 4 all on the same


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_router_loss_needs_a_router_that_is_balanced_by_one(folder, name):
    with pytest.raises(UsageError, match=r"model\.router_aux_loss_coef: \w+ForCausalLM has no load-balancing loss"):
        Learner(ModelConfig(path=folder(name), router_aux_loss_coef=0.1), TrainConfig())


def test_a_teacher_must_have_the_same_vocabulary(folder):
    teacher = ModelConfig(path=folder("llama", vocab_size=120))
    with pytest.raises(UsageError, match=r"algo\.teacher: its vocabulary has 120 tokens, the student's 104"):
        Learner(ModelConfig(path=folder("llama")), TrainConfig(), teacher=teacher)
    same = Learner(ModelConfig(path=folder("llama")), TrainConfig(), teacher=ModelConfig(path=folder("gpt2")))
    assert not any(parameter.requires_grad for parameter in same.teacher.model.parameters())


# Saving


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}], ids=["weights", "adapters"])
def test_annotations_are_saved_with_the_model(folder, tmp_path, options):
    if options:
        pytest.importorskip("peft")
    learner = Learner(ModelConfig(path=folder("llama"), **options), TrainConfig())
    learner.annotate({"score_mean": 1.5, "reward_tokens": ["+", "-"]})
    learner.save(tmp_path)
    saved = AutoConfig.from_pretrained(tmp_path / "model")
    assert saved.score_mean == 1.5 and saved.reward_tokens == ["+", "-"]
    again = Learner(ModelConfig(path=str(tmp_path)), TrainConfig())
    again.save(tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again/model").score_mean == 1.5


VARIANTS = {
    "float32": ({}, "token"),
    "bfloat16": ({"dtype": "bfloat16"}, "token"),
    "adapters": ({"lora_rank": 4}, "token"),
    "score": ({}, "score"),
    "adapters on a score": ({"lora_rank": 4}, "score"),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("after", [0, 2])
def test_saved_and_loaded_goes_on_bit_for_bit(folder, tmp_path, variant, after):
    options, head = VARIANTS[variant]
    if "lora_rank" in options:
        pytest.importorskip("peft")
    model = ModelConfig(path=folder("llama"), **options)
    update = TrainConfig(ema_decay=0.8, weight_decay=0.1, micro_batch_tokens=40)
    chosen = scoring() if head == "score" else objective()

    whole = Learner(model, update, head=head)
    for seed in range(after):
        learn(whole, seed, chosen)
    whole.save(tmp_path)
    saved = tensors(whole)
    learned = [learn(whole, seed, chosen) for seed in (7, 8)]

    again = Learner(model, update, head=head, seed=99)
    learn(again, 5, chosen)  # elsewhere, so that all must be brought back
    places = {name: tensor.data_ptr() for name, tensor in again.model.state_dict().items()}
    again.load(tmp_path)
    assert places == {name: tensor.data_ptr() for name, tensor in again.model.state_dict().items()}
    trained = [name for name, parameter in again.model.named_parameters() if parameter.requires_grad]
    assert all(torch.equal(tensors(again)[name], saved[name]) for name in trained)
    assert [learn(again, seed, chosen) for seed in (7, 8)] == learned
    for name in trained:
        assert torch.equal(tensors(again)[name], tensors(whole)[name]), name
        assert not torch.equal(tensors(again)[name], saved[name]), name
    assert all(torch.equal(a, whole.optimizer.average[name]) for name, a in again.optimizer.average.items())
    assert again.optimizer.average.keys() == set(trained)


def scoring():
    """Half the square of each score."""

    def loss(out, batch):
        return Loss(total=(out.scores**2).sum() / 2)

    return Objective(request=ForwardRequest(names=frozenset({"scores"})), loss=loss, unit="sample")


def test_half_precision_keeps_masters_and_saves_them(folder, tmp_path):
    learner = Learner(ModelConfig(path=folder("llama"), dtype="bfloat16"), TrainConfig())
    for seed in range(3):
        learn(learner, seed, rate=1e-5)  # most such changes are too small for bfloat16
    learner.save(tmp_path)
    state = load_tensors(tmp_path / "optimizer.safetensors")
    weight = learner.model.lm_head.weight
    assert weight.dtype == torch.bfloat16 and state["master/lm_head.weight"].dtype == torch.float32
    assert torch.equal(state["master/lm_head.weight"].bfloat16(), weight)
    assert not torch.equal(state["master/lm_head.weight"], weight.float())


def gradients(dtype, path, scale=None):
    """Of a sum divided by so much that float16 would lose most of it."""
    learner = Learner(ModelConfig(path=path, dtype=dtype), TrainConfig(max_grad_norm=0))
    if scale is not None:
        learner.optimizer.scale.value = scale
    learner.forward_backward(samples(), objective(), 10**7, 1)
    grads = torch.cat([master.grad.flatten() for master in learner.optimizer.masters.values()])
    return learner, grads / learner.optimizer.loss_scale


def test_small_gradients_survive_float16(folder):
    _, wanted = gradients("float32", folder("llama"))
    _, found = gradients("float16", folder("llama"))
    _, lost = gradients("float16", folder("llama"), scale=1.0)
    assert (found - wanted).norm() < 0.01 * wanted.norm()
    assert (lost - wanted).norm() > 0.1 * wanted.norm(), "the scale is not needed"


def test_an_overflow_lowers_the_scale_and_changes_nothing_else(folder, tmp_path):
    learner, _ = gradients("float16", folder("llama"), scale=2.0**40)
    before = tensors(learner)
    assert learner.step(1e-2) == {"rescaled": 1.0}
    assert learner.optimizer.loss_scale == 2.0**39 and learner.optimizer.steps == 0
    assert all(torch.equal(before[name], now) for name, now in tensors(learner).items())
    while True:
        _, metrics = learn(learner, 0)
        if "rescaled" not in metrics:
            break
    assert not metrics["skipped"] and learner.optimizer.steps == 1
    assert metrics["loss_scale"] == learner.optimizer.loss_scale < 2.0**39
    assert not torch.equal(before["lm_head.weight"], learner.model.lm_head.weight)
    learner.save(tmp_path)
    again = Learner(ModelConfig(path=folder("llama"), dtype="float16"), TrainConfig())
    again.load(tmp_path)
    assert again.optimizer.scale == learner.optimizer.scale


def test_values_are_of_the_state_before_a_token(folder):
    """With weights that read one number of the hidden state, a value can be told from the stock model's."""
    learner = Learner(ModelConfig(path=folder("llama", "score")), TrainConfig(), head="score", trainable=False)
    made = samples()
    for sample, values in zip(made, learner.values(made), strict=True):
        ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        model = learner.model
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
            expected = model.score(hidden)[:, 0]
        model.set_attn_implementation("posttrain_packed")
        for i in range(len(sample)):
            assert values[i] == pytest.approx(float(expected[i - 1]) if sample.mask[i] else 0.0, abs=1e-5)


def test_a_value_head_on_a_language_model_is_trained_and_saved(folder, tmp_path):
    def start():
        return Learner(ModelConfig(path=folder("llama")), TrainConfig(), value_head=True, seed=3)

    def squares(out, batch):
        return Loss(total=(out.values[batch.counted] - 1).square().sum())

    learner, made = start(), samples()
    wanted = Objective(request=ForwardRequest(names=frozenset({"values"})), loss=squares, unit="token")
    before = learner.evaluate(made, wanted)["loss"][0]
    for _ in range(3):
        learner.forward_backward(made, wanted, count_units(made, "token"), 1)
        learner.step(1e-2)
    assert learner.evaluate(made, wanted)["loss"][0] < before
    learner.save(tmp_path)
    again = start()
    again.load(tmp_path)
    for one, other in zip(learner.values(made), again.values(made), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_sampler_of_its_own_keeps_its_weights_until_it_is_refreshed(folder):
    learner = Learner(ModelConfig(path=folder("llama")), TrainConfig(), sampler_copy=True)
    mine = [parameter.detach().clone() for parameter in learner.generator.sampler.model.parameters()]
    made = samples()
    wanted = Objective(request=ForwardRequest(), loss=ALGORITHMS["sft"](ALGORITHMS["sft"].Config()).loss, unit="token")
    learner.forward_backward(made, wanted, count_units(made, "token"), 1)
    learner.step(1e-2)
    theirs = list(learner.generator.sampler.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    learner.update_generator(1)
    trained = list(learner.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(trained, theirs, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("fp8", [False, True])
def test_a_sampler_of_its_own_copies_fused_layers(fp8):
    """As on a GPU, where layers are fused: the copy runs its own weights."""
    model = Learner(ModelConfig(path="pico"), TrainConfig()).model
    layers.use_fused_layers(model, reference)
    if fp8:
        layers.use_fp8_products(model)
    copied = copy_of(model)
    for one, other in zip(model.model.layers, copied.model.layers, strict=True):
        assert other.forward.args[0] is other and one.forward.args[0] is one
        assert getattr(other, layers.PRODUCTS, None) == getattr(one, layers.PRODUCTS, None)
    mine = {parameter.data_ptr() for parameter in model.parameters()}
    assert mine.isdisjoint(parameter.data_ptr() for parameter in copied.parameters())


@pytest.mark.gpu
def test_what_is_offloaded_frees_the_device_and_comes_back_as_it_was(folder):
    learner = Learner(ModelConfig(path=folder("llama")), TrainConfig())
    made = samples()
    wanted = Objective(request=ForwardRequest(), loss=ALGORITHMS["sft"](ALGORITHMS["sft"].Config()).loss, unit="token")
    learner.forward_backward(made, wanted, count_units(made, "token"), 1)
    learner.step(1e-2)
    places = [parameter.data_ptr() for parameter in learner.model.parameters()]
    expected = learner.logprobs(made)
    held = torch.cuda.memory_allocated()
    learner.offload("optimizer")
    assert torch.cuda.memory_allocated() < held
    for one, other in zip(learner.logprobs(made), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    learner.onload("optimizer")
    assert places == [parameter.data_ptr() for parameter in learner.model.parameters()], "the engine's graphs need them"
    learner.forward_backward(made, wanted, count_units(made, "token"), 1)
    learner.step(1e-2)
    frozen = Learner(ModelConfig(path=folder("llama")), TrainConfig(), trainable=False)
    expected = frozen.logprobs(made)
    frozen.offload("model")
    assert all(parameter.device.type == "cpu" for parameter in frozen.model.parameters())
    frozen.onload("model")
    for one, other in zip(frozen.logprobs(made), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_memory_that_training_will_still_take_is_left_by_generation(folder, monkeypatch):
    monkeypatch.setattr(learners, "LEARNERS", WeakSet())
    model, update = ModelConfig(path=folder("llama")), TrainConfig(micro_batch_tokens=256)
    policy = Learner(model, update)
    pack = memory.max_pass_bytes(model, "token", torch.float32, 256)
    count_of = [sum(p.numel() for p in policy.model.parameters())]
    counters = [4 * len(list(policy.model.parameters()))]  # AdamW counts the steps of each weight
    assert pack > 0 and learners.training_memory_bytes() == 12 * count_of[0] + counters[0] + pack
    critic = Learner(model, update, head="score")
    Learner(model, update, trainable=False)
    count_of.append(sum(p.numel() for p in critic.model.parameters()))
    counters.append(4 * len(list(critic.model.parameters())))
    most = max(pack, memory.max_pass_bytes(model, "score", torch.float32, 256))
    assert learners.training_memory_bytes() == 12 * sum(count_of) + sum(counters) + most
    learn(policy, 0)
    assert learners.training_memory_bytes() == 4 * count_of[0] + 12 * count_of[1] + counters[1] + most
    generate = policy.generate([GenerationRequest(prompt=np.array([5, 6, 7], dtype=np.int32))], Sampling(max_tokens=2))
    assert len(generate) == 1
    (engine,) = policy.generator.engines.values()
    assert engine.reserved_bytes() == learners.training_memory_bytes()


@pytest.mark.parametrize("among_all", [False, True])
def test_choices_are_shares_among_a_few_tokens_or_among_all(folder, among_all):
    learner = Learner(ModelConfig(path=folder("llama")), TrainConfig(), trainable=False)
    made = samples()
    request = ForwardRequest(names=frozenset({"choices"}), choice_ids=(5, 9), among_all=among_all)
    found = forward(learner.runner, collate(made), request).choices
    expected = []
    stock = AutoModelForCausalLM.from_pretrained(folder("llama"))
    for sample in made:
        logits = stock(torch.as_tensor(sample.tokens).long()[None]).logits[0].detach().double().exp()
        for place in np.flatnonzero(sample.mask):  # what comes after it
            whole = logits[place].sum() if among_all else logits[place, 5] + logits[place, 9]
            expected.append([float((logits[place, token] / whole).log()) for token in (5, 9)])
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-5)
