"""Small faithful copies of published data sets: their columns and types, and what a record of each becomes.

`python -m tests.unit.data.reading.schemas docs/data-sets.md` writes the table of the documentation. A rendered sample
is written as `user: 7+8=|assistant: [[15|]]`: `|` is the end of a turn, and tokens in double brackets are trained on.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

END = "|"


def S(text: str) -> str:  # noqa: N802
    return f"system: {text}{END}"


def U(text: str) -> str:  # noqa: N802
    return f"user: {text}{END}"


def A(text: str) -> str:  # noqa: N802
    """A completion that is trained on."""
    return f"assistant: [[{text}{END}]]"


def a(text: str) -> str:
    """An earlier completion that is not trained on."""
    return f"assistant: {text}{END}"


P = "assistant: "  # the generation prompt: the end of a prompt for reinforcement learning
Q, R = "How much is 7+8?", "7 and 3 make 10, and 5 more make \\boxed{15}."
CHAT = U(Q) + A("15")
BETTER, WORSE = U(Q) + A("15"), U(Q) + A("78")
PAIR = (BETTER, WORSE)
MESSAGES = [{"role": "user", "content": Q}, {"role": "assistant", "content": "15"}]
TURNS = [{"from": "human", "value": Q}, {"from": "gpt", "value": "15"}]


@dataclass(frozen=True)
class Prompt:
    """What a record becomes for reinforcement learning: a rendered prompt and the ground truth."""

    text: str
    truth: Any


@dataclass(frozen=True)
class Refused:
    """A record that is refused with this text in the message, and what helps."""

    message: str
    fix: str
    map_keys: dict[str, str] | None = None  # a fix that can be tried, and what the record becomes with it
    shows: Any = None


@dataclass(frozen=True)
class Schema:
    """A published data set."""

    name: str
    record: Any  # an object with columns; a list for files whose records are lists
    family: str  # the format, as the verdict names it
    uses: dict[str, Any] = field(default_factory=dict)  # verb -> rendered samples, Prompt or Refused


def chat(shows: str = CHAT) -> dict[str, Any]:
    return {"sft": shows}


def rl(truth: Any, sft: Any = None, prompt: str = U(Q) + P) -> dict[str, Any]:
    return ({"sft": sft} if sft is not None else {}) | {"grpo": Prompt(prompt, truth)}


def pair(better: str = BETTER, worse: str = WORSE) -> dict[str, Any]:
    return {"dpo": (better, worse)}


QUARANTINE = "`--data.on_bad_example quarantine` leaves such records out and counts them"
CALL = {"name": "add", "arguments": {"a": 7, "b": 8}}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"a": {"type": "int"}, "b": {"type": "int"}}}
SCHEMA = {"type": "object", "properties": TOOL["parameters"]}
TOOLS = "tools: " + json.dumps([{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]) + END
CALLED = "call: " + json.dumps(CALL)


def oasst(text: str, role: str, replies: list[Any], rank: int | None = None) -> dict[str, Any]:
    return {
        "message_id": text[:4],
        "user_id": "u",
        "text": text,
        "role": role,
        "lang": "en",
        "review_count": 3,
        "rank": rank,
        "synthetic": False,
        "deleted": False,
        "replies": replies,
    }


TREE = oasst(
    Q,
    "prompter",
    [
        oasst("78", "assistant", [], 1),
        oasst("15", "assistant", [oasst("Sure?", "prompter", [oasst("Yes.", "assistant", [], 0)])], 0),
    ],
)
ARENA = {
    "question_id": "58210e39",
    "model_a": "alpaca-13b",
    "model_b": "koala-13b",
    "judge": "arena_user_973",
    "conversation_a": [{"content": Q, "role": "user"}, {"content": "78", "role": "assistant"}],
    "conversation_b": [{"content": Q, "role": "user"}, {"content": "15", "role": "assistant"}],
    "turn": 1,
    "language": "English",
    "tstamp": 1682351591.1,
}
PKU = {
    "prompt": Q,
    "response_0": "15",
    "response_1": "78",
    "is_response_0_safe": True,
    "is_response_1_safe": True,
    "better_response_id": 0,
    "safer_response_id": 1,
}
PRM800K = {
    "labeler": "d8aa7923",
    "timestamp": "2022-07-17T16:56:51",
    "generation": None,
    "is_quality_control_question": False,
    "is_initial_screening_question": False,
    "question": {
        "problem": Q,
        "ground_truth_answer": "15",
        "pre_generated_steps": ["7+3=10", "10+5=15"],
        "pre_generated_answer": "15",
        "pre_generated_verifier_score": 0.9,
    },
    "label": {
        "steps": [
            {
                "completions": [{"text": "7+3=10", "rating": 1, "flagged": None}],
                "human_completion": None,
                "chosen_completion": 0,
            },
            {
                "completions": [
                    {"text": "10+5=16", "rating": -1, "flagged": False},
                    {"text": "10+5=15", "rating": 0, "flagged": False},
                ],
                "human_completion": None,
                "chosen_completion": 1,
            },
        ],
        "total_time": 31270,
        "finish_reason": "solution",
    },
}
ULTRAFEEDBACK = {
    "source": "evol_instruct",
    "instruction": Q,
    "models": ["alpaca-7b", "gpt-4"],
    "completions": [
        {
            "model": "alpaca-7b",
            "principle": "helpfulness",
            "custom_system_prompt": "As an AI assistant, ...",
            "response": "78",
            "critique": "The sum is wrong.",
            "overall_score": 10.0,
            "fine-grained_score": 1.5,
            "annotations": {
                "helpfulness": {"Rating": "1", "Rationale": "Wrong."},
                "honesty": {"Rating": "2", "Rationale": "Unsure."},
                "truthfulness": {"Rating": "N/A", "Rationale": ""},
            },
        },
        {
            "model": "gpt-4",
            "principle": "helpfulness",
            "custom_system_prompt": "As an AI assistant, ...",
            "response": "15",
            "critique": "Right.",
            "overall_score": 8.5,
            "fine-grained_score": 5.0,
            "annotations": {
                "helpfulness": {"Rating": "5", "Rationale": "Right."},
                "honesty": {"Rating": "5", "Rationale": "Sure."},
            },
        },
    ],
    "correct_answers": ["None"],
    "incorrect_answers": ["None"],
}
WEBGPT = {
    "question": {"dataset": "eli5", "id": "x", "full_text": Q},
    "quotes_0": {"title": ["Sums (example.org)"], "extract": ["7 and 8 make 15 together."]},
    "answer_0": "15 [1]",
    "tokens_0": {"prefix": [1], "completion": [2]},
    "score_0": 0.75,
    "quotes_1": {"title": [], "extract": []},
    "answer_1": "78",
    "tokens_1": {"prefix": [1], "completion": [3]},
    "score_1": -0.75,
}
TLDR = {
    "info": {
        "id": "t3_1",
        "post": "I added 7 and 8.\n\nHelp?",
        "title": "A sum",
        "subreddit": "math",
        "site": None,
        "article": None,
    },
    "summaries": [
        {"text": " It is 78.", "policy": "sup1", "note": None},
        {"text": " It is 15.", "policy": "ref", "note": None},
    ],
    "choice": 1,
    "worker": "w",
    "batch": "batch3",
    "split": "train",
    "extra": {"confidence": None},
}
TLDR_PROMPT = "SUBREDDIT: r/math\n\nTITLE: A sum\n\nPOST: I added 7 and 8.\nHelp?\n\nTL;DR:"
GLAIVE = {
    "system": "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
    + json.dumps(TOOL | {"parameters": SCHEMA}, indent=4)
    + "\n",
    "chat": f"USER: {Q}\n\n\nASSISTANT: <functioncall> "
    + '{"name": "add", "arguments": \'{"a": 7, "b": 8}\'} <|endoftext|>\n\n\n'
    + 'FUNCTION RESPONSE: {"sum": 15}\n\n\nASSISTANT: It is 15. <|endoftext|>\n\n\n',
}
S1K = {
    "solution": "15",
    "question": Q,
    "cot_type": "math",
    "source_type": "AI-MO/NuminaMath-CoT/aops_forum",
    "metadata": "{'url': None}",
    "cot": None,
    "thinking_trajectories": ["Ten and five."],
    "attempt": "It is 15.",
}
SYNTHETIC = {
    "response_id": "vfm_0_1",
    "problem_id": "vfm_0",
    "source": "numina",
    "in_source_id": None,
    "hf_dataset_name": "justus27/math",
    "task_type": "verifiable_math",
    "prompt": Q,
    "gold_standard_solution": R,
    "llm_response": "It is 15.",
    "verification_info": '{"ground_truth": "15"}',
    "score": 1.0,
    "verification_result_info": "{}",
    "metadata": "{}",
}
FULL_HH = {
    "prompt": f"\n\nHuman: Hello\n\nAssistant: Hi!\n\nHuman: {Q}\n\nAssistant:",
    "response": " 15",
    "chosen": " 15",
    "rejected": " 78",
}
VERL = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": Q}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "15", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}

SCHEMAS = (
    # Mathematics
    Schema(
        "openai/gsm8k",
        {"question": Q, "answer": "7+8=<<7+8=15>>15\n#### 15"},
        "GSM8K",
        rl("15", U(Q) + A("7+8=<<7+8=15>>15\n#### 15")),
    ),
    Schema(
        "hendrycks/competition_math (MATH)",
        {"problem": Q, "level": "Level 1", "type": "Algebra", "solution": R},
        "problem and solution",
        rl("15", U(Q) + A(R)),
    ),
    Schema(
        "HuggingFaceH4/MATH-500",
        {"problem": Q, "solution": R, "answer": "15", "subject": "Algebra", "level": 1, "unique_id": "test/a/1.json"},
        "problem, solution and answer",
        rl("15", U(Q) + A(R)),
    ),
    Schema(
        "AI-MO/aimo-validation-aime",
        {"id": 0, "problem": Q, "solution": R, "answer": "15", "url": "https://example.org/AIME"},
        "problem, solution and answer",
        rl("15", U(Q) + A(R)),
    ),
    Schema(
        "Maxwell-Jia/AIME_2024",
        {"ID": "2024-I-1", "Problem": Q, "Solution": R, "Answer": 15},
        "AIME",
        rl("15", U(Q) + A(R)),
    ),
    Schema("math-ai/aime25", {"problem": Q, "answer": "15", "id": "0"}, "problem and answer", rl("15", CHAT)),
    Schema(
        "math-ai/aime24",
        {"id": 60, "problem": Q, "solution": "\\boxed{15}", "url": "https://example.org"},
        "problem and solution",
        rl("15", U(Q) + A("\\boxed{15}")),
    ),
    Schema("opencompass/AIME2025", {"question": Q, "answer": "15"}, "question and answer", rl("15", CHAT)),
    Schema(
        "gneubig/aime-1983-2024",
        {"ID": "1983-1", "Year": 1983, "Problem Number": 1, "Question": Q, "Answer": "15", "Part": None},
        "AIME",
        rl("15", CHAT),
    ),
    Schema(
        "math-ai/amc23",
        {"id": 0, "question": Q, "answer": 15, "url": "https://example.org"},
        "question and answer",
        rl("15", CHAT),
    ),
    Schema(
        "agentica-org/DeepScaleR-Preview-Dataset",
        {"problem": Q, "answer": "15", "solution": R},
        "problem, solution and answer",
        rl("15", U(Q) + A(R)),
    ),
    Schema(
        "DeepScaleR, a record without a solution",
        {"problem": Q, "answer": "15", "solution": ""},
        "problem, solution and answer",
        {"grpo": Prompt(U(Q) + P, "15"), "sft": Refused("solution and answer: empty completion", QUARANTINE)},
    ),
    Schema(
        "SynthLabsAI/Big-Math-RL-Verified",
        {
            "problem": Q,
            "answer": "15",
            "source": "cn_k12",
            "domain": ["Mathematics -> Algebra"],
            "llama8b_solve_rate": 0.75,
        },
        "problem and answer",
        rl("15", CHAT),
    ),
    Schema(
        "AI-MO/NuminaMath-1.5",
        {
            "problem": Q,
            "solution": R,
            "answer": "15",
            "problem_type": "Algebra",
            "question_type": "math-word-problem",
            "problem_is_valid": "Yes",
            "solution_is_valid": "Yes",
            "source": "olympiads",
            "synthetic": False,
        },
        "problem, solution and answer",
        rl("15", U(Q) + A(R)),
    ),
    Schema(
        "NuminaMath-1.5, a proof",
        {
            "problem": "Prove it.",
            "solution": "It is clear by symmetry.",
            "answer": "proof",
            "problem_type": "Algebra",
            "question_type": "proof",
            "source": "olympiads",
        },
        "problem, solution and answer",
        {
            "sft": U("Prove it.") + A("It is clear by symmetry."),
            "grpo": Refused("answer: is 'proof': no completion can be compared with it", QUARANTINE),
        },
    ),
    Schema(
        "AI-MO/NuminaMath-CoT",
        {
            "source": "cn_k12",
            "problem": Q,
            "solution": R,
            "messages": [{"content": Q, "role": "user"}, {"content": R, "role": "assistant"}],
        },
        "chat",
        chat(U(Q) + A(R)),
    ),
    Schema(
        "nvidia/OpenMathInstruct-2",
        {"problem": Q, "generated_solution": R, "expected_answer": "15", "problem_source": "augmented_math"},
        "OpenMathInstruct",
        rl("15", U(Q) + A(R)),
    ),
    Schema(
        "nvidia/OpenMathInstruct-1, a wrong solution",
        {
            "question": Q,
            "generated_solution": "It is 78.",
            "expected_answer": "15",
            "predicted_answer": "78",
            "error_message": "",
            "is_correct": False,
            "generation_type": "masked_reference_solution",
            "dataset": "gsm8k",
        },
        "OpenMathInstruct",
        {"sft": Refused("is_correct: is false: a wrong solution is not trained on", QUARANTINE)},
    ),
    Schema(
        "nvidia/OpenMathReasoning",
        {
            "expected_answer": "15",
            "problem_type": "has_answer_extracted",
            "problem_source": "aops",
            "generation_model": "DeepSeek-R1",
            "pass_rate_72b_tir": "0.5",
            "problem": Q,
            "generated_solution": R,
            "inference_mode": "cot",
        },
        "OpenMathInstruct",
        rl("15", U(Q) + A(R)),
    ),
    Schema(
        "Open-Reasoner-Zero/orz_math_57k_collection (list of lists)",
        [{"from": "human", "value": Q}, {"from": "assistant", "ground_truth": {"value": "15"}}],
        "Open-Reasoner-Zero",
        rl("15"),
    ),
    Schema(
        "ChilleD/SVAMP",
        {
            "ID": "chal-1",
            "Body": "Ann has 7 apples.",
            "Question": "Ben has 8. How many?",
            "Equation": "( 7.0 + 8.0 )",
            "Answer": "15.0",
            "Type": "Addition",
            "question_concat": "Ann has 7 apples. Ben has 8. How many?",
        },
        "SVAMP",
        rl(
            "15.0",
            U("Ann has 7 apples. Ben has 8. How many?") + A("15.0"),
            U("Ann has 7 apples. Ben has 8. How many?") + P,
        ),
    ),
    Schema(
        "deepmind/aqua_rat",
        {"question": Q, "options": ["A)14", "B)15"], "rationale": "7+8=15, so B.", "correct": "B"},
        "AQuA-RAT",
        rl("B", U(f"{Q}\nA)14\nB)15") + A("7+8=15, so B."), U(f"{Q}\nA)14\nB)15") + P),
    ),
    Schema(
        "meta-math/MetaMathQA",
        {"type": "GSM_AnsAug", "query": Q, "original_question": Q, "response": "It is 15."},
        "query and response",
        chat(U(Q) + A("It is 15.")),
    ),
    Schema(
        "TIGER-Lab/MathInstruct",
        {"source": "data/CoT/gsm_train.json", "output": "15", "instruction": Q},
        "Alpaca",
        chat(),
    ),
    Schema(
        "GAIR/LIMO",
        {"question": Q, "solution": R, "answer": "15"},
        "question, solution and answer",
        rl("15", U(Q) + A(R)),
    ),
    Schema("simplescaling/s1K", S1K, "s1K", rl("15", U(Q) + A("<think>Ten and five.</think>It is 15."))),
    Schema(
        "simplescaling/s1K-1.1",
        {
            "solution": "15",
            "question": Q,
            "cot_type": "math",
            "source_type": "x",
            "metadata": "{}",
            "gemini_thinking_trajectory": "Hm.",
            "gemini_attempt": "15!",
            "deepseek_thinking_trajectory": "Ten and five.",
            "deepseek_attempt": "It is 15.",
        },
        "s1K-1.1",
        {
            "sft": Refused(
                "the record has the completions of two models",
                "choose one of them",
                {"thinking_trajectories": "deepseek_thinking_trajectory", "attempt": "deepseek_attempt"},
                U(Q) + A("<think>Ten and five.</think>It is 15."),
            )
        },
    ),
    Schema(
        "open-r1/OpenR1-Math-220k",
        {
            "problem": Q,
            "solution": R,
            "answer": "15",
            "problem_type": "Algebra",
            "question_type": "math-word-problem",
            "source": "olympiads",
            "uuid": "u",
            "is_reasoning_complete": [True],
            "generations": ["<think>7?</think> 15"],
            "correctness_math_verify": [True],
            "finish_reasons": None,
            "correctness_count": 1,
            "messages": [{"role": "user", "content": Q}, {"role": "assistant", "content": "<think>7?</think> 15"}],
        },
        "chat",
        rl("15", U(Q) + A("<think>7?</think> 15")),
    ),
    Schema("BytedTsinghua-SIA/DAPO-Math-17k", VERL, "verl", rl("15")),
    Schema(
        "open-r1/DAPO-Math-17k-Processed",
        {
            "prompt": Q,
            "solution": "15",
            "data_source": "math_dapo",
            "source_prompt": [{"role": "user", "content": Q}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "15", "style": "rule"},
            "extra_info": {"index": "9"},
        },
        "verl",
        rl("15"),
    ),
    Schema(
        "zwhe99/DeepMath-103K",
        {
            "question": Q,
            "final_answer": "15",
            "difficulty": 1.0,
            "topic": "Mathematics -> Algebra",
            "r1_solution_1": R,
            "r1_solution_2": "It is 15.",
            "r1_solution_3": "Fifteen it is.",
        },
        "DeepMath",
        rl("15", U(Q) + A(R)),
    ),
    Schema(
        "Skywork/Skywork-OR1-RL-Data",
        VERL
        | {
            "data_source": "train-math-deepscaler",
            "reward_model": {"ground_truth": '["15"]', "style": "rule"},
            "extra_info": {"index": 0, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-7B": 3}},
        },
        "verl",
        rl('["15"]'),  # the verifier math reads it as a set of one answer
    ),
    Schema(
        "POLARIS-Project/Polaris-Dataset-53K",
        {"problem": Q, "answer": "15", "difficulty": "3/8"},
        "problem and answer",
        rl("15", CHAT),
    ),
    Schema("PrimeIntellect/SYNTHETIC-1", SYNTHETIC, "SYNTHETIC-1", rl("15", U(Q) + A("It is 15."))),
    Schema(
        "SYNTHETIC-1, a completion that failed",
        SYNTHETIC | {"score": 0.0},
        "SYNTHETIC-1",
        {
            "sft": Refused("score: is 0: the completion failed its verification", QUARANTINE),
            "grpo": Prompt(U(Q) + P, "15"),
        },
    ),
    Schema(
        "PrimeIntellect/verifiable-math-problems",
        {
            "source": "numina",
            "task_type": "verifiable_math",
            "in_source_id": "1",
            "prompt": Q,
            "gold_standard_solution": R,
            "verification_info": "{'ground_truth': '15'}",
            "metadata": "{}",
            "problem_id": "vfm_1",
        },
        "SYNTHETIC-1",
        rl("15"),
    ),
    Schema(
        "allenai/RLVR-GSM",
        {"messages": [{"content": Q, "role": "user"}], "ground_truth": "15", "dataset": "gsm8k"},
        "prompt messages",
        rl("15"),
    ),
    Schema(
        "Hothan/OlympiadBench",
        {
            "id": 1,
            "question": Q,
            "solution": [R],
            "final_answer": ["15"],
            "context": None,
            "is_multiple_answer": False,
            "unit": None,
            "answer_type": "Numerical",
            "error": None,
        },
        "question and solution",
        {
            "grpo": Refused(
                "no known format has the columns id, question, solution, final_answer",
                "take the first answer",
                {"prompt": "question", "ground_truth": "final_answer.0"},
                Prompt(U(Q) + P, "15"),
            )
        },
    ),
    Schema(
        "juletxara/mgsm",
        {"question": Q, "answer": None, "answer_number": 15, "equation_solution": None},
        "question and answer",
        {
            "grpo": Refused(
                "answer: null",
                "name the column with the number",
                {"prompt": "question", "ground_truth": "answer_number"},
                Prompt(U(Q) + P, "15"),
            )
        },
    ),
    Schema(
        "Jiayi-Pan/Countdown-Tasks-3to4",
        {"target": 15, "nums": [7, 8]},
        "none",
        {
            "grpo": Refused(
                "no known format has the columns target, nums",
                "write the prompt",
                {"prompt": "Make {target} of these numbers.", "target": "target"},
                Prompt(U("Make 15 of these numbers.") + P, None),
            )
        },
    ),
    # Programs
    Schema(
        "openai/openai_humaneval",
        {
            "task_id": "HumanEval/0",
            "prompt": "def add(a, b):\n",
            "canonical_solution": "    return a + b\n",
            "test": "def check(f):\n    assert f(7, 8) == 15",
            "entry_point": "add",
        },
        "HumanEval",
        {"sft": U("def add(a, b):\n") + A("    return a + b\n"), "grpo": Prompt(U("def add(a, b):\n") + P, None)},
    ),
    Schema(
        "google-research-datasets/mbpp",
        {
            "task_id": 1,
            "text": "Add two numbers.",
            "code": "def add(a, b): return a + b",
            "test_list": ["assert add(7, 8) == 15"],
            "test_setup_code": "",
            "challenge_test_list": [],
        },
        "MBPP",
        chat(U("Add two numbers.") + A("def add(a, b): return a + b")),
    ),
    Schema(
        "codeparrot/apps",
        {
            "problem_id": 0,
            "question": "Add two numbers.",
            "solutions": '["print(15)"]',
            "input_output": '{"inputs": ["7 8"], "outputs": ["15"]}',
            "difficulty": "interview",
            "url": "https://example.org",
            "starter_code": "",
        },
        "APPS",
        {
            "grpo": Prompt(U("Add two numbers.") + P, None),
            "sft": Refused(
                "the format is APPS",
                "take the first solution of the JSON text",
                {"prompt": "question", "completion": "solutions.0"},
                U("Add two numbers.") + A("print(15)"),
            ),
        },
    ),
    Schema(
        "ise-uiuc/Magicoder-OSS-Instruct-75K",
        {
            "lang": "python",
            "raw_index": 1,
            "index": 2,
            "seed": "import x",
            "openai_fingerprint": "fp",
            "problem": Q,
            "solution": "print(15)",
        },
        "problem and solution",
        rl("print(15)", U(Q) + A("print(15)")),
    ),
    Schema(
        "sahil2801/CodeAlpaca-20k",
        {"instruction": "Add.", "input": "7 8", "output": "15"},
        "Alpaca",
        chat(U("Add.\n7 8") + A("15")),
    ),
    Schema(
        "nvidia/OpenCodeReasoning",
        {
            "id": "1",
            "input": Q,
            "output": "<think>Ten.</think> 15",
            "source": "taco",
            "license": "mit",
            "dataset": "taco",
            "split": "train",
            "difficulty": "EASY",
            "solution": "print(15)",
        },
        "input and output",
        chat(U(Q) + A("<think>Ten.</think> 15")),
    ),
    # Instructions
    Schema(
        "tatsu-lab/alpaca",
        {"instruction": "Add.", "input": "7 8", "output": "15", "text": "Below is ..."},
        "Alpaca",
        chat(U("Add.\n7 8") + A("15")),
    ),
    Schema("yahma/alpaca-cleaned", {"output": "15", "input": "", "instruction": Q}, "Alpaca", chat()),
    Schema(
        "databricks/databricks-dolly-15k",
        {"instruction": "How many apples?", "context": "Ann has 15.", "response": "15", "category": "closed_qa"},
        "Dolly",
        chat(U("Ann has 15.\nHow many apples?") + A("15")),
    ),
    Schema(
        "Open-Orca/OpenOrca",
        {"id": "niv.1", "system_prompt": "Be brief.", "question": Q, "response": "15"},
        "question and response",
        chat(S("Be brief.") + CHAT),
    ),
    Schema(
        "Open-Orca/SlimOrca",
        {
            "conversations": [
                {"from": "system", "value": "Be brief.", "weight": None},
                {"from": "human", "value": Q, "weight": 0.0},
                {"from": "gpt", "value": "15", "weight": 1.0},
            ]
        },
        "ShareGPT",
        chat(S("Be brief.") + CHAT),
    ),
    Schema(
        "teknium/OpenHermes-2.5",
        {
            "custom_instruction": None,
            "topic": None,
            "idx": 1,
            "conversations": [
                {"from": "human", "value": Q, "weight": None},
                {"from": "gpt", "value": "15", "weight": None},
            ],
            "source": "airoboros2.2",
            "skip_prompt_formatting": False,
        },
        "ShareGPT",
        chat(),
    ),
    Schema("RyokoAI/ShareGPT52K", {"id": "QWJhYvA_0", "conversations": TURNS}, "ShareGPT", chat()),
    Schema("WizardLMTeam/WizardLM_evol_instruct_70k", {"output": "15", "instruction": Q}, "Alpaca", chat()),
    Schema("WizardLMTeam/WizardLM_evol_instruct_V2_196k", {"idx": "a", "conversations": TURNS}, "ShareGPT", chat()),
    Schema("HuggingFaceH4/ultrachat_200k", {"prompt": Q, "prompt_id": "x", "messages": MESSAGES}, "chat", chat()),
    Schema(
        "stingning/ultrachat",
        {"id": "0", "data": [Q, "15", "Sure?", "Yes."]},
        "UltraChat",
        chat(CHAT + U("Sure?") + A("Yes.")),
    ),
    Schema(
        "HuggingFaceH4/no_robots",
        {
            "prompt": Q,
            "prompt_id": "x",
            "messages": [{"content": "Be brief.", "role": "system"}, *MESSAGES],
            "category": "Chat",
        },
        "chat",
        {"sft": S("Be brief.") + CHAT, "grpo": Prompt(S("Be brief.") + U(Q) + P, "15")},
    ),
    Schema("HuggingFaceTB/smoltalk", {"messages": MESSAGES, "source": "smol-magpie-ultra"}, "chat", chat()),
    Schema(
        "allenai/tulu-3-sft-mixture",
        {"id": "x", "messages": MESSAGES, "source": "ai2-adapt-dev/oasst1"},
        "chat",
        chat(),
    ),
    Schema("GAIR/lima", {"conversations": [Q, "15"], "source": "stackexchange"}, "LIMA", chat()),
    Schema(
        "GAIR/lima, test split",
        {"conversations": [Q], "source": "test"},
        "LIMA",
        {
            "sft": Refused("conversations: 1 turns: the last one is the user's and has no completion", QUARANTINE),
            "grpo": Refused(
                "conversations: 1 turns",
                "name the text",
                {"prompt": "conversations.0", "conversations": ""},
                Prompt(U(Q) + P, None),
            ),
        },
    ),
    Schema(
        "LDJnr/Capybara",
        {"source": "Dove", "conversation": [{"input": Q, "output": "15"}, {"input": "Sure?", "output": "Yes."}]},
        "Capybara",
        chat(CHAT + U("Sure?") + A("Yes.")),
    ),
    Schema("trl-lib/Capybara", {"source": "Dove", "messages": MESSAGES, "num_turns": 2}, "chat", chat()),
    Schema(
        "timdettmers/openassistant-guanaco",
        {"text": f"### Human: {Q}### Assistant: 15### Human: Sure?### Assistant: Yes."},
        "guanaco",
        chat(CHAT + U("Sure?") + A("Yes.")),
    ),
    Schema(
        "openassistant-guanaco, last turn without a completion",
        {"text": f"### Human: {Q}### Assistant: 15### Human: Thanks"},
        "guanaco",
        chat(),
    ),
    Schema(
        "OpenAssistant/oasst1, trees",
        {"message_tree_id": "t", "tree_state": "ready_for_export", "prompt": TREE},
        "oasst trees",
        {"sft": CHAT + U("Sure?") + A("Yes."), "dpo": PAIR},
    ),
    Schema(
        "OpenAssistant/oasst1, messages",
        {
            "message_id": "m",
            "parent_id": None,
            "user_id": "u",
            "created_date": "2023-02-05",
            "text": Q,
            "role": "prompter",
            "lang": "en",
            "review_count": 3,
            "review_result": True,
            "deleted": False,
            "rank": None,
            "synthetic": False,
            "model_name": None,
            "message_tree_id": "t",
            "tree_state": "ready_for_export",
        },
        "oasst messages",
        {"sft": Refused("each record is one message of a tree; use the files with whole trees", "use the tree files")},
    ),
    Schema(
        "allenai/WildChat-1M",
        {
            "conversation_hash": "c",
            "model": "gpt-4",
            "timestamp": "2023-04-09",
            "conversation": [
                {"content": Q, "role": "user", "language": "English", "redacted": False, "toxic": False},
                {"content": "15", "role": "assistant", "language": "English", "redacted": False, "toxic": False},
            ],
            "turn": 1,
            "language": "English",
            "toxic": False,
            "redacted": False,
        },
        "conversation",
        chat(),
    ),
    Schema(
        "lmsys/lmsys-chat-1m",
        {
            "conversation_id": "c",
            "model": "vicuna-13b",
            "conversation": MESSAGES,
            "turn": 1,
            "language": "English",
            "redacted": False,
        },
        "conversation",
        chat(),
    ),
    Schema("Muennighoff/flan", {"inputs": Q, "targets": "15", "task": "arithmetic"}, "FLAN", chat()),
    Schema(
        "Muennighoff/natural-instructions",
        {"task_name": "task001", "id": "1", "definition": "Add the numbers.", "inputs": "7 8", "targets": "15"},
        "FLAN",
        chat(U("Add the numbers.\n7 8") + A("15")),
    ),
    Schema(
        "nvidia/Llama-Nemotron-Post-Training-Dataset",
        {
            "input": [{"role": "user", "content": Q}],
            "output": "15",
            "category": "math",
            "license": "cc-by-4.0",
            "reasoning": "off",
            "generator": "Qwen",
            "used_in_training": "yes",
            "version": "v1",
            "system_prompt": "detailed thinking off",
        },
        "input and output",
        chat(S("detailed thinking off") + CHAT),
    ),
    Schema(
        "open-thoughts/OpenThoughts-114k",
        {"system": "Think.", "conversations": [{"from": "user", "value": Q}, {"from": "assistant", "value": "15"}]},
        "ShareGPT",
        chat(S("Think.") + CHAT),
    ),
    Schema(
        "Magpie-Align/Magpie-Pro-300K-Filtered",
        {"uuid": "u", "model": "llama-3", "instruction": Q, "response": "15", "conversations": TURNS},
        "ShareGPT",
        chat(),
    ),
    Schema(
        "nvidia/HelpSteer2",
        {
            "prompt": Q,
            "response": "15",
            "helpfulness": 4,
            "correctness": 4,
            "coherence": 4,
            "complexity": 1,
            "verbosity": 1,
        },
        "prompt and response",
        chat(),
    ),
    Schema(
        "trl-lib/tldr",
        {"prompt": "POST: I added.\n\nTL;DR:", "completion": " It is 15."},
        "prompt and completion",
        chat(U("POST: I added.\n\nTL;DR:") + A(" It is 15.")),
    ),
    Schema(
        "CarperAI/openai_summarize_tldr",
        {"prompt": "POST: I added.\n\nTL;DR:", "label": "It is 15."},
        "none",
        {
            "sft": Refused(
                "no known format has the columns prompt, label",
                "the label is the completion",
                {"completion": "label"},
                U("POST: I added.\n\nTL;DR:") + A("It is 15."),
            )
        },
    ),
    Schema(
        "abisee/cnn_dailymail",
        {"article": "I added 7 and 8.", "highlights": "15", "id": "x"},
        "none",
        {
            "sft": Refused(
                "no known format has the columns article, highlights, id",
                "write the prompt",
                {"prompt": "Summarize:\n{article}", "completion": "highlights"},
                U("Summarize:\nI added 7 and 8.") + A("15"),
            )
        },
    ),
    Schema(
        "OpenAI chat fine-tuning",
        {
            "messages": [
                MESSAGES[0],
                MESSAGES[1] | {"weight": 0},
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Yes.", "weight": 1},
            ]
        },
        "chat",
        chat(U(Q) + a("15") + U("Sure?") + A("Yes.")),
    ),
    Schema(
        "LLaMA-Factory v1",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": Q}], "loss_weight": 0.0},
                {
                    "role": "assistant",
                    "content": [{"type": "reasoning", "value": "Ten and five."}, {"type": "text", "value": "15"}],
                    "loss_weight": 1.0,
                },
            ]
        },
        "chat",
        chat(U(Q) + A("<think>Ten and five.</think>15")),
    ),
    Schema(
        "axolotl input_output",
        {"segments": [{"label": False, "text": "Q: 7+8="}, {"label": True, "text": "15<|im_end|>"}]},
        "segments",
        {
            "sft": "Q: 7+8=[[15|]]",
            "grpo": Refused("the format is segments: segments, which is data for sft", "a prompt is needed"),
        },
    ),
    # Tools
    Schema(
        "Salesforce/xlam-function-calling-60k",
        {"id": 0, "query": Q, "answers": json.dumps([CALL]), "tools": json.dumps([TOOL])},
        "xLAM",
        {"sft": TOOLS + U(Q) + A(CALLED), "grpo": Prompt(TOOLS + U(Q) + P, json.dumps([CALL]))},
    ),
    Schema(
        "glaiveai/glaive-function-calling-v2",
        GLAIVE,
        "glaive-v2",
        chat(TOOLS + U(Q) + A(CALLED) + 'tool: {"sum": 15}|' + A("It is 15.")),
    ),
    Schema(
        "glaive-function-calling-v2 without functions",
        {
            "system": "SYSTEM: You are a helpful assistant, with no access to external functions.\n",
            "chat": f"USER: {Q}\n\n\nASSISTANT: 15 <|endoftext|>\n\n\n",
        },
        "glaive-v2",
        chat(S("You are a helpful assistant, with no access to external functions.") + CHAT),
    ),
    Schema(
        "NousResearch/hermes-function-calling-v1",
        {
            "id": "1",
            "conversations": [
                {"from": "system", "value": "Use tools."},
                {"from": "human", "value": Q},
                {"from": "gpt", "value": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"},
                {"from": "tool", "value": '<tool_response>\n{"sum": 15}\n</tool_response>'},
                {"from": "gpt", "value": "It is 15."},
            ],
            "tools": json.dumps([{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]),
            "category": "Sums",
            "subcategory": "x",
            "task": "y",
        },
        "ShareGPT",
        chat(TOOLS + S("Use tools.") + U(Q) + A(CALLED) + 'tool: {"sum": 15}|' + A("It is 15.")),
    ),
    # Questions with a context or options
    Schema(
        "rajpurkar/squad",
        {
            "id": "5733",
            "title": "Sums",
            "context": "7+8 is 15.",
            "question": Q,
            "answers": {"text": ["15"], "answer_start": [7]},
        },
        "SQuAD",
        rl("15", U(f"7+8 is 15.\n\n{Q}") + A("15"), U(f"7+8 is 15.\n\n{Q}") + P),
    ),
    Schema(
        "rajpurkar/squad_v2, no answer",
        {"id": "5a", "title": "Sums", "context": "Sums.", "question": Q, "answers": {"text": [], "answer_start": []}},
        "SQuAD",
        {"sft": Refused("answers.text: is empty: the question has no answer in the context", QUARANTINE)},
    ),
    Schema(
        "mandarjoshi/trivia_qa",
        {
            "question": Q,
            "question_id": "t",
            "question_source": "s",
            "entity_pages": {"title": []},
            "search_results": {"title": []},
            "answer": {"aliases": ["fifteen"], "value": "15", "type": "WikipediaEntity"},
        },
        "TriviaQA",
        rl("15", CHAT),
    ),
    Schema(
        "allenai/ai2_arc",
        {"id": "M", "question": Q, "choices": {"text": ["14", "15"], "label": ["1", "2"]}, "answerKey": "2"},
        "ARC",
        rl("B", U(f"{Q}\nA. 14\nB. 15") + A("B"), U(f"{Q}\nA. 14\nB. 15") + P),
    ),
    Schema(
        "allenai/openbookqa",
        {"id": "7", "question_stem": Q, "choices": {"text": ["14", "15"], "label": ["A", "B"]}, "answerKey": "B"},
        "ARC",
        rl("B", U(f"{Q}\nA. 14\nB. 15") + A("B"), U(f"{Q}\nA. 14\nB. 15") + P),
    ),
    Schema(
        "cais/mmlu",
        {"question": Q, "subject": "abstract_algebra", "choices": ["14", "15"], "answer": 1},
        "multiple choice",
        rl("B", U(f"{Q}\nA. 14\nB. 15") + A("B"), U(f"{Q}\nA. 14\nB. 15") + P),
    ),
    Schema(
        "google/boolq",
        {"question": "is 7+8 15", "answer": True, "passage": "7+8 is 15."},
        "question and answer",
        {
            "sft": Refused(
                "answer: expected text, found bool",
                'write a function of four lines: `map_keys {"function": "convert.py:columns"}`',
            )
        },
    ),
    Schema(
        "hotpotqa/hotpot_qa",
        {
            "id": "5a",
            "question": Q,
            "answer": "15",
            "type": "comparison",
            "level": "easy",
            "supporting_facts": {"title": ["S"], "sent_id": [0]},
            "context": {"title": ["S"], "sentences": [["7+8 is really 15."]]},
        },
        "question and answer",
        rl("15", CHAT),
    ),
    # Preferences
    Schema(
        "Anthropic/hh-rlhf",
        {"chosen": f"\n\nHuman: {Q}\n\nAssistant: 15", "rejected": f"\n\nHuman: {Q}\n\nAssistant: 78"},
        "hh-rlhf",
        {"dpo": PAIR, "kto": PAIR},
    ),
    Schema(
        "Dahoas/full-hh-rlhf",
        {"prompt": f"\n\nHuman: {Q}\n\nAssistant:", "response": "15", "chosen": "15", "rejected": "78"},
        "preference",
        pair(),
    ),
    Schema(
        "Dahoas/full-hh-rlhf, several turns",
        FULL_HH,
        "preference",
        pair(U("Hello") + a("Hi!") + U(Q) + A(" 15"), U("Hello") + a("Hi!") + U(Q) + A(" 78")),
    ),
    Schema(
        "Dahoas/full-hh-rlhf, for sft",
        FULL_HH,
        "prompt and response",
        chat(U("Hello") + A("Hi!") + U(Q) + A(" 15")),
    ),
    Schema(
        "ms-swift",
        {"system": "Be brief.", "query": "Sure?", "response": "Yes.", "history": [[Q, "15"]]},
        "query and response",
        chat(S("Be brief.") + CHAT + U("Sure?") + A("Yes.")),
    ),
    Schema(
        "ms-swift, preference",
        {"query": Q, "response": "15", "rejected_response": "78"},
        "ms-swift pairwise",
        {"dpo": PAIR, "kto": PAIR, "sft": Refused("which is data for reward, dpo", "use `posttrain dpo`")},
    ),
    Schema(
        "nvidia/HelpSteer2, several turns",
        {"prompt": f"Hello\n\n<extra_id_1>Assistant\nHi!\n\n<extra_id_1>User\n{Q}", "response": "15", "helpfulness": 4},
        "prompt and response",
        chat(U("Hello") + A("Hi!") + CHAT),
    ),
    Schema(
        "HuggingFaceH4/ultrafeedback_binarized",
        {
            "prompt": Q,
            "prompt_id": "x",
            "chosen": MESSAGES,
            "rejected": [MESSAGES[0], MESSAGES[1] | {"content": "78"}],
            "messages": MESSAGES,
            "score_chosen": 8.5,
            "score_rejected": 6.0,
        },
        "preference",
        pair(),
    ),
    Schema(
        "argilla/ultrafeedback-binarized-preferences",
        {
            "source": "evol_instruct",
            "instruction": Q,
            "chosen_response": "15",
            "rejected_response": "78",
            "chosen_avg_rating": 5.0,
            "rejected_avg_rating": 2.0,
            "chosen_model": "gpt-4",
        },
        "UltraFeedback binarized",
        pair(),
    ),
    Schema("openbmb/UltraFeedback", ULTRAFEEDBACK, "UltraFeedback", {"dpo": PAIR, "kto": PAIR}),
    Schema(
        "UltraFeedback, equal ratings",
        ULTRAFEEDBACK | {"completions": [ULTRAFEEDBACK["completions"][1]] * 2},
        "UltraFeedback",
        {"dpo": Refused("completions: all have the same rating: none is preferred", QUARANTINE)},
    ),
    Schema(
        "nvidia/HelpSteer2, preference",
        {
            "split": "train",
            "prompt": Q,
            "response_1": "78",
            "response_2": "15",
            "preference_strength": 2,
            "preference_statement": "@Response 2 is better.",
            "preference_elaboration": "x",
            "three_most_similar_preferences": [],
            "all_preferences_unprocessed": [],
        },
        "HelpSteer2 preference",
        pair(),
    ),
    Schema(
        "HelpSteer2, preference over several turns",
        {
            "split": "train",
            "prompt": f"Hello\n\n<extra_id_1>Assistant\nHi!\n\n<extra_id_1>User\n{Q}",
            "response_1": "15",
            "response_2": "78",
            "preference_strength": -1,
        },
        "HelpSteer2 preference",
        pair(U("Hello") + a("Hi!") + BETTER, U("Hello") + a("Hi!") + WORSE),
    ),
    Schema(
        "nvidia/HelpSteer3, preference",
        {
            "domain": "general",
            "language": "english",
            "context": [{"role": "user", "content": Q}],
            "response1": "15",
            "response2": "78",
            "overall_preference": -3,
            "individual_preference": [{"score": -3, "reasoning": "Right."}],
        },
        "HelpSteer3 preference",
        {"dpo": PAIR, "kto": PAIR},
    ),
    Schema(
        "HelpSteer3, no preference",
        {
            "domain": "general",
            "language": "english",
            "context": [{"role": "user", "content": Q}],
            "response1": "15",
            "response2": "fifteen",
            "overall_preference": 0,
            "individual_preference": [],
        },
        "HelpSteer3 preference",
        {"dpo": Refused("overall_preference: is 0: no completion is preferred", QUARANTINE)},
    ),
    Schema("PKU-Alignment/PKU-SafeRLHF", PKU, "PKU-SafeRLHF", {"dpo": PAIR, "grpo": Prompt(U(Q) + P, None)}),
    Schema(
        "PKU-Alignment/BeaverTails",
        {"prompt": Q, "response": "15", "category": {"animal_abuse": False}, "is_safe": True},
        "BeaverTails",
        {"kto": (BETTER,), "sft": Refused("which is data for kto", "use `posttrain kto`")},
    ),
    Schema(
        "google-research-datasets/nq_open",
        {"question": Q, "answer": ["15", "fifteen"]},
        "question and answers",
        rl(["15", "fifteen"], CHAT),
    ),
    Schema(
        "stanfordnlp/web_questions",
        {"url": "http://example.org/view/en/sums", "question": Q, "answers": ["15"]},
        "question and answers",
        rl(["15"], CHAT),
    ),
    Schema(
        "RUC-NLPIR/FlashRAG_datasets",
        {"id": "test_0", "question": Q, "golden_answers": ["15", "fifteen"]},
        "question and answers",
        rl(["15", "fifteen"], CHAT),
    ),
    Schema(
        "OpenAI chat fine-tuning, function_call",
        {
            "messages": [
                {"role": "user", "content": Q},
                {"role": "assistant", "function_call": {"name": "add", "arguments": json.dumps(CALL["arguments"])}},
                {"role": "function", "name": "add", "content": "15"},
                {"role": "assistant", "content": "It is 15."},
            ],
        },
        "chat",
        chat(U(Q) + A(CALLED) + "tool: 15|" + A("It is 15.")),
    ),
    Schema(
        "TinyZero, countdown for Qwen (prompts with the template in them)",
        {
            "target": 15,
            "nums": [7, 8],
            "data_source": "countdown",
            "prompt": [
                {
                    "role": "user",
                    "content": f"<|im_start|>user\n{Q}<|im_end|>\n<|im_start|>assistant\nLet me solve this.\n<think>",
                }
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": {"target": 15, "numbers": [7, 8]}},
            "extra_info": {"split": "train", "index": 0},
        },
        "verl",
        {
            "grpo": Refused(
                "a chat template was applied to it before",
                "take the user's text out of it with a function of four lines, or make the file without the template",
            )
        },
    ),
    Schema(
        "stanfordnlp/SHP",
        {
            "post_id": "p",
            "domain": "askmath_train",
            "upvote_ratio": 0.9,
            "history": Q,
            "c_root_id_A": "a",
            "c_root_id_B": "b",
            "created_at_utc_A": 1,
            "created_at_utc_B": 2,
            "score_A": 2,
            "score_B": 9,
            "human_ref_A": "78",
            "human_ref_B": "15",
            "labels": 0,
            "seconds_difference": 1.0,
            "score_ratio": 4.5,
        },
        "SHP",
        pair(),
    ),
    Schema(
        "berkeley-nest/Nectar",
        {
            "prompt": f"\n\nHuman: {Q}\n\nAssistant: ",
            "answers": [
                {"answer": "78", "model": "mistral", "rank": 2.0},
                {"answer": "15", "model": "gpt-4", "rank": 1.0},
                {"answer": "1", "model": "llama", "rank": 3.0},
            ],
            "turns": 1,
            "num_responses": 3,
            "source": ["lmsys"],
            "good_natured": True,
        },
        "Nectar",
        {"dpo": (BETTER, WORSE, BETTER, U(Q) + A("1")), "kto": (BETTER, WORSE, U(Q) + A("1"))},
    ),
    Schema(
        "openai/summarize_from_feedback, comparisons",
        TLDR,
        "TL;DR comparisons",
        pair(U(TLDR_PROMPT) + A(" It is 15."), U(TLDR_PROMPT) + A(" It is 78.")),
    ),
    Schema(
        "CarperAI/openai_summarize_comparisons",
        {"prompt": "POST: I added.\n\nTL;DR:", "chosen": "It is 15.", "rejected": "It is 78."},
        "preference",
        pair(U("POST: I added.\n\nTL;DR:") + A("It is 15."), U("POST: I added.\n\nTL;DR:") + A("It is 78.")),
    ),
    Schema("lmsys/chatbot_arena_conversations", ARENA | {"winner": "model_b", "anony": True}, "Chatbot Arena", pair()),
    Schema(
        "chatbot_arena_conversations, a tie",
        ARENA | {"winner": "tie (bothbad)", "anony": True},
        "Chatbot Arena",
        {"dpo": Refused("winner: is 'tie (bothbad)': no completion is preferred", QUARANTINE)},
    ),
    Schema(
        "lmsys/mt_bench_human_judgments, the first of two turns",
        ARENA
        | {
            "winner": "model_a",
            "conversation_a": [*MESSAGES, *MESSAGES],
            "conversation_b": [MESSAGES[0], {"content": "78", "role": "assistant"}, *MESSAGES],
        },
        "Chatbot Arena",
        pair(),
    ),
    Schema(
        "lmarena-ai/arena-human-preference-55k",
        {
            "id": 1,
            "model_a": "m",
            "model_b": "n",
            "prompt": json.dumps([Q]),
            "response_a": '["15"]',
            "response_b": '["78"]',
            "winner_model_a": 1,
            "winner_model_b": 0,
            "winner_tie": 0,
        },
        "Chatbot Arena",
        pair(),
    ),
    Schema("openai/webgpt_comparisons", WEBGPT, "webgpt_comparisons", pair(U(Q) + A("15 [1]"), WORSE)),
    Schema(
        "Intel/orca_dpo_pairs",
        {"system": "Be brief.", "question": Q, "chosen": "15", "rejected": "78"},
        "preference",
        pair(S("Be brief.") + BETTER, S("Be brief.") + WORSE),
    ),
    Schema(
        "argilla/distilabel-intel-orca-dpo-pairs",
        {
            "system": "",
            "input": Q,
            "chosen": "15",
            "rejected": "78",
            "generations": ["15", "78"],
            "order": ["a", "b"],
            "rating": [9.0, 7.0],
            "status": "unchanged",
            "original_chosen": "15",
            "chosen_score": 9.0,
            "in_gsm8k_train": False,
        },
        "preference",
        pair(),
    ),
    Schema(
        "lvwerra/stack-exchange-paired",
        {
            "qid": 1,
            "question": Q,
            "date": "2020/01/01",
            "metadata": ["https://example.org"],
            "response_j": "15",
            "response_k": "78",
        },
        "stack-exchange-paired",
        pair(),
    ),
    Schema(
        "openbmb/UltraInteract_pair",
        {
            "task": "Math_CoT",
            "dataset": "gsm8k",
            "trajectory": [{"from": "user", "value": Q}],
            "chosen": "15",
            "rejected": "78",
            "id": "1",
            "parent_id": "0",
        },
        "UltraInteract",
        pair(),
    ),
    Schema(
        "Skywork/Skywork-Reward-Preference-80K-v0.2",
        {"chosen": MESSAGES, "rejected": [MESSAGES[0], {"role": "assistant", "content": "78"}], "source": "magpie"},
        "hh-rlhf",
        pair(),
    ),
    Schema(
        "allenai/llama-3.1-tulu-3-8b-preference-mixture",
        {
            "id": "x",
            "source": "y",
            "prompt": Q,
            "chosen": MESSAGES,
            "rejected": [MESSAGES[0], {"role": "assistant", "content": "78"}],
        },
        "preference",
        pair(),
    ),
    Schema(
        "jondurbin/truthy-dpo-v0.1",
        {"id": "1", "source": "s", "system": "", "prompt": Q, "chosen": "15", "rejected": "78"},
        "preference",
        pair(),
    ),
    Schema(
        "allenai/reward-bench",
        {
            "prompt": Q,
            "chosen": "15",
            "chosen_model": "gpt-4",
            "rejected": "78",
            "rejected_model": "m",
            "subset": "alpacaeval-easy",
            "id": 0,
        },
        "preference",
        pair(),
    ),
    Schema(
        "THU-KEG/RM-Bench",
        {"id": "chat/1", "prompt": Q, "chosen": ["15", "It is 15."], "rejected": ["78", "It is 78."], "domain": "chat"},
        "preference",
        {
            "dpo": Refused(
                "chosen[0]: expected a message with role and content",
                "take one of the texts",
                {"chosen": "chosen.0", "rejected": "rejected.0"},
                PAIR,
            )
        },
    ),
    Schema(
        "OpenAI preference fine-tuning",
        {
            "input": {"messages": [{"role": "user", "content": Q}], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [MESSAGES[1]],
            "non_preferred_output": [{"role": "assistant", "content": "78"}],
        },
        "OpenAI preference",
        pair(),
    ),
    Schema(
        "LLaMA-Factory v1, preference",
        {
            "chosen_messages": [
                {"role": "user", "content": [{"type": "text", "value": Q}], "loss_weight": 0.0},
                {"role": "assistant", "content": [{"type": "text", "value": "15"}], "loss_weight": 1.0},
            ],
            "rejected_messages": [
                {"role": "user", "content": [{"type": "text", "value": Q}], "loss_weight": 0.0},
                {"role": "assistant", "content": [{"type": "text", "value": "78"}], "loss_weight": 1.0},
            ],
        },
        "LLaMA-Factory v1 preference",
        pair(),
    ),
    Schema(
        "TRL, implicit prompt",
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        "implicit prompt",
        {
            "dpo": ("The sky is[[ blue.</s>]]", "The sky is[[ green.</s>]]"),
            "kto": ("The sky is[[ blue.</s>]]", "The sky is[[ green.</s>]]"),
        },
    ),
    Schema(
        "hiyouga/DPO-En-Zh-20k",
        {
            "conversations": [{"from": "human", "value": Q}],
            "chosen": {"from": "gpt", "value": "15"},
            "rejected": {"from": "gpt", "value": "78"},
        },
        "ShareGPT pairwise",
        pair(),
    ),
    # Labels and steps
    Schema(
        "trl-lib/kto-mix-14k",
        {"prompt": [MESSAGES[0]], "completion": [MESSAGES[1]], "label": True},
        "labelled completion",
        {"kto": (BETTER,)},
    ),
    Schema(
        "argilla/kto-mix-15k (LLaMA-Factory)",
        {"messages": MESSAGES, "label": False},
        "labelled chat",
        {"kto": (BETTER,)},
    ),
    Schema(
        "peiyi9979/Math-Shepherd",
        {
            "input": f"{Q} Step 1: 7+3=10 ки\nStep 2: 10+5=16 ки",
            "label": f"{Q} Step 1: 7+3=10 +\nStep 2: 10+5=16 -",
            "task": "GSM8K",
        },
        "Math-Shepherd",
        {"prm": (U(Q) + P + "Step 1: 7+3=10[[+]]\nStep 2: 10+5=16[[-]]",)},
    ),
    Schema(
        "trl-lib/math_shepherd",
        {"prompt": Q, "completions": ["7+3=10", "10+5=16"], "labels": [True, False]},
        "steps",
        {"prm": (U(Q) + P + "7+3=10[[+]]10+5=16[[-]]",)},
    ),
    Schema(
        "openai/prm800k",
        PRM800K,
        "PRM800K",
        {"prm": (U(Q) + P + "7+3=10[[+]]\n10+5=16[[-]]", U(Q) + P + "7+3=10[[+]]\n10+5=15[[+]]")},
    ),
    Schema(
        "Qwen/ProcessBench",
        {
            "id": "gsm8k-0",
            "generator": "Qwen2-7B",
            "problem": Q,
            "steps": ["7+3=10", "10+5=16"],
            "label": 1,
            "final_answer_correct": False,
        },
        "ProcessBench",
        {"prm": (U(Q) + P + "7+3=10[[+]]\n\n10+5=16[[-]]",)},
    ),
    Schema(
        "RLHFlow/Mistral-PRM-Data",
        {
            "conversations": [
                {"content": f"{Q} Step 1: 7+3=10", "role": "user"},
                {"content": "+", "role": "assistant"},
                {"content": "Step 2: 10+5=16", "role": "user"},
                {"content": "-", "role": "assistant"},
            ]
        },
        "ShareGPT",
        chat(U(f"{Q} Step 1: 7+3=10") + A("+") + U("Step 2: 10+5=16") + A("-")),
    ),
    # Text, pictures
    Schema(
        "HuggingFaceFW/fineweb",
        {
            "text": "7 and 8 make 15.",
            "id": "u",
            "dump": "CC-MAIN-2013-20",
            "url": "x",
            "language": "en",
            "token_count": 7,
        },
        "text",
        {"pretrain": "<s>[[7 and 8 make 15.</s>]]"},
    ),
    Schema(
        "liuhaotian/LLaVA-Instruct-150K",
        {
            "id": "1",
            "image": "1.jpg",
            "conversations": [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "A cat."}],
        },
        "ShareGPT",
        {"sft": Refused("image: only text can be trained on", "pictures are not supported")},
    ),
    # Further data sets
    Schema(
        "PRIME-RL/Eurus-2-RL-Data",
        {
            "data_source": "numina_olympiads",
            "prompt": [{"role": "system", "content": "Think first."}, {"role": "user", "content": Q}],
            "ability": "math",
            "reward_model": {"ground_truth": "15", "style": "rule"},
            "extra_info": {"index": 0, "split": "dummy"},
        },
        "verl",
        rl("15", prompt=S("Think first.") + U(Q) + P),
    ),
    Schema(
        "Search-R1 (nq_hotpotqa_train)",
        {
            "id": "train_0",
            "question": Q,
            "golden_answers": ["15"],
            "data_source": "nq",
            "prompt": [{"role": "user", "content": Q}],
            "ability": "fact-reasoning",
            "reward_model": {"ground_truth": {"target": ["15"]}, "style": "rule"},
            "extra_info": {"index": 0, "split": "train"},
            "metadata": None,
        },
        "verl",
        rl({"target": ["15"]}),
    ),
    Schema(
        "zhuzilin/dapo-math-17k (slime)",
        {"prompt": [{"role": "user", "content": Q}], "label": "15"},
        "slime",
        rl("15"),
    ),
    Schema(
        "OpenRLHF/prompt-collection-v0.1",
        {"dataset": "x", "context": f"Human: {Q}", "context_messages": [{"role": "user", "content": Q}], "id": "1"},
        "OpenRLHF prompts",
        {"grpo": Prompt(U(Q) + P, None)},
    ),
    Schema(
        "trl-lib/DeepMath-103K",
        {"prompt": [{"role": "user", "content": Q}], "solution": "$15$"},
        "prompt",
        rl("$15$"),
    ),
    Schema(
        "GAIR/LIMR",
        {"id": 1, "question": Q, "answer": "15", "prompt": f"{Q} Reason."},
        "question and answer",
        rl("15", CHAT, U(f"{Q} Reason.") + P),
    ),
    Schema("nvidia/AceReason-Math", {"problem": Q, "answer": "15"}, "problem and answer", rl("15", CHAT)),
    Schema(
        "Intelligent-Internet/II-Thought-RL-v0",
        {
            "id": "1",
            "problem": Q,
            "answer": "15",
            "verification_info": {"answer": {"value": "15"}},
            "type": "math-verifiable",
            "source": "numina",
        },
        "problem and answer",
        rl("15", CHAT),
    ),
    Schema(
        "apple/GSM-Symbolic",
        {"id": 1, "instance": 0, "question": Q, "answer": "Ten and five.\n#### 15", "original_question": "And 3+4?"},
        "GSM8K",
        rl("15", U(Q) + A("Ten and five.\n#### 15")),
    ),
    Schema(
        "AI-MO/NuminaMath-TIR",
        {
            "problem": Q,
            "solution": R,
            "messages": [{"content": Q, "role": "user"}, {"content": R, "role": "assistant"}],
        },
        "chat",
        rl(R, U(Q) + A(R)),
    ),
    Schema(
        "bespokelabs/Bespoke-Stratos-17k",
        {
            "system": "Think first.",
            "conversations": [{"from": "user", "value": Q}, {"from": "assistant", "value": "15"}],
        },
        "ShareGPT",
        chat(S("Think first.") + CHAT),
    ),
    Schema(
        "open-thoughts/OpenThoughts3-1.2M",
        {
            "difficulty": 9,
            "source": "x",
            "domain": "math",
            "conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": "<think>Ten.</think>15"}],
        },
        "ShareGPT",
        chat(U(Q) + A("<think>Ten.</think>15")),
    ),
    Schema(
        "open-thoughts/OpenThoughts-114k, metadata",
        {
            "problem": Q,
            "deepseek_reasoning": "Ten and five.",
            "deepseek_solution": "It is 15.",
            "ground_truth_solution": R,
            "domain": "math",
            "source": "numina_math",
            "test_cases": None,
            "starter_code": None,
        },
        "OpenThoughts, reasoning apart",
        rl(R, U(Q) + A("<think>Ten and five.</think>It is 15.")),
    ),
    Schema(
        "open-r1/OpenThoughts-114k-math",
        {
            "source": "numina",
            "problem": Q,
            "solution": R,
            "messages": [{"content": Q, "role": "user"}, {"content": R, "role": "assistant"}],
            "system": "Think first.",
            "conversations": [{"from": "user", "value": Q}, {"from": "assistant", "value": "15"}],
            "generated_token_count": 3,
            "correct": True,
        },
        "ShareGPT",
        {
            "sft": Refused(
                "ambiguous columns: chat: messages, system or ShareGPT: system, conversations",
                "remove one of them",
                {"messages": ""},
                S("Think first.") + CHAT,
            )
        },
    ),
    Schema(
        "GeneralReasoning/GeneralThought-195K",
        {
            "question_id": 1,
            "question": Q,
            "reference_answer": "15",
            "prev_messages": None,
            "model_name": "DeepSeek/R1",
            "model_answer": "It is 15.",
            "model_reasoning": "Ten and five.",
            "verifier_score": 1.0,
        },
        "GeneralThought",
        rl("15", U(Q) + A("<think>Ten and five.</think>It is 15.")),
    ),
    Schema(
        "GeneralThought-195K, a wrong completion",
        {
            "question_id": 1,
            "question": Q,
            "reference_answer": "15",
            "model_answer": "It is 16.",
            "model_reasoning": "Ten and six.",
            "verifier_score": 0.0,
        },
        "GeneralThought",
        {"sft": Refused("verifier_score: is 0: a wrong completion is not trained on", QUARANTINE)},
    ),
    Schema(
        "Congliu/Chinese-DeepSeek-R1-Distill-data-110k",
        {"input": "七加八?", "reasoning_content": "十加五。", "content": "15", "repo_name": "x", "score": 10},
        "input, reasoning and content",
        chat(U("七加八?") + A("<think>十加五。</think>15")),
    ),
    Schema(
        "FreedomIntelligence/medical-o1-reasoning-SFT",
        {"Question": Q, "Complex_CoT": "Ten and five.", "Response": "It is 15."},
        "medical-o1",
        chat(U(Q) + A("<think>Ten and five.</think>It is 15.")),
    ),
    Schema(
        "nvidia/Nemotron-Post-Training-Dataset-v1",
        {
            "uuid": "1",
            "license": "cc-by-4.0",
            "generator": "DeepSeek-R1-0528",
            "version": "v1",
            "category": "math",
            "reasoning": "on",
            "messages": [
                {"role": "user", "content": Q, "tool_calls": []},
                {"role": "assistant", "content": "<think>Ten.</think>15", "tool_calls": []},
            ],
            "metadata": '{"expected_answer": "15"}',
        },
        "chat",
        chat(U(Q) + A("<think>Ten.</think>15")),
    ),
    Schema(
        "HuggingFaceH4/Multilingual-Thinking (gpt-oss)",
        {
            "reasoning_language": "English",
            "messages": [
                {"role": "developer", "content": "Be brief.", "thinking": None},
                {"role": "user", "content": Q, "thinking": None},
                {"role": "assistant", "content": "15", "thinking": "Ten and five."},
            ],
        },
        "chat",
        chat(S("Be brief.") + U(Q) + A("<think>Ten and five.</think>15")),
    ),
    Schema(
        "HuggingFaceTB/smoltalk2",
        {
            "messages": MESSAGES,
            "chat_template_kwargs": {"custom_instructions": "Be brief.", "enable_thinking": False, "xml_tools": []},
            "source": "x",
        },
        "chat",
        {
            "sft": Refused(
                "chat_template_kwargs: the chat template cannot be given custom_instructions, enable_thinking",
                "remove the column",
                {"chat_template_kwargs": ""},
                CHAT,
            )
        },
    ),
    Schema(
        "THUDM/AgentInstruct",
        {
            "conversations": [
                {"from": "human", "loss": None, "value": "You can use a shell."},
                {"from": "gpt", "loss": False, "value": "OK."},
                {"from": "human", "loss": None, "value": Q},
                {"from": "gpt", "loss": True, "value": "15"},
            ],
            "id": "os_0",
        },
        "ShareGPT",
        chat(U("You can use a shell.") + a("OK.") + CHAT),
    ),
    Schema(
        "Team-ACE/ToolACE",
        {
            "system": "You can invoke: [add]",
            "conversations": [
                {"from": "user", "value": Q},
                {"from": "assistant", "value": "[add(a=7, b=8)]"},
                {"from": "tool", "value": "15"},
                {"from": "assistant", "value": "It is 15."},
            ],
        },
        "ShareGPT",
        chat(
            S("You can invoke: [add]") + U(Q) + A("[add(a=7, b=8)]") + f"tool: 15{END}" + A("It is 15."),
        ),
    ),
    Schema(
        "Salesforce/APIGen-MT-5k",
        {
            "conversations": [
                {"from": "human", "value": Q},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "15"},
                {"from": "gpt", "value": "It is 15."},
            ],
            "tools": json.dumps([TOOL]),
            "system": "You are an agent.",
        },
        "ShareGPT",
        chat(
            f"tools: {json.dumps([TOOL])}{END}"
            + S("You are an agent.")
            + U(Q)
            + A(CALLED)
            + f"tool: 15{END}"
            + A("It is 15.")
        ),
    ),
    Schema(
        "Locutusque/function-calling-chatml",
        {"system_message": "You may call functions.", "function_description": "{}", "conversations": TURNS},
        "ShareGPT",
        chat(S("You may call functions.") + CHAT),
    ),
    Schema(
        "anon8231489123/ShareGPT_Vicuna_unfiltered, Bing",
        {"id": "1", "conversations": [{"from": "human", "value": Q}, {"from": "bing", "value": "15"}]},
        "ShareGPT",
        chat(),
    ),
    Schema(
        "ShareGPT_Vicuna_unfiltered, begins with a completion",
        {"id": "1", "conversations": [{"from": "gpt", "value": "Hello."}, *TURNS]},
        "ShareGPT",
        {"sft": Refused("conversations[0]: the first message is the assistant's", QUARANTINE)},
    ),
    Schema(
        "CohereForAI/aya_dataset",
        {
            "inputs": Q,
            "targets": "15",
            "language": "English",
            "language_code": "eng",
            "annotation_type": "original-annotations",
            "user_id": "ab",
        },
        "FLAN",
        chat(),
    ),
    Schema(
        "openbmb/UltraInteract_sft",
        {"task": "Coding", "dataset": "codecontest", "instruction": Q, "response": "15", "id": "1", "parent_id": "0"},
        "Dolly",
        chat(),
    ),
    Schema(
        "m-a-p/CodeFeedback-Filtered-Instruction",
        {"query": Q, "answer": "15", "resource": "evol", "lang": "python"},
        "query and answer",
        chat(),
    ),
    Schema("YeungNLP/firefly-train-1.1M", {"kind": "Math", "input": Q, "target": "15"}, "input and target", chat()),
    Schema("BelleGroup/train_2M_CN", {"instruction": Q, "input": "", "output": "15"}, "Alpaca", chat()),
    Schema(
        "nvidia/OpenCodeInstruct",
        {
            "id": "1",
            "input": Q,
            "output": "15",
            "domain": "generic",
            "generation_algorithm": "self-instruct",
            "llm_judgement": "{}",
            "unit_tests": "[]",
            "average_test_score": "1",
        },
        "input and output",
        chat(),
    ),
    Schema(
        "newfacade/LeetCodeDataset",
        {
            "task_id": "two-sum",
            "prompt": "import math",
            "completion": "class Solution: ...",
            "entry_point": "Solution().twoSum",
            "query": Q,
            "response": "15",
        },
        "LeetCodeDataset",
        {
            "sft": Refused(
                "query: the record has two prompts with completions",
                "choose one of them",
                {"prompt": "query", "completion": "response", "query": "", "response": ""},
                CHAT,
            )
        },
    ),
    Schema(
        "b-mc2/sql-create-context",
        {"question": Q, "context": "CREATE TABLE t (n INTEGER)", "answer": "15"},
        "question about a text",
        rl("15", U(f"CREATE TABLE t (n INTEGER)\n\n{Q}") + A("15"), U(f"CREATE TABLE t (n INTEGER)\n\n{Q}") + P),
    ),
    Schema(
        "an instruction with a context (NeMo)",
        {"prompt": Q, "context": "In base ten.", "completion": "15"},
        "prompt and completion",
        {
            "sft": Refused(
                "context: would not be part of the prompt",
                "join the columns",
                {"prompt": "{context}\n\n{prompt}"},
                U(f"In base ten.\n\n{Q}") + A("15"),
            )
        },
    ),
    Schema(
        "EdinburghNLP/xsum",
        {"document": "A long report.", "summary": "It is short.", "id": "1"},
        "none",
        {
            "sft": Refused(
                "no known format has the columns document, summary, id",
                "the message names the mapping",
                {"prompt": "document", "completion": "summary"},
                U("A long report.") + A("It is short."),
            )
        },
    ),
    Schema(
        "TIGER-Lab/MMLU-Pro",
        {
            "question_id": 1,
            "question": Q,
            "options": ["14", "15"],
            "answer": "B",
            "answer_index": 1,
            "cot_content": "A: Let's think step by step.",
            "category": "math",
        },
        "multiple choice",
        rl("B", U(f"{Q}\nA. 14\nB. 15") + A("B"), U(f"{Q}\nA. 14\nB. 15") + P),
    ),
    Schema(
        "GBaker/MedQA-USMLE-4-options",
        {"question": Q, "answer": "15", "options": {"A": "14", "B": "15"}, "meta_info": "step1", "answer_idx": "B"},
        "multiple choice",
        rl("B", U(f"{Q}\nA. 14\nB. 15") + A("B"), U(f"{Q}\nA. 14\nB. 15") + P),
    ),
    Schema(
        "openai/MMMLU",
        {"Unnamed: 0": 0, "Question": Q, "A": "14", "B": "15", "Answer": "B", "Subject": "math"},
        "multiple choice",
        rl("B", U(f"{Q}\nA. 14\nB. 15") + A("B"), U(f"{Q}\nA. 14\nB. 15") + P),
    ),
    Schema(
        "ehovy/race",
        {"example_id": "1", "article": "Seven and eight.", "answer": "B", "question": Q, "options": ["14", "15"]},
        "multiple choice",
        chat(U(f"Seven and eight.\n\n{Q}\nA. 14\nB. 15") + A("B")),
    ),
    Schema(
        "tau/commonsense_qa",
        {"id": "1", "question": Q, "choices": {"label": ["A", "B"], "text": ["14", "15"]}, "answerKey": "B"},
        "ARC",
        chat(U(f"{Q}\nA. 14\nB. 15") + A("B")),
    ),
    Schema(
        "argilla/dpo-mix-7k",
        {
            "dataset": "argilla/distilabel-capybara",
            "chosen": MESSAGES,
            "rejected": [MESSAGES[0], {"role": "assistant", "content": "78"}],
            "chosen_rating": 5.0,
            "rejected_rating": 3.0,
        },
        "hh-rlhf",
        pair(),
    ),
    Schema(
        "RLHFlow/pair_data_v2_80K_wsafety",
        {"chosen": MESSAGES, "rejected": [MESSAGES[0], {"role": "assistant", "content": "78"}]},
        "hh-rlhf",
        pair(),
    ),
    Schema(
        "xinlai/Math-Step-DPO-10K",
        {
            "dataset": "gsm8k",
            "prompt": Q,
            "prompt + initial_reason_steps": f"{Q}\nStep 1: ten.\nStep 2:",
            "initial_reason_steps": "Step 1: ten.\nStep 2:",
            "chosen": " so 15",
            "rejected": " so 78",
            "full_chosen": " so it is 15",
            "full_rejected": " so it is 78",
            "answer": "15",
        },
        "Step-DPO",
        pair(U(Q) + A("Step 1: ten.\nStep 2: so 15"), U(Q) + A("Step 1: ten.\nStep 2: so 78")),
    ),
    Schema(
        "tasksource/oasst1_pairwise_rlhf_reward",
        {"lang": "en", "prompt": f"prompter: {Q}", "chosen": "assistant: 15", "rejected": "assistant: 78"},
        "preference",
        {"dpo": Refused("chosen: begins with the name of a role", "remove the names with a function of `map_keys`")},
    ),
    Schema(
        "lmarena-ai/arena-human-preference-140k",
        {
            "id": "1",
            "model_a": "a",
            "model_b": "b",
            "winner": "model_a",
            "conversation_a": [
                {"role": "user", "content": [{"type": "text", "text": Q}]},
                {"role": "assistant", "content": [{"type": "text", "text": "15"}]},
            ],
            "conversation_b": [
                {"role": "user", "content": [{"type": "text", "text": Q}]},
                {"role": "assistant", "content": [{"type": "text", "text": "78"}]},
            ],
        },
        "Chatbot Arena",
        pair(),
    ),
    Schema(
        "nvidia/HelpSteer3, edit",
        {
            "domain": "general",
            "language": "english",
            "context": [{"role": "user", "content": Q}],
            "original_response": "78",
            "edited_response": "15",
            "change_summary": "The sum was corrected.",
            "feedback": ["It is wrong."],
        },
        "none",
        {
            "dpo": Refused(
                "no known format has the columns domain, language, context",
                "the edited response is the better one",
                {"prompt": "context", "chosen": "edited_response", "rejected": "original_response"},
                PAIR,
            )
        },
    ),
    Schema(
        "HuggingFaceTB/cosmopedia",
        {"prompt": "Write about sums.", "text_token_length": 5, "text": "7 and 8 make 15.", "format": "textbook"},
        "text",
        {"pretrain": "<s>[[7 and 8 make 15.</s>]]"},
    ),
    Schema(
        "bigcode/the-stack",
        {"content": "print(7 + 8)", "size": 12, "lang": "Python", "ext": "py"},
        "none",
        {
            "pretrain": Refused(
                "no known format has the columns content, size, lang, ext",
                "the message names the mapping",
                {"text": "content"},
                "<s>[[print(7 + 8)</s>]]",
            )
        },
    ),
)


def page() -> str:
    """Return the page of the documentation."""
    lines = [
        "# Public data sets",
        "",
        f"What the records of {len(SCHEMAS)} published data sets and file formats become. The columns are those of the",
        "data set; a small copy of each is read, rendered and trained on in the tests. The formats are described in",
        "[Data](data.md). `posttrain data check FILE` prints the same verdict for your file.",
        "",
        "| data set | columns | format | what it becomes |",
        "|---|---|---|---|",
    ]
    for schema in SCHEMAS:
        record = schema.record if isinstance(schema.record, dict) else dict(enumerate(schema.record))
        columns = ", ".join(f"`{name}`" for name in record)
        becomes = "; ".join(_becomes(verb, use) for verb, use in schema.uses.items())
        lines.append(f"| {schema.name} | {columns} | {schema.family} | {becomes} |")
    return "\n".join(lines) + "\n"


KINDS = {
    "sft": "a conversation",
    "dpo": "{} pair{}",
    "kto": "labelled completions",
    "prm": "labelled steps",
    "grpo": "a prompt",
    "pretrain": "a text",
}


def _becomes(verb: str, use: Any) -> str:
    if isinstance(use, Refused):
        fix = use.fix
        if use.map_keys:
            fix += ": `map_keys " + json.dumps(use.map_keys).replace("|", "\\|") + "`"
        return f"`{verb}`: refused, `{use.message}`; {fix}"
    if isinstance(use, Prompt):
        return f"`{verb}`: a prompt" + (" with its ground truth" if use.truth is not None else "")
    count = len(use) // 2
    return f"`{verb}`: " + KINDS[verb].format("a" if count == 1 else count, "s" * (count != 1))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
