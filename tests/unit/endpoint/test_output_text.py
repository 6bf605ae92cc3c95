"""Tokens to text for clients: the same whatever pieces they come in, and never a letter of a stop text."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from posttrain.endpoint.metrics import ServerMetrics
from posttrain.endpoint.output_text import OutputText, TokenTexts, longest_beginning
from posttrain.models.pico import build_tokenizer
from tests.tiny import tiny_tokenizer

PICO = build_tokenizer()
TOKEN_TEXTS = TokenTexts(PICO)


def said(tokens, stops, cuts, token_texts=None):
    """Pieces of text and entries, for tokens that come in these pieces."""
    output = OutputText(PICO, stops, [PICO.eos_token_id], token_texts)
    pieces, entries, start = [], [], 0
    for end in [*sorted(cuts), len(tokens)]:
        end = min(end, len(tokens))
        part = tokens[start:end]
        text, told = output.add(part, [-1.0] * len(part), [])
        pieces.append(text)
        entries += told
        start = end
        if output.stopped:
            break
    text, told = output.finish()
    return [*pieces, text], entries + told, output.stopped


texts = st.text(st.sampled_from("ab世🙂é \x00"), max_size=30)


@example("世aa", ["a", "世aa"], {4})  # the second begins before the first, and is complete after it
@given(
    texts, st.lists(st.text(st.sampled_from("ab世"), min_size=1, max_size=4), max_size=3), st.sets(st.integers(0, 60))
)
def test_text_is_cut_before_the_first_stop_text(text, stops, cuts):
    tokens = PICO(text)["input_ids"]
    places = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    expected = text[: min(places)[1]] if places else text
    for token_texts in (None, TOKEN_TEXTS):
        pieces, entries, stopped = said(tokens, stops, cuts, token_texts)
        assert "".join(pieces) == expected and stopped == bool(places)
        if token_texts:
            assert b"".join(entry.text.raw for entry in entries).decode() == expected
            starts = [entry.start for entry in entries]
            assert starts == sorted(starts)
            raw = np.cumsum([0, *(len(entry.text.raw) for entry in entries)])
            whole = [len(expected.encode()[:at].decode(errors="ignore")) for at in raw[:-1]]
            assert starts == whole


@given(st.lists(st.integers(7, 262), max_size=40), st.sets(st.integers(0, 40)))
def test_bytes_that_are_no_text_come_out_the_same_in_all_pieces(tokens, cuts):
    whole = PICO.decode(tokens, skip_special_tokens=True)
    pieces, entries, _ = said(tokens, [], cuts, TOKEN_TEXTS)
    assert "".join(pieces) == whole
    assert [entry.text.raw for entry in entries] == [TOKEN_TEXTS.of(token).raw for token in tokens]


def test_the_end_token_is_not_part_of_the_answer():
    tokens = [*PICO("ab")["input_ids"], PICO.eos_token_id]
    pieces, entries, _ = said(tokens, [], [], TOKEN_TEXTS)
    assert "".join(pieces) == "ab" and [entry.text.text for entry in entries] == ["a", "b"]


def test_tokens_as_bytes():
    assert (
        b"".join(TOKEN_TEXTS.of(token).raw for token in PICO("Grüße 世 🙂\n")["input_ids"]) == "Grüße 世 🙂\n".encode()
    )
    assert TOKEN_TEXTS.of(PICO.eos_token_id).raw == b"<|end|>"
    plain = TokenTexts(tiny_tokenizer())
    assert [plain.of(token).raw for token in tiny_tokenizer()("a b")["input_ids"]] == [b"a", b" ", b"b"]


def test_what_may_be_the_beginning_of_a_stop_text():
    assert longest_beginning("xab", ["abc"]) == 2
    assert longest_beginning("xabc", ["abcd", "cx"]) == 3
    assert longest_beginning("abab", ["ababc", "bx"]) == 4
    assert longest_beginning("", ["a"]) == longest_beginning("b", ["a"]) == longest_beginning("a", ["a"]) == 0


def test_metrics_page():
    metrics = ServerMetrics({"asked_total": "Asked.", "wait_seconds": "Waited.", "now": "Now."})
    metrics.count("asked_total", 2, path='a"b\\c\nd')
    metrics.observe("wait_seconds", 0.2)
    metrics.observe("wait_seconds", 1000.0)
    lines = metrics.page({"now": 3}).splitlines()
    assert 'posttrain_asked_total{path="a\\"b\\\\c\\nd"} 2' in lines
    assert "# TYPE posttrain_wait_seconds histogram" in lines and "# TYPE posttrain_now gauge" in lines
    assert (
        'posttrain_wait_seconds_bucket{le="0.1"} 0' in lines and 'posttrain_wait_seconds_bucket{le="0.25"} 1' in lines
    )
    assert (
        'posttrain_wait_seconds_bucket{le="300"} 1' in lines and 'posttrain_wait_seconds_bucket{le="+Inf"} 2' in lines
    )
    assert "posttrain_wait_seconds_sum 1000.2" in lines and "posttrain_now 3" in lines
