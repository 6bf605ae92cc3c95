"""MindRLHF's names train through the public API; tests/e2e/test_docs.py runs its two scripts in docs/python.md."""

import json

import pytest

from posttrain import UsageError, mindrlhf
from posttrain.core.ops import learning_rate_at
from posttrain.mindrlhf import GRPOConfig, GRPOTrainer, LlamaConfig, PPOConfig, Qwen2Tokenizer, cluster_options

QUESTIONS = "examples/data/questions.jsonl"


def small(**fields):
    return GRPOConfig(
        mind_dataset_dir=QUESTIONS, epochs=1, max_decode_length=4, seq_length=64, num_rollouts=2, **fields
    )


def trainer_of(config, infer="pico", train="pico", **arguments):
    models = (LlamaConfig(checkpoint_name_or_path=path) for path in (infer, train, "pico"))
    return GRPOTrainer(config, *models, reward_funcs=mindrlhf.accuracy_reward, **arguments)


def test_defaults_are_those_of_mindrlhf_and_reach_the_run(tmp_path):
    config = small(save_ckpt_dir=str(tmp_path / "run"), save_data_file=str(tmp_path / "elements.jsonl"))
    trainer = trainer_of(config)
    try:
        found = trainer.trainer._loop.config
        assert (found.algo.epochs_per_batch, found.algo.reference_sync_steps, found.algo.kl_coef) == (2, 50, 0.01)
        assert (found.algo.mini_batch_size, found.rollout.samples_per_prompt, found.train.batch_size) == (1, 2, 2)
        assert (found.train.warmup_steps, found.train.lr_decay_steps, found.train.learning_rate) == (10, 200_000, 5e-7)
        assert found.train.min_lr_ratio * found.train.learning_rate == pytest.approx(1e-10)
        assert (found.data.max_length, found.rollout.max_tokens) == (60, 4)
        with pytest.raises(UsageError, match="num_generations is 3, but it is 2"):
            trainer.make_experience(num_generations=3)
        trainer.make_experience(num_generations=2, rank_id=0)
        lines = (tmp_path / "elements.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1] * 4
        metrics = trainer.train(mindrlhf.init_grpo_network_and_optimizer(trainer), mindrlhf.init_grpo_dataset(trainer))
        assert metrics["updates"] == 8  # 2 prompts x 2 completions, one by one, twice
        assert metrics["learning_rate"] == pytest.approx(5e-8)  # the first of ten steps of warm-up
    finally:
        trainer.close()


def test_the_schedule_may_end_after_the_run_or_before():
    rates = [learning_rate_at(step, 4, 1.0, "linear", 1, 0.1) for step in (1, 2, 4, 9)]
    assert rates == pytest.approx([1.0, 0.7, 0.1, 0.1])


def test_what_would_be_lost_is_refused():
    with pytest.raises(UsageError, match="name one directory"):
        trainer_of(small(), infer="elsewhere")
    with pytest.raises(UsageError, match="end_lr"):
        trainer_of(small(end_lr=1.0))
    with pytest.raises(UsageError, match="AdamW"):
        trainer_of(small(optimizer="lamb"))
    with pytest.raises(UsageError, match="mindrecord"):
        config = small()
        config.mind_dataset_dir = "train.mindrecord"
        trainer_of(config)
    with pytest.raises(UsageError, match="checkpoint_name_or_path"):
        trainer_of(small(), train="")
    with pytest.raises(AttributeError):
        PPOConfig().ppo_epoch = 2
    with pytest.raises(UsageError, match="add_bos_token"):
        Qwen2Tokenizer("vocab.json", "merges.txt", add_bos_token=True)


def test_sizes_must_be_those_of_the_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}', encoding="utf-8")
    with pytest.raises(UsageError, match=r"hidden_size is 16, but hidden_size in .* is 8"):
        mindrlhf.model_path(LlamaConfig(checkpoint_name_or_path=str(tmp_path), hidden_size=16), "train")
    assert mindrlhf.model_path({"checkpoint_name_or_path": str(tmp_path), "hidden_size": 8}, "train") == str(tmp_path)


def test_a_parallel_layout_becomes_devices():
    layout = {"data_parallel": 1, "model_parallel": 4, "pipeline_stage": 2, "use_seq_parallel": True}
    assert cluster_options(layout) == {"devices": 8, "tensor_parallel_size": 4, "pipeline_parallel_size": 2}


def test_a_tokenizer_of_two_files(tmp_path):
    words = ["a", "b", "ab", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n", encoding="utf-8")
    tokenizer = Qwen2Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    assert tokenizer.encode("abb") == [2, 1]
