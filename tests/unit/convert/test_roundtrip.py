"""There and back is bit-equal, for every family and whatever layout is drawn."""

import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.convert.conversion import convert
from posttrain.convert.families import FAMILIES
from posttrain.convert.megatron import CheckpointLayout
from posttrain.convert.parameters import model_parameters
from posttrain.convert.source import open_source
from posttrain.core.files import read_json
from tests.unit.convert.models import NAMES, assert_equal, converted, core, weights

CASES = 18  # for each of the tiny models: more than 300 in all, with and without those that have no legacy form


FEW_CASES = 6  # for families whose modules have the names of another, or its structure
LIKE_OTHERS = ("hunyuan", "hunyuan_v1_moe", "minicpm-moe", "qwen")


@st.composite
def layouts(draw, shape, formats=("mcore", "legacy")):
    kind = "mcore" if shape.mla else draw(st.sampled_from(formats))
    tp = draw(st.sampled_from([1, 2, 4] if kind == "mcore" else [1, 2]))
    ep = draw(st.sampled_from([1, 2, 4])) if shape.experts else 1
    engine = kind == "mcore" and draw(st.booleans())
    experts = (
        draw(st.sampled_from(["single", "grouped"])) if shape.experts and kind == "mcore" and not engine else "single"
    )
    extended = bool(shape.experts) and shape.experts % (tp * ep) == 0 and draw(st.booleans())
    noop = tuple(sorted(draw(st.sets(st.integers(0, 5), min_size=2, max_size=2)))) if draw(st.booleans()) else ()
    layout = CheckpointLayout(kind, tp=tp, engine=engine, experts=experts, noop=noop, tp_extend_ep=extended)
    total = 4 + len(noop)
    cut = draw(st.sampled_from(["even", "uneven", "virtual"]))
    if cut == "even":
        layout = replace(layout, pp=draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0])))
    elif cut == "virtual":
        layout = replace(layout, pp=2, layers_per_virtual_stage=draw(st.sampled_from([1, total // 2])))
    else:
        first = draw(st.integers(1, total - 2))
        second = draw(st.integers(1, total - first - 1))
        layout = replace(layout, pp=3, layers_per_stage=(first, second, total - first - second))
    return replace(layout, ep=ep if tp * layout.pp * ep <= 12 else 1)  # fewer files, less time


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_bit_equal(name, tiny, tmp_path):
    """hf -> core -> legacy -> hf, each cut as drawn; and core -> legacy -> core. Without legacy where it cannot be."""
    folder = tiny(name)
    shape, _ = model_parameters(read_json(folder / "config.json"))

    cases = FEW_CASES if name in LIKE_OTHERS else CASES

    @settings(max_examples=cases, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(layout=layouts(shape, ("mcore",)), other=layouts(shape, ("legacy",)), multiple=st.sampled_from([1, 3, 16]))
    def check(layout, other, multiple):
        root = tmp_path / "case"
        try:
            report = converted(folder, root / "core", layout, vocabulary_multiple=multiple)
            assert report.target.padded_vocabulary % (multiple * layout.tp) == 0
            last = "core"
            if other.format == "legacy":
                converted(root / "core", root / "legacy", other, "mcore")
                converted(root / "legacy", root / "again", layout, "legacy", vocabulary_multiple=multiple)
                same_ranks(root / "core", root / "again")
                last = "legacy"
            converted(root / last, root / "back", CheckpointLayout(), {"core": "mcore"}.get(last, last))
            assert_equal(folder, root / "back")
        finally:
            shutil.rmtree(root, ignore_errors=True)

    check()


def test_every_row_of_the_table_has_a_model():
    tested = {name.split("-")[0] for name in NAMES}
    assert {kind for family in FAMILIES.values() for kind in family.types} == tested


def same_ranks(one, other):
    files = sorted(path.relative_to(one) for path in one.rglob("*.pt"))
    assert files == sorted(path.relative_to(other) for path in other.rglob("*.pt")) and files
    for file in files:
        a, b = (core(root, single=file.parent.name) for root in (one, other))
        for (name, left), (again, right) in zip(walk(a), walk(b), strict=True):
            assert name == again and torch.equal(left, right), name


def walk(state, prefix=""):
    for key, value in state.items():
        if isinstance(value, dict):
            yield from walk(value, f"{prefix}{key}/")
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value


@pytest.mark.parametrize("name", ["llama-wide", "llama-biased", "qwen2", "mixtral", "gpt2", "deepseek_v3-later"])
def test_resharding_equals_converting_directly(name, tiny, tmp_path):
    goal = CheckpointLayout("mcore", tp=4) if name == "llama-wide" else CheckpointLayout("mcore", tp=1, pp=4)
    converted(tiny(name), tmp_path / "first", CheckpointLayout("mcore", tp=2, pp=2), vocabulary_multiple=8)
    converted(tmp_path / "first", tmp_path / "second", goal, "mcore")
    converted(tiny(name), tmp_path / "direct", goal)
    same_ranks(tmp_path / "second", tmp_path / "direct")


def test_several_workers_and_small_files_give_the_same(tiny, tmp_path):
    converted(tiny("mixtral"), tmp_path / "core", CheckpointLayout("mcore", tp=2), workers=4)
    converted(tmp_path / "core", tmp_path / "hf", CheckpointLayout(), "mcore", workers=4, shard_bytes=20_000)
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 3
    converted(tmp_path / "hf", tmp_path / "one", CheckpointLayout())
    assert_equal(tiny("mixtral"), tmp_path / "one")


def test_a_layout_is_recognised_without_our_manifest(tiny, tmp_path):
    for number, layout in enumerate(
        [
            CheckpointLayout("mcore", tp=2, pp=2),
            CheckpointLayout("mcore", pp=3, layers_per_stage=(1, 2, 1)),
            CheckpointLayout("mcore", pp=2, layers_per_virtual_stage=1, engine=True),
            CheckpointLayout("legacy", tp=2),
            CheckpointLayout("mcore", pp=2, ep=2, experts="grouped"),
        ]
    ):
        there, back = tmp_path / f"there{number}", tmp_path / f"back{number}"
        converted(tiny("mixtral"), there, layout, vocabulary_multiple=8)
        (there / "convert.json").unlink()
        converted(there, back, CheckpointLayout(), layout.format)
        assert_equal(tiny("mixtral"), back)


def test_tensor_ranks_extend_expert_ranks(tiny, tmp_path):
    """Experts stay whole: with TP 2 and EP 2 each of four ranks has one of four; without our manifest it is given."""
    layout = CheckpointLayout("mcore", tp=2, ep=2, tp_extend_ep=True)
    converted(tiny("mixtral"), tmp_path / "core", layout)
    hf = weights(tiny("mixtral"))
    for expert, (ep, tp) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
        state = core(tmp_path / "core", single=f"mp_rank_{tp:02d}_{ep:03d}")["model"]
        held = [name for name in state if name.startswith("decoder.layers.1.mlp.experts.") and "fc2" in name]
        assert held == ["decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight"]
        assert torch.equal(state[held[0]], hf[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"])
    (tmp_path / "core/convert.json").unlink()
    opened = open_source(tmp_path / "core", "mcore", None, CheckpointLayout(ep=2, tp_extend_ep=True))
    convert(opened, tmp_path / "back", CheckpointLayout())
    opened.close()
    assert_equal(tiny("mixtral"), tmp_path / "back")


def test_rounding_and_back(tiny, tmp_path):
    converted(tiny("deepseek_v3"), tmp_path / "half", CheckpointLayout("mcore", tp=2), dtype=torch.bfloat16)
    layer = core(tmp_path / "half", single="mp_rank_00")["model"]
    assert layer["decoder.layers.1.mlp.router.weight"].dtype == torch.bfloat16
    assert layer["decoder.layers.1.mlp.router.expert_bias"].dtype == torch.float32
    assert read_json(tmp_path / "half/config.json")["dtype"] == "bfloat16"
