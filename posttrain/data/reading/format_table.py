"""Define the formats of data as rows of one table: columns, how to parse them, and the kind of example they give."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.types import ExampleKind
from posttrain.data.reading import parsers, public_chats, public_preferences
from posttrain.data.reading.cells import CONTEXT_COLUMNS, MESSAGE_KEYS, SCORE_PAIRS, SYSTEM_COLUMNS
from posttrain.data.reading.examples import Example
from posttrain.data.reading.records import Record

SENTENCE_WORDS = 3
UNSPACED = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]")
UNSPACED_WORDS = 3  # characters that a name may have
ITEMS_SEARCHED = 64  # of a list, when text is looked for in it
MARGIN_COLUMNS = ("margin", *(column for pair in SCORE_PAIRS for column in pair))
ALPACA_COLUMNS = ("input", "history")
COMPLETION_COLUMNS = ("completion", "completions", "response", "chosen", "rejected", "label")
CONVERSATIONS = ("messages", "conversations", "conversation")
"""Columns with a whole conversation, beside which a question and its answer are only copies."""
QUESTION_EXCLUDED = ("label", "labels", "prompt", *CONVERSATIONS)
QUESTION_COLUMNS = ("prompt", "question", "problem", "query", "instruction")
PROMPT_COLUMNS = ("prompt", "instruction", "conversations", "messages", "question", "problem", "input")


@dataclass(frozen=True, slots=True)
class Format:
    """A set of columns and how to parse them."""

    name: str
    kind: ExampleKind
    columns: tuple[str, ...]
    parse: Callable[[Record, str], Example | list[Example]]  # the string: the placeholder for the end of a step
    optional: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  # columns with which the others have another meaning
    condition: Callable[[dict[str, Any]], bool] = lambda values: True
    truth: Callable[[Record], Any] | None = None  # the ground truth, where it is not the completion
    note: str = ""  # how a record becomes examples, where its columns do not say it
    gives_prompts: bool = True  # conversations: whether the last completion can be removed
    has_turns: bool = True  # false for texts to which no chat template is applied

    def matches(self, values: dict[str, Any]) -> bool:
        """Whether a record with these values has this format."""
        missing = any(column not in values for column in self.columns)
        foreign = any(column in values for column in self.excluded)
        return not missing and not foreign and self.condition(values)

    def provides(self, kind: ExampleKind) -> bool:
        """Whether it gives examples of this kind: pairs also give labelled examples, conversations give prompts."""
        if (kind, self.kind) == ("prompt", "chat"):
            return self.gives_prompts
        return self.kind == kind or (kind, self.kind) == ("labelled", "pair")

    @property
    def takes_system(self) -> bool:
        """Whether a system prompt in a column of its own is put before the messages: not before text as it is."""
        return self.kind != "text" and self.has_turns and not set(SYSTEM_COLUMNS) & set(self.columns)

    @property
    def used(self) -> set[str]:
        """The columns that are read; a prompt beside a conversation is compared with it."""
        system = SYSTEM_COLUMNS if self.takes_system else ()
        compared = ("prompt",) if set(CONVERSATIONS) & set(self.columns) else ()
        return {*self.columns, *self.optional, *system, *compared}

    @property
    def question(self) -> str:
        """The column with the question or instruction that is the prompt; "" if the prompt is messages."""
        return next((column for column in self.columns if column in QUESTION_COLUMNS), "")

    def unused(self, values: dict[str, Any]) -> list[str]:
        """Return the columns with text of which nothing is used: sentences rather than names, links and numbers."""
        used = self.used
        columns = [name for name, value in values.items() if name not in used and has_sentences(value)]
        return columns + [key for name in self.columns for key in _unused_keys(name, values[name])]

    def describe(self, values: dict[str, Any] | None = None) -> str:
        """Return the name and columns; of the optional ones those that `values` has."""
        columns: Sequence[str] = self.columns
        if values is not None:
            given = {column for column in self.used - {"prompt"} if values.get(column) is not None}
            columns = [column for column in values if column in {*self.columns, *given}]
        return f"{self.name}: {', '.join(columns)}"


def has_sentences(value: Any) -> bool:
    """Whether a cell contains text that may be meant for training: three words or more, or a conversation.

    Chinese, Japanese and Thai have no spaces between words, so that their characters are counted.
    """
    if isinstance(value, str):
        return len(value.split()) >= SENTENCE_WORDS or len(UNSPACED.findall(value)) > UNSPACED_WORDS
    if isinstance(value, dict):
        return any(has_sentences(item) for item in value.values())
    return isinstance(value, list) and any(has_sentences(item) for item in value[:ITEMS_SEARCHED])


def _unused_keys(column: str, messages: Any) -> list[str]:
    """Return the keys of messages with text that is not used, as `messages[].thought`."""
    if not isinstance(messages, list):
        return []
    said = (message for message in messages if isinstance(message, dict) and {"role", "from"} & message.keys())
    keys = dict.fromkeys(
        key for message in said for key in message.keys() - MESSAGE_KEYS if has_sentences(message[key])
    )
    return [f"{column}[].{key}" for key in keys]


FORMATS = (
    Format("text", "text", ("text",), parsers.parse_text),
    Format("chat", "chat", ("messages",), parsers.parse_chat, ("tools",), excluded=("label",)),
    Format(
        "prompt and completion",
        "chat",
        ("prompt", "completion"),
        parsers.parse_prompt_completion,
        excluded=("label",),
    ),
    Format(
        "Alpaca",
        "chat",
        ("instruction", "output"),
        parsers.parse_alpaca,
        ALPACA_COLUMNS,
        excluded=("label",),
        condition=lambda values: not isinstance(values["output"], list),
    ),
    Format(
        "prompt and response",
        "chat",
        ("prompt", "response"),
        parsers.parse_prompt_response,
        ("query", "history"),
        excluded=("label", "completion", "is_safe"),
    ),
    Format(
        "ShareGPT",
        "chat",
        ("conversations",),
        parsers.parse_sharegpt,
        ("tools",),
        excluded=("chosen", "rejected", "label"),
        condition=lambda values: not public_chats.is_texts(values["conversations"]),
    ),
    Format(
        "GSM8K",
        "chat",
        ("question", "answer"),
        parsers.parse_question_answer,
        excluded=("label", *CONVERSATIONS),
        condition=parsers.is_gsm8k,
    ),
    Format(
        "question and answer",
        "chat",
        ("question", "answer"),
        parsers.parse_question_answer,
        excluded=("label", "solution", "rationale", *CONVERSATIONS),
        condition=lambda values: (
            not parsers.is_gsm8k(values)
            and not parsers.has_options(values)
            and not isinstance(values["answer"], dict)
            and not public_chats.is_texts(values["answer"])
        ),
    ),
    *(
        Format(
            "question and answers",
            "chat",
            ("question", column),
            public_chats.question_parser("question", f"{column}.0"),
            excluded=("label", "solution", "rationale", *CONVERSATIONS),
            condition=public_chats.has_answers(column),
            truth=public_chats.truth_at(column),
            note="the first answer is the completion",
        )
        for column in ("answer", "answers", "golden_answers")
    ),
    *(
        Format(
            "question about a text",
            "chat",
            (column, "question", "answer"),
            parsers.context_parser(column),
            excluded=("label", "solution", "rationale", *CONVERSATIONS),
            condition=parsers.asks_about(column),
            note="the text, a blank line and the question are the prompt",
        )
        for column in CONTEXT_COLUMNS
    ),
    Format(
        "question, solution and answer",
        "chat",
        ("question", "solution", "answer"),
        parsers.solution_parser("question"),
        excluded=("label", "thinking_trajectories", *CONVERSATIONS),
        condition=lambda values: not parsers.is_gsm8k(values) and not parsers.has_options(values),
        truth=parsers.short_truth,
    ),
    Format(
        "multiple choice",
        "chat",
        ("question", "A", "B", "answer"),
        parsers.parse_multiple_choice,
        (*parsers.LETTERS[2:], *CONTEXT_COLUMNS),
        excluded=("label", *parsers.OPTION_COLUMNS),
        condition=lambda values: not parsers.is_gsm8k(values),
    ),
    Format(
        "multiple choice",
        "chat",
        ("Question", "A", "B", "Answer"),
        parsers.parse_multiple_choice,
        tuple(parsers.LETTERS[2:]),
        excluded=("label", "question", "answer", *parsers.OPTION_COLUMNS),
    ),
    *(
        Format(
            "multiple choice",
            "chat",
            ("question", column, "answer"),
            parsers.parse_multiple_choice,
            CONTEXT_COLUMNS,
            excluded=("label", *(name for name in parsers.OPTION_COLUMNS if name != column)),
            condition=lambda values: not parsers.is_gsm8k(values) and parsers.has_options(values),
        )
        for column in parsers.OPTION_COLUMNS
    ),
    Format(
        "prompt",
        "prompt",
        ("prompt",),
        parsers.parse_prompt,
        ("tools",),
        excluded=(*COMPLETION_COLUMNS, "messages", "conversations", "message_tree_id", "response_a"),
        condition=lambda values: not parsers.has_ground_truth(values),
    ),
    Format(
        "slime",
        "prompt",
        ("prompt", "label"),
        parsers.parse_labelled_prompt,
        ("tools", "metadata"),
        excluded=(*(name for name in COMPLETION_COLUMNS if name != "label"), "messages", "conversations"),
        condition=lambda values: isinstance(values["prompt"], list) and not isinstance(values["label"], bool),
        note="the label is the ground truth",
    ),
    Format(
        "OpenRLHF prompts",
        "prompt",
        ("context_messages",),
        parsers.parse_context_messages,
        ("context", "tools"),
        excluded=("prompt", *CONVERSATIONS, *COMPLETION_COLUMNS),
    ),
    Format(
        "prompt messages",
        "prompt",
        ("messages",),
        parsers.parse_prompt_messages,
        ("tools",),
        excluded=("label",),
        condition=parsers.ends_with_prompt,
    ),
    Format(
        "verl",
        "prompt",
        ("prompt", "reward_model"),
        parsers.parse_verl,
        ("extra_info",),
        excluded=tuple(name for name in COMPLETION_COLUMNS if name != "label"),
        condition=parsers.has_ground_truth,
    ),
    Format("preference", "pair", ("prompt", "chosen", "rejected"), parsers.parse_pair, MARGIN_COLUMNS),
    Format(
        "preference",
        "pair",
        ("question", "chosen", "rejected"),
        parsers.parse_question_pair,
        MARGIN_COLUMNS,
        excluded=("prompt", "instruction", "conversations"),
    ),
    Format(
        "hh-rlhf",
        "pair",
        ("chosen", "rejected"),
        parsers.parse_hh_pair,
        MARGIN_COLUMNS,
        excluded=PROMPT_COLUMNS,
        condition=public_preferences.is_dialogue_pair,
    ),
    Format(
        "implicit prompt",
        "pair",
        ("chosen", "rejected"),
        public_preferences.parse_implicit_prompt,
        MARGIN_COLUMNS,
        excluded=PROMPT_COLUMNS,
        condition=lambda values: not public_preferences.is_dialogue_pair(values),
        has_turns=False,
        note="the words that both begin with are the prompt; no chat template is applied",
    ),
    Format(
        "ShareGPT pairwise",
        "pair",
        ("conversations", "chosen", "rejected"),
        parsers.parse_sharegpt_pair,
        MARGIN_COLUMNS,
    ),
    Format(
        "Alpaca pairwise",
        "pair",
        ("instruction", "chosen", "rejected"),
        parsers.parse_alpaca_pair,
        (*ALPACA_COLUMNS, *MARGIN_COLUMNS),
    ),
    Format(
        "Alpaca pairwise, output a list of two",
        "pair",
        ("instruction", "output"),
        parsers.parse_alpaca_output_pair,
        (*ALPACA_COLUMNS, *MARGIN_COLUMNS),
        excluded=("chosen", "rejected"),
        condition=lambda values: isinstance(values["output"], list),
    ),
    *(
        Format("labelled chat", "labelled", (column, "label"), parsers.labelled_chat_parser(column), excluded=(other,))
        for column, other in (("messages", "conversations"), ("conversations", "messages"))
    ),
    Format(
        "labelled completion",
        "labelled",
        ("prompt", "completion", "label"),
        parsers.parse_labelled_completion,
    ),
    Format("steps", "stepwise", ("prompt", "completions", "labels"), parsers.parse_stepwise),
    Format("ProcessBench", "stepwise", ("problem", "steps", "label"), parsers.parse_processbench),
    Format(
        "marked steps", "stepwise", ("input", "value"), parsers.marked_steps_parser("value"), excluded=("instruction",)
    ),
    Format(
        "marked steps",
        "stepwise",
        ("input", "label"),
        parsers.marked_steps_parser("label"),
        excluded=("instruction", "value"),
        condition=lambda values: isinstance(values["label"], list),
    ),
    # Questions and solutions of public data sets
    Format(
        "problem and answer",
        "chat",
        ("problem", "answer"),
        public_chats.question_parser("problem", "answer"),
        excluded=("solution", "generated_solution", "rationale", *QUESTION_EXCLUDED),
        condition=lambda values: not parsers.has_options(values),
        truth=parsers.short_truth,
    ),
    Format(
        "problem and solution",
        "chat",
        ("problem", "solution"),
        public_chats.question_parser("problem", "solution"),
        excluded=("answer", *QUESTION_EXCLUDED),
        truth=public_chats.boxed_answer,
    ),
    Format(
        "problem, solution and answer",
        "chat",
        ("problem", "solution", "answer"),
        parsers.solution_parser("problem"),
        excluded=QUESTION_EXCLUDED,
        truth=parsers.short_truth,
    ),
    Format(
        "question and solution",
        "chat",
        ("question", "solution"),
        public_chats.question_parser("question", "solution"),
        excluded=("answer", "final_answer", *QUESTION_EXCLUDED),
        truth=public_chats.boxed_answer,
    ),
    Format(
        "AIME",
        "chat",
        ("Problem", "Answer"),
        public_chats.question_parser("Problem", "Answer"),
        excluded=("Solution",),
    ),
    Format(
        "AIME",
        "chat",
        ("Problem", "Solution", "Answer"),
        public_chats.question_parser("Problem", "Solution"),
        truth=public_chats.truth_at("Answer"),
    ),
    Format(
        "AIME",
        "chat",
        ("Question", "Answer"),
        public_chats.question_parser("Question", "Answer"),
        excluded=("Body", "A"),
    ),
    *(
        Format(
            "OpenMathInstruct",
            "chat",
            (column, "generated_solution", "expected_answer"),
            public_chats.openmath_parser(column),
            excluded=(other,),
            truth=public_chats.truth_at("expected_answer"),
        )
        for column, other in (("problem", "question"), ("question", "problem"))
    ),
    Format(
        "question and ground truth",
        "prompt",
        ("question", "ground_truth"),
        public_chats.parse_question_prompt,
        excluded=("prompt", "problem", *CONVERSATIONS, *COMPLETION_COLUMNS),
    ),
    Format(
        "question and ground truth",
        "prompt",
        ("problem", "ground_truth"),
        public_chats.parse_question_prompt,
        excluded=("prompt", "question", *CONVERSATIONS, *COMPLETION_COLUMNS),
    ),
    Format(
        "DeepMath",
        "chat",
        ("question", "final_answer", "r1_solution_1"),
        public_chats.question_parser("question", "r1_solution_1"),
        ("r1_solution_2", "r1_solution_3"),
        truth=public_chats.truth_at("final_answer"),
        note="r1_solution_1 is trained on",
    ),
    Format(
        "OpenThoughts, reasoning apart",
        "chat",
        ("problem", "deepseek_reasoning", "deepseek_solution"),
        public_chats.reasoning_parser("problem", "deepseek_reasoning", "deepseek_solution"),
        ("ground_truth_solution",),
        truth=lambda record: record.values.get("ground_truth_solution"),
    ),
    Format(
        "GeneralThought",
        "chat",
        ("question", "model_reasoning", "model_answer"),
        public_chats.reasoning_parser("question", "model_reasoning", "model_answer"),
        ("reference_answer",),
        truth=lambda record: record.values.get("reference_answer"),
    ),
    Format(
        "input, reasoning and content",
        "chat",
        ("input", "reasoning_content", "content"),
        public_chats.reasoning_parser("input", "reasoning_content", "content"),
        excluded=("output", *QUESTION_EXCLUDED),
    ),
    Format(
        "medical-o1",
        "chat",
        ("Question", "Complex_CoT", "Response"),
        public_chats.reasoning_parser("Question", "Complex_CoT", "Response"),
    ),
    Format("Open-Reasoner-Zero", "prompt", ("0", "1"), public_chats.parse_orz),
    Format(
        "SVAMP",
        "chat",
        ("Body", "Question", "Answer"),
        public_chats.parse_svamp,
        ("question_concat",),
        note="Body and Question are joined with a space",
    ),
    Format(
        "AQuA-RAT",
        "chat",
        ("question", "options", "rationale", "correct"),
        public_chats.parse_aqua,
        truth=public_chats.truth_at("correct"),
    ),
    Format(
        "ARC",
        "chat",
        ("question", "choices", "answerKey"),
        public_chats.arc_parser("question"),
        condition=lambda values: isinstance(values["choices"], dict),
    ),
    Format("ARC", "chat", ("question_stem", "choices", "answerKey"), public_chats.arc_parser("question_stem")),
    Format(
        "SQuAD",
        "chat",
        ("context", "question", "answers"),
        public_chats.parse_squad,
        ("title",),
        condition=public_chats.has_squad_answers,
        note="the context, a blank line and the question are the prompt; the first answer is the completion",
    ),
    Format(
        "TriviaQA",
        "chat",
        ("question", "answer"),
        public_chats.question_parser("question", "answer.value"),
        ("search_results", "entity_pages"),
        condition=lambda values: isinstance(values["answer"], dict) and "value" in values["answer"],
        truth=public_chats.truth_at("answer.value"),
    ),
    Format(
        "s1K",
        "chat",
        ("question", "solution", "thinking_trajectories", "attempt"),
        public_chats.parse_s1k,
        ("cot",),
        truth=public_chats.truth_at("solution"),
        note="the first trajectory is the reasoning, the attempt the completion",
    ),
    Format(
        "s1K-1.1",
        "chat",
        ("question", "solution", "deepseek_attempt", "gemini_attempt"),
        public_chats.refusal(
            "deepseek_attempt",
            "the record has the completions of two models; choose one with data.map_keys, "
            '{"thinking_trajectories": "deepseek_thinking_trajectory", "attempt": "deepseek_attempt"}',
        ),
        excluded=("attempt",),
    ),
    Format(
        "SYNTHETIC-1",
        "chat",
        ("prompt", "llm_response", "verification_info"),
        public_chats.parse_verified_response,
        ("gold_standard_solution", "metadata", "verification_result_info"),
        excluded=CONVERSATIONS,
    ),
    Format(
        "SYNTHETIC-1",
        "prompt",
        ("prompt", "verification_info"),
        public_chats.parse_verification_info,
        excluded=(*CONVERSATIONS, *COMPLETION_COLUMNS),
    ),
    Format(
        "HumanEval",
        "chat",
        ("prompt", "canonical_solution"),
        public_chats.question_parser("prompt", "canonical_solution"),
        excluded=COMPLETION_COLUMNS,
    ),
    Format("MBPP", "chat", ("text", "code", "test_list"), public_chats.question_parser("text", "code")),
    Format("APPS", "prompt", ("question", "input_output"), public_chats.parse_question_prompt),
    Format(
        "LeetCodeDataset",
        "chat",
        ("prompt", "completion", "query", "response"),
        public_chats.refusal(
            "query",
            "the record has two prompts with completions; choose one of them with data.map_keys, "
            '{"prompt": "query", "completion": "response", "query": "", "response": ""}',
        ),
    ),
    # Instructions and conversations of public data sets
    Format(
        "query and answer",
        "chat",
        ("query", "answer"),
        public_chats.question_parser("query", "answer"),
        excluded=("response", "question", "problem", *QUESTION_EXCLUDED),
    ),
    Format(
        "input and target",
        "chat",
        ("input", "target"),
        public_chats.question_parser("input", "target"),
        excluded=("instruction", "output", "question", "answer", *QUESTION_EXCLUDED),
    ),
    Format(
        "query and response",
        "chat",
        ("query", "response"),
        parsers.parse_query_response,
        ("history",),
        excluded=("rejected_response", *QUESTION_EXCLUDED),
    ),
    Format(
        "question and response",
        "chat",
        ("question", "response"),
        public_chats.question_parser("question", "response"),
        excluded=("answer", "solution", *QUESTION_EXCLUDED),
    ),
    Format(
        "Dolly",
        "chat",
        ("instruction", "response"),
        public_chats.question_parser("instruction", "response", "context"),
        ("context",),
        excluded=("output", *QUESTION_EXCLUDED),
        note="the context, if there is one, comes before the instruction",
    ),
    Format(
        "FLAN",
        "chat",
        ("inputs", "targets"),
        public_chats.question_parser("inputs", "targets", "definition"),
        ("definition",),
    ),
    Format(
        "input and output",
        "chat",
        ("input", "output"),
        public_chats.question_parser("input", "output"),
        excluded=("instruction", "value", *QUESTION_EXCLUDED),
    ),
    Format(
        "LIMA",
        "chat",
        ("conversations",),
        public_chats.alternating_parser("conversations"),
        excluded=("chosen", "rejected", "label"),
        condition=lambda values: public_chats.is_texts(values["conversations"]),
        note="the texts are the user's and the assistant's by turns",
    ),
    Format(
        "UltraChat",
        "chat",
        ("id", "data"),
        public_chats.alternating_parser("data"),
        condition=lambda values: public_chats.is_texts(values["data"]),
        note="the texts are the user's and the assistant's by turns",
    ),
    Format(
        "Capybara",
        "chat",
        ("conversation",),
        public_chats.parse_exchanges,
        excluded=("messages", "conversations", "chosen", "rejected", "label"),
        condition=public_chats.has_exchanges,
    ),
    Format(
        "conversation",
        "chat",
        ("conversation",),
        public_chats.parse_logged_conversation,
        excluded=("messages", "conversations", "chosen", "rejected", "label"),
        condition=lambda values: not public_chats.has_exchanges(values),
    ),
    Format(
        "guanaco",
        "chat",
        ("text",),
        public_chats.parse_guanaco,
        excluded=("messages", "conversations", "instruction", "prompt"),
        condition=public_chats.is_guanaco,
        note="split at ### Human: and ### Assistant:",
    ),
    Format(
        "oasst trees",
        "chat",
        ("message_tree_id", "prompt"),
        public_chats.parse_oasst_tree,
        condition=public_chats.is_tree,
        note="the conversation of the best-ranked replies",
    ),
    Format(
        "oasst messages",
        "chat",
        ("message_id", "parent_id", "text", "role"),
        public_chats.refusal(
            "parent_id",
            "each record is one message of a tree; use the files with whole trees, such as "
            "2023-04-12_oasst_ready.trees.jsonl.gz of OpenAssistant/oasst1",
        ),
    ),
    Format(
        "xLAM",
        "chat",
        ("query", "answers", "tools"),
        public_chats.parse_xlam,
        truth=public_chats.truth_at("answers"),
    ),
    Format("glaive-v2", "chat", ("system", "chat"), public_chats.parse_glaive),
    Format(
        "segments",
        "chat",
        ("segments",),
        public_chats.parse_segments,
        gives_prompts=False,
        has_turns=False,
        note="the text has its control tokens; no chat template is applied",
    ),
    # Preferences of public data sets
    Format(
        "preference",
        "pair",
        ("input", "chosen", "rejected"),
        public_preferences.pair_parser("input", "chosen", "rejected"),
        MARGIN_COLUMNS,
        excluded=("prompt", "instruction", "question", "conversations"),
    ),
    Format(
        "Step-DPO",
        "pair",
        ("prompt", "initial_reason_steps", "chosen", "rejected"),
        public_preferences.parse_step_dpo,
        ("prompt + initial_reason_steps", "full_chosen", "full_rejected", *MARGIN_COLUMNS),
        note="both completions begin with the initial steps",
    ),
    Format(
        "ms-swift pairwise",
        "pair",
        ("query", "response", "rejected_response"),
        parsers.parse_query_pair,
        ("history", *MARGIN_COLUMNS),
        note="response is the chosen one",
    ),
    Format(
        "UltraInteract",
        "pair",
        ("trajectory", "chosen", "rejected"),
        public_preferences.pair_parser("trajectory", "chosen", "rejected"),
        MARGIN_COLUMNS,
    ),
    Format(
        "UltraFeedback binarized",
        "pair",
        ("instruction", "chosen_response", "rejected_response"),
        public_preferences.pair_parser("instruction", "chosen_response", "rejected_response"),
        MARGIN_COLUMNS,
    ),
    Format(
        "stack-exchange-paired",
        "pair",
        ("question", "response_j", "response_k"),
        public_preferences.pair_parser("question", "response_j", "response_k"),
        note="response_j is the chosen one",
    ),
    Format(
        "UltraFeedback",
        "pair",
        ("instruction", "completions"),
        public_preferences.parse_ultrafeedback,
        excluded=("prompt", "labels"),
        note="the best against the worst completion by the mean rating of the aspects",
    ),
    Format(
        "HelpSteer2 preference",
        "pair",
        ("prompt", "response_1", "response_2", "preference_strength"),
        public_preferences.strength_parser("prompt", "response_1", "response_2", "preference_strength"),
        note="below 0 the first response is better, above 0 the second",
    ),
    Format(
        "HelpSteer3 preference",
        "pair",
        ("context", "response1", "response2", "overall_preference"),
        public_preferences.strength_parser("context", "response1", "response2", "overall_preference"),
        note="below 0 the first response is better, above 0 the second",
    ),
    Format(
        "PKU-SafeRLHF",
        "pair",
        ("prompt", "response_0", "response_1", "better_response_id"),
        public_preferences.parse_pku,
        note='the more helpful response is chosen; for the safer one map_keys {"better_response_id": '
        '"safer_response_id"}',
    ),
    Format("SHP", "pair", ("history", "human_ref_A", "human_ref_B", "labels"), public_preferences.parse_shp),
    Format(
        "Nectar",
        "pair",
        ("prompt", "answers"),
        public_preferences.parse_nectar,
        condition=lambda values: isinstance(values["answers"], list),
        note="pairs of the best-ranked answer and each of the others",
    ),
    Format(
        "TL;DR comparisons",
        "pair",
        ("info", "summaries", "choice"),
        public_preferences.parse_tldr,
        note="the prompt is SUBREDDIT, TITLE, POST, TL;DR:",
    ),
    Format(
        "Chatbot Arena",
        "pair",
        ("conversation_a", "conversation_b", "winner"),
        public_preferences.parse_arena,
        ("turn",),
        note="the messages that both conversations begin with are the prompt",
    ),
    Format(
        "Chatbot Arena",
        "pair",
        ("prompt", "response_a", "response_b", "winner_model_a", "winner_model_b"),
        public_preferences.parse_arena_kaggle,
    ),
    Format(
        "webgpt_comparisons",
        "pair",
        ("question", "answer_0", "answer_1", "score_0", "score_1"),
        public_preferences.parse_webgpt,
        condition=lambda values: isinstance(values["question"], dict),
        note="the answer with the higher score is chosen; the difference is the margin",
    ),
    Format(
        "oasst trees",
        "pair",
        ("message_tree_id", "prompt"),
        public_preferences.parse_oasst_pairs,
        condition=public_chats.is_tree,
        note="pairs of the best-ranked reply and each of the others, at every message of the user",
    ),
    Format(
        "OpenAI preference",
        "pair",
        ("input", "preferred_output", "non_preferred_output"),
        public_preferences.parse_openai_pair,
        MARGIN_COLUMNS,
        condition=public_preferences.is_openai_input,
    ),
    Format(
        "LLaMA-Factory v1 preference",
        "pair",
        ("chosen_messages", "rejected_messages"),
        public_preferences.parse_v1_pair,
        MARGIN_COLUMNS,
        note="the messages that both begin with are the prompt",
    ),
    Format("BeaverTails", "labelled", ("prompt", "response", "is_safe"), public_preferences.parse_beavertails),
    # Steps of public data sets
    Format(
        "Math-Shepherd",
        "stepwise",
        ("input", "label"),
        public_preferences.parse_math_shepherd,
        ("task",),
        excluded=("instruction", "value"),
        condition=public_preferences.is_shepherd,
        note="the question is the prompt; + and - in label are the labels",
    ),
    Format(
        "PRM800K",
        "stepwise",
        ("question", "label"),
        public_preferences.parse_prm800k,
        condition=public_preferences.is_prm800k,
        note="the chosen steps, and each rated alternative after the chosen steps before it; neutral counts as correct",
    ),
)
