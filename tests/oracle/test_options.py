"""Options that conflict are refused before anything is loaded, by names the user typed."""

import pytest

from posttrain.algorithms import ALGORITHMS
from posttrain.core.errors import UsageError


def build(name, **options):
    cls = ALGORITHMS[name]
    return cls(cls.Config(**options))


@pytest.mark.parametrize("loss", ["hinge", "ipo"])
@pytest.mark.parametrize("name", ["dpo", "simpo", "cpo"])
def test_label_smoothing_needs_a_loss_that_has_it(name, loss):
    with pytest.raises(UsageError, match=rf"algo\.label_smoothing 0\.1 .*algo\.loss {loss}"):
        build(name, loss=loss, label_smoothing=0.1)


@pytest.mark.parametrize(("loss", "smoothing"), [("robust", 0.5), ("robust", 0.7), ("sigmoid", 0.6), ("sigmoid", -0.1)])
def test_label_smoothing_has_a_range(loss, smoothing):
    with pytest.raises(UsageError, match=rf"algo\.label_smoothing is {smoothing} with algo\.loss {loss}"):
        build("dpo", loss=loss, label_smoothing=smoothing)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dpo", {"beta": 0.0}, r"algo\.beta is 0\.0"),
        ("kto", {"beta": -1.0}, r"algo\.beta is -1\.0"),
        ("orpo", {"odds_weight": -0.5}, r"algo\.odds_weight is -0\.5"),
        ("prm", {"reward_tokens": ("+", "-", "0")}, r"algo\.reward_tokens .*two different tokens"),
        ("prm", {"reward_tokens": ("+", "+")}, r"algo\.reward_tokens .*two different tokens"),
        ("prm", {"placeholder": "+"}, r"algo\.placeholder '\+' is also in algo\.reward_tokens"),
        ("distill", {}, r"algo\.teacher is not set"),
        ("distill", {"teacher": "pico", "jsd_beta": 0.0}, r"algo\.jsd_beta is 0\.0.*algo\.divergence"),
        ("distill", {"teacher": "pico", "temperature": 0.0}, r"algo\.temperature is 0\.0"),
    ],
)
def test_bad_values_name_the_option(name, options, message):
    with pytest.raises(UsageError, match=message):
        build(name, **options)


def test_what_is_asked_of_the_forward_pass():
    ids = {"+": 7, "-": 9}
    steps = build("prm").forward_request(ids.__getitem__)
    assert (steps.names, steps.choice_ids, steps.among_all) == ({"choices"}, (7, 9), False)
    assert build("prm", among="vocabulary").forward_request(ids.__getitem__).among_all
    taught = build("distill", teacher="pico", divergence="jsd", jsd_beta=0.3, temperature=2.0).forward_request(
        ids.__getitem__
    )
    assert (taught.names, taught.divergence, taught.jsd_beta, taught.temperature) == ({"divergence"}, "jsd", 0.3, 2.0)
    assert build("distill", teacher="pico", sft_weight=0.1).outputs() == {"divergence", "logprobs"}
    assert build("dpo").needs() == {"ref_logprobs"}
    assert not any(build(name).needs() for name in ("sft", "pretrain", "reward", "prm", "simpo", "orpo", "cpo"))
    assert not build("distill", teacher="pico").needs()


def test_paths_and_tokens_that_loops_ask_for():
    for name in ("dpo", "kto"):
        assert build(name).reference_path() == ""
        assert build(name, reference="there").reference_path() == "there"
        assert not build(name).precompute_reference()
    assert build("dpo", precompute_reference=True).precompute_reference()
    assert build("kto", variant="vanilla", precompute_reference=True).precompute_reference()
    assert build("distill", teacher="pico").teacher_path() == "pico"
    assert build("prm", placeholder="<step>").placeholder() == "<step>"
    assert build("prm").annotations() == {"placeholder_token": "ки", "reward_tokens": ["+", "-"]}
    assert {name: cls.min_batch_size for name, cls in ALGORITHMS.items() if cls.min_batch_size > 1} == {"kto": 2}
