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
    with pytest.raises(UsageError, match=rf"algo\.label_smoothing 0\.1 .*algo\.loss_type {loss}"):
        build(name, loss_type=loss, label_smoothing=0.1)


@pytest.mark.parametrize(("loss", "smoothing"), [("robust", 0.5), ("robust", 0.7), ("sigmoid", 0.6), ("sigmoid", -0.1)])
def test_label_smoothing_has_a_range(loss, smoothing):
    with pytest.raises(UsageError, match=rf"algo\.label_smoothing is {smoothing} with algo\.loss_type {loss}"):
        build("dpo", loss_type=loss, label_smoothing=smoothing)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dpo", {"beta": 0.0}, r"algo\.beta is 0\.0"),
        ("dpo", {"loss_type": "exo_pair"}, r"algo\.label_smoothing is 0: exo_pair"),
        ("dpo", {"loss_types": ("sigmoid", "ipo"), "loss_weights": (1.0,)}, r"algo\.loss_weights has 1 numbers for 2"),
        ("dpo", {"loss_type": "apo_zero", "label_smoothing": 0.1}, r"algo\.label_smoothing 0\.1 .*loss_type apo_zero"),
        ("dpo", {"loss_types": ("sigmoid", "ipo"), "label_smoothing": 0.6}, r"algo\.label_smoothing is 0\.6"),
        ("dpo", {"loss_types": ("ipo", "ipo")}, r"algo\.loss_types ipo ipo: a loss is named twice"),
        ("dpo", {"loss_types": ("ipo",), "loss_weights": (float("inf"),)}, r"algo\.loss_weights .* finite"),
        ("dpo", {"loss_types": ("aot", "aot_unpaired")}, r"sort a step in two ways"),
        ("dpo", {"loss_type": "aot", "ld_alpha": 0.5}, r"algo\.ld_alpha is 0\.5, but aot compares"),
        ("dpo", {"reference_mixup_alpha": 0.5}, r"reference_sync_steps is 0"),
        ("kto", {"reference_mixup_alpha": 0.0, "reference_sync_steps": 2}, r"reference_mixup_alpha is 0\.0"),
        ("dpo", {"reference_sync_steps": 2, "precompute_reference": True}, r"precompute_reference .* leave one"),
        ("grpo", {"kl_cov_fraction": 0.1}, r"kl_cov_fraction is 0\.1.*mini_batch_size"),
        ("dpo", {"ld_alpha": 1.5}, r"algo\.ld_alpha is 1\.5"),
        ("kto", {"beta": -1.0}, r"algo\.beta is -1\.0"),
        ("orpo", {"odds_ratio_coef": -0.5}, r"algo\.odds_ratio_coef is -0\.5"),
        ("prm", {"positive_token": "-"}, r"algo\.positive_token and algo\.negative_token are both '-'"),
        ("prm", {"placeholder": "+"}, r"algo\.placeholder '\+' is also algo\.positive_token"),
        ("prm", {"placeholder": "-"}, r"algo\.placeholder '-' is also algo\.negative_token"),
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
    assert build("distill", teacher="pico", sft_coef=0.1).outputs() == {"divergence", "logprobs"}
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
