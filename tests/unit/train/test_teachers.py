"""Teachers that are asked before the update: routed by a column, with a context, behind HTTP, with other tokens."""

import json
import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain import OPDTrainer, UsageError
from posttrain.algorithms import ALGORITHMS
from posttrain.algorithms.base import TeacherSettings
from posttrain.algorithms.opd import OPD
from posttrain.config.sections import DataConfig, ModelConfig, TrainConfig, with_algorithm
from posttrain.core.errors import DataError, PosttrainError
from posttrain.core.types import Prompt, Sample
from posttrain.data.encoding.encoder import Encoder
from posttrain.inference.model import InferenceModel
from posttrain.nn import logprobs as chunked
from posttrain.rollout.records import Rollout
from posttrain.train.alignment import TextAlignment, token_ends
from posttrain.train.learner import Learner
from posttrain.train.memory_plan import estimate_memory, full_micro_batch
from posttrain.train.teachers import ServiceTeacher
from tests.tiny import tiny_folder
from tests.unit.rollout.made import TOKENIZER, ids

CONFIG = {"train": {"batch_size": 4, "max_steps": 2, "learning_rate": 1e-3}, "rollout": {"max_tokens": 8}}
ROWS = [{"prompt": f"say {i}", "kind": "ab"[i % 2], "hint": f"it is {i}", "answer": f"{i} it is"} for i in range(8)]


def trainer(tmp_path, algo, rows=ROWS, model="pico", **config):
    return OPDTrainer(
        model, data=rows, config={**CONFIG, "algo": algo, "output_dir": str(tmp_path / "run"), "quiet": True, **config}
    )


def learner(path):
    return Learner(ModelConfig(path=str(path), dtype="float32"), TrainConfig(), trainable=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three models with one tokenizer and different weights."""
    return [str(tiny_folder(name, tmp_path_factory.mktemp(name))) for name in ("llama", "qwen2", "qwen3")]


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_listed_tokens_give_the_divergence_of_the_teacher_itself(kind, k):
    """Value and gradient equal those of the pass that has the teacher, which the oracle tests."""
    rng = torch.Generator().manual_seed(0)
    student = torch.randn(9, 7, generator=rng, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(9, 7, generator=rng, dtype=torch.float64)
    whole = chunked.token_divergence(student, teacher, lambda x: x, lambda x: x, 7, kind, 0.3, 1.5, k)
    (expected,) = torch.autograd.grad(whole.sum(), student)
    tokens, logprobs = chunked.likeliest_tokens(teacher, lambda x: x, 7, k, 1.5)
    found = chunked.listed_divergence(student, tokens, logprobs, lambda x: x, 7, kind, 0.3, 1.5)
    assert torch.allclose(found, whole, atol=1e-9)
    assert torch.allclose(torch.autograd.grad(found.sum(), student)[0], expected, atol=1e-9)


@pytest.mark.parametrize("objective", ["divergence", "policy_gradient"])
def test_each_prompt_is_taught_by_the_teacher_that_its_column_names(objective, folders, tmp_path):
    student, *others = folders
    algo = {"teachers": others, "teacher_names": ["a", "b"], "teacher_column": "kind", "objective": objective}
    algo |= {"divergence_top_k": 5} if objective == "divergence" else {}
    with trainer(tmp_path, algo, model=student) as run:
        rollouts = run.make_experience()
        metrics = run.train_step(rollouts)
    assert math.isfinite(metrics["divergence"]) and metrics["divergence"] > 0
    models = dict(zip("ab", map(learner, others), strict=True))
    seen = set()
    for rollout in rollouts:
        kind, sample = rollout.prompt.columns["kind"], rollout.sample
        seen.add(kind)
        if objective == "policy_gradient":
            (own,) = models[kind].logprobs([sample])
            assert sample.ref_logprobs == pytest.approx(own, abs=1e-4)
        else:
            ((tokens, logprobs),) = models[kind].likeliest([sample], 5, 1.0)
            assert np.array_equal(sample.teacher_ids, tokens)
            assert sample.teacher_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert seen == {"a", "b"}


def test_a_prompt_without_a_teacher_is_refused(folders, tmp_path):
    algo = {"teachers": folders[:2], "teacher_names": ["a", "c"], "teacher_column": "kind", "divergence_top_k": 5}
    with pytest.raises(DataError, match=r"kind: 'b' is not one of algo.teacher_names, a, c"):
        trainer(tmp_path, algo, model=folders[0])


@pytest.mark.parametrize("teacher", ["self", "pico"])
def test_the_teacher_sees_a_context_that_the_student_does_not(teacher, tmp_path):
    algo = {"teacher": teacher, "teacher_context_column": "hint", "objective": "policy_gradient"}
    with trainer(tmp_path, algo) as run:
        rollouts = run.make_experience()
        policy = run._loop.policy
        rendered = run._loop.teachers.prompts
        for rollout in rollouts:
            sample, start = rollout.sample, len(rollout.prompt.tokens)
            before = rendered.tokens(rollout.prompt)
            text = TOKENIZER.decode(before)
            assert f"it is {rollout.prompt.columns['prompt'][-1]}\n\nsay" in text
            tokens = np.concatenate([before, sample.tokens[start:]])
            view = Sample(tokens=tokens, mask=np.concatenate([np.zeros(len(before), np.bool_), sample.mask[start:]]))
            (stream,) = policy.logprobs([view])
            assert sample.ref_logprobs[sample.mask] == pytest.approx(stream[view.mask], abs=1e-4)
            assert not np.allclose(sample.ref_logprobs, sample.logprobs, atol=1e-3)
        run.train_step(rollouts)


def test_self_distillation_with_the_likeliest_tokens_runs_and_resumes_to_the_same_weights(tmp_path):
    algo = {"teacher": "self", "teacher_context_column": "hint", "divergence_top_k": 8, "divergence": "jsd"}
    with trainer(tmp_path / "whole", algo) as run:
        whole = run.train()
    with trainer(tmp_path / "parts", algo) as run:
        run.train_step(run.make_experience())
        run.save()
        folder = str(run.output_dir)
    with OPDTrainer(config={"output_dir": folder, "resume": True}, data=ROWS) as run:
        again = run.train()
    assert whole.metrics["divergence"] == again.metrics["divergence"] > 0


def test_completions_of_the_data_take_the_place_of_some(folders, tmp_path):
    algo = {"teacher": folders[1], "student_fraction": 0.5, "completion_column": "answer"}
    with trainer(tmp_path, algo, model=folders[0], rollout={"max_tokens": 16, "samples_per_prompt": 4}) as run:
        rollouts = run.make_experience()
        metrics = run.train_step(rollouts)
    given = [rollout for rollout in rollouts if rollout.sample.finish == "data"]
    assert metrics["data_completions"] == len(given) and 4 <= len(given) <= 12
    for rollout in given:
        assert rollout.text == rollout.prompt.columns["answer"]
        assert rollout.sample.mask.sum() == len(rollout.text) + 1, "the end of the turn counts"
    assert metrics["length"] == np.mean([r.completion_tokens for r in rollouts if r.sample.finish != "data"])


def test_a_completion_that_is_too_long_is_named(folders, tmp_path):
    algo = {"teacher": folders[1], "student_fraction": 0.5, "completion_column": "answer"}
    with pytest.raises(DataError, match=r"answer has \d+ tokens, more than rollout.max_tokens = 3"):
        trainer(tmp_path, algo, model=folders[0], rollout={"max_tokens": 3})


# Services


@pytest.fixture(scope="module")
def service():
    serving = pytest.importorskip("tests.unit.server.serving")
    model = InferenceModel(ModelConfig(path="pico"), DataConfig(max_length=2**20, on_overlong="error"))
    with serving.serving(model) as server:
        yield server


def address_of(service):
    return f"http://127.0.0.1:{service.port}/v1"


def test_a_service_returns_what_the_model_itself_computes(service):
    teacher, local = ServiceTeacher(address_of(service), TeacherSettings(teachers=())), learner("pico")
    tokens = np.array(ids("<s>hello there"), dtype=np.int32)
    sample = Sample(tokens=tokens, mask=np.arange(len(tokens)) >= 4)
    assert teacher.logprobs([sample])[0] == pytest.approx(local.logprobs([sample])[0], abs=1e-4)
    (found, logprobs), (expected, values) = (each.likeliest([sample], 6, 1.0)[0] for each in (teacher, local))
    assert logprobs == pytest.approx(values, abs=1e-4) and np.mean(found == expected) > 0.95  # ties


@pytest.mark.parametrize("algo", [{"objective": "policy_gradient"}, {"divergence_top_k": 6}])
def test_a_run_with_a_teacher_behind_http(algo, service, tmp_path):
    with trainer(tmp_path, {"teacher": address_of(service), **algo}) as run:
        metrics = run.train_step(run.make_experience())
    assert abs(metrics["divergence"]) < 1e-4, "the teacher is the student"


def test_a_service_that_is_not_there_is_named():
    settings = TeacherSettings(teachers=(), timeout_seconds=2.0)
    sample = Sample(tokens=np.array([1, 2], np.int32), mask=np.array([False, True]))
    with pytest.raises(PosttrainError, match=r"algo.teacher: http://127.0.0.1:9/v1/completions"):
        ServiceTeacher("http://127.0.0.1:9/v1", settings).logprobs([sample])


# Other tokenizers


def word_tokenizer():
    """Bytes, and a few merges that cross the borders of the student's tokens, which are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("c", "a"), ("ca", "t"), ("Ġ", "cat"), ("Ã", "©"), ("t", ".")]
    words = {symbol: i for i, symbol in enumerate([*alphabet, *("".join(pair) for pair in merges), "<end>"])}
    made = Tokenizer(models.BPE(words, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    found.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    return found


def alignment():
    teacher = word_tokenizer()
    encoder = Encoder(teacher, DataConfig(max_length=999), "prompt", len(teacher))
    return TextAlignment(TOKENIZER, teacher, encoder, [TOKENIZER.eos_token_id])


def completed(text, ended=True):
    prompt = Prompt(tokens=np.array(ids("<s>q"), np.int32), messages=[{"role": "user", "content": "q"}], origin="f:1")
    tokens = np.array([*prompt.tokens, *ids(text), *([TOKENIZER.eos_token_id] * ended)], dtype=np.int32)
    sample = Sample(tokens=tokens, mask=np.arange(len(tokens)) >= len(prompt.tokens), origin="f:1")
    return Rollout(sample=sample, prompt=prompt, text=text)


def test_spans_end_where_tokens_of_both_end():
    rollout, teacher = completed("a cat é."), word_tokenizer()
    found = alignment().align(rollout)
    start = len(rollout.prompt.tokens)
    groups = [
        (TOKENIZER.decode(rollout.sample.tokens[list(mine)]), teacher.decode(found.view.tokens[list(theirs)]))
        for mine, theirs in found.spans[:-1]
    ]
    assert groups == [(part, part) for part in ("a", " cat", " ", "é", ".")]
    assert [len(mine) for mine, _ in found.spans] == [1, 4, 1, 2, 1, 1]
    assert found.view.tokens[-1] == teacher.eos_token_id, "the student's end is the teacher's end"
    covered = [place for mine, _ in found.spans for place in mine]
    assert covered == list(range(start, len(rollout.sample)))
    own = -np.arange(len(rollout.sample), dtype=np.float32)
    theirs = np.linspace(-5, 0, len(found.view)).astype(np.float32)
    stream = found.spread(own, theirs)
    for mine, other in found.spans:
        assert stream[list(mine)].sum() == pytest.approx(theirs[list(other)].sum(), abs=1e-4)
        assert np.ptp((stream - own)[list(mine)]) < 1e-5, "spread evenly"


def test_text_that_differs_is_not_aligned():
    broken = completed("")
    broken.sample = Sample(
        tokens=np.concatenate([broken.prompt.tokens, np.array(ids("é")[:1], np.int32)]),
        mask=np.arange(len(broken.prompt.tokens) + 1) >= len(broken.prompt.tokens),
    )
    assert alignment().align(broken) is None, "half a character"
    assert token_ends(TOKENIZER, ids("é")) == ("é", [None, 1])
    assert alignment().align(completed("open", ended=False)).spans[-1][0][-1] == len(completed("open").sample) - 2


def test_a_teacher_with_another_tokenizer_teaches(folders, tmp_path):
    """Pico's completions are random bytes: some cannot be aligned, and are counted."""
    algo = {"teacher": folders[1], "teacher_tokenizer": folders[1], "objective": "policy_gradient"}
    rows = [{"prompt": f"say {i}"} for i in range(8)]
    config = {"train": {"batch_size": 8, "max_steps": 1}, "rollout": {"max_tokens": 4, "samples_per_prompt": 8}}
    with trainer(tmp_path, algo, rows=rows, **config) as run:
        rollouts = run.make_experience()
        metrics = run.train_step(rollouts)
    changed = [not np.allclose(r.sample.ref_logprobs, r.sample.logprobs) for r in rollouts]
    assert 0 < metrics["unaligned"] == len(rollouts) - sum(changed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teachers": ("a", "b")}, r"algo.teacher_names has 0 names for 2"),
        ({"teacher": "x", "teachers": ("a",), "teacher_names": ("a",)}, r"algo.teacher is x and algo.teachers"),
        ({"teacher": "self"}, r"without algo.teacher_context_column"),
        ({"teacher": "http://h/v1"}, r"algo.divergence_top_k is 0"),
        ({"teacher": "http://h/v1", "divergence_top_k": 5, "temperature": 2.0}, r"algo.temperature is 2.0"),
        ({"teacher": "x", "teacher_tokenizer": "y", "divergence_top_k": 5}, r"algo.objective to policy_gradient"),
        ({"teacher": "x", "teacher_model": "m"}, r"algo.teacher_model is m"),
        ({"teacher": "x", "student_fraction": 0.5}, r"algo.completion_column is ''"),
        (
            {"teacher": "x", "student_fraction": 0.5, "completion_column": "c", "objective": "policy_gradient"},
            r"not sampled from the student",
        ),
    ],
)
def test_options_that_conflict_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        OPD(OPD.Config(**options))


@pytest.mark.parametrize(
    ("algo", "message"),
    [
        ({"teacher": "self", "teacher_context_column": "hint", "divergence_top_k": 8}, "for completions of one turn"),
        ({"teacher": "pico", "student_fraction": 0.5, "completion_column": "answer"}, "leave out .* rollout.tools"),
    ],
)
def test_completions_of_one_turn_are_not_mixed_with_tools(algo, message, tmp_path):
    tools = {"tools": ["examples/tools.py:calculate"], "max_tokens": 16}
    with pytest.raises(UsageError, match=message):
        trainer(tmp_path, algo, rollout=tools)


def test_prompt_logprobs_of_the_server_have_the_form_of_vllm(service):
    serving = pytest.importorskip("tests.unit.server.serving")
    tokens = ids("<s>ab")
    body = {"prompt": tokens, "max_tokens": 1, "prompt_logprobs": 2}
    status, _, reply = serving.ask(service.port, "POST", "/v1/completions", json.dumps(body).encode())
    assert status == 200, reply
    first, *rest = reply["choices"][0]["prompt_logprobs"]
    assert first is None and len(rest) == len(tokens) - 1
    for token, place in zip(tokens[1:], rest, strict=True):
        assert str(token) in place and 2 <= len(place) <= 3
    refused = json.dumps(body | {"stream": True}).encode()
    assert serving.ask(service.port, "POST", "/v1/completions", refused)[0] == 400


def test_the_memory_of_a_step_with_listed_tokens_is_estimated(folders):
    config = with_algorithm(ALGORITHMS["opd"])
    config.model.path, config.data.max_length = folders[0], 64
    config.algo.teachers, config.algo.teacher_names = (folders[1], folders[2]), ("a", "b")
    config.algo.divergence_top_k, config.train.micro_batch_tokens = 9, 256
    algo = OPD(config.algo)
    found = estimate_memory(config, algo, torch.device("cpu"), full_micro_batch(config, algo))
    assert found.teacher > 0 and found.step.peak > 0
