"""Where the parts of a model lie in a Megatron checkpoint: names, tensor, pipeline and expert ranks, padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from posttrain.convert.families import Shape, by_group
from posttrain.convert.pieces import Part, Piece, Span, Stored, stacked
from posttrain.core.errors import CheckpointError, UsageError

CORE = {  # module: parts, how tensor ranks share it
    "input_layernorm": ("input_norm", "copy"),
    "self_attention.linear_qkv": ("q k v", "groups"),
    "self_attention.q_layernorm": ("q_norm", "copy"),
    "self_attention.k_layernorm": ("k_norm", "copy"),
    "self_attention.linear_q_proj": ("q", "rows"),  # this and the next five: multi-latent attention
    "self_attention.linear_q_down_proj": ("q_down", "copy"),
    "self_attention.q_layernorm ": ("q_rank_norm", "copy"),
    "self_attention.linear_q_up_proj": ("q_up", "rows"),
    "self_attention.linear_kv_down_proj": ("kv_down", "copy"),
    "self_attention.kv_layernorm": ("kv_rank_norm", "copy"),
    "self_attention.linear_kv_up_proj": ("kv_up", "rows"),
    "self_attention.linear_proj": ("o", "columns"),
    "post_attn_norm": ("attention_out_norm", "copy"),
    "pre_mlp_layernorm": ("mlp_norm", "copy"),
    "mlp.linear_fc1": ("gate up", "rows"),
    "mlp.linear_fc2": ("down", "columns"),
    "mlp.router": ("router", "copy"),
    "mlp.router.expert_bias": ("router_bias", "copy"),
    "mlp.experts.local_experts.{e}.linear_fc1": ("expert.{e}.gate expert.{e}.up", "rows"),
    "mlp.experts.local_experts.{e}.linear_fc2": ("expert.{e}.down", "columns"),
    "mlp.shared_experts.gate_weight": ("shared_gate", "copy"),
    "mlp.shared_experts.linear_fc1": ("shared.gate shared.up", "rows"),
    "mlp.shared_experts.linear_fc2": ("shared.down", "columns"),
    "post_mlp_layernorm": ("mlp_out_norm", "copy"),
}
PREDICTOR = (
    ("enorm", "embed_norm", "copy"),
    ("hnorm", "hidden_norm", "copy"),
    ("eh_proj", "join", "rows"),
    ("final_layernorm", "predictor_norm", "copy"),
)
LEGACY = (
    ("input_layernorm", "input_norm"),
    ("pre_mlp_layernorm", "post_attention_norm"),
    ("self_attention.linear_qkv", "self_attention.query_key_value"),
    ("self_attention.linear_proj", "self_attention.dense"),
    ("mlp.experts.local_experts.", "mlp.local_experts."),
    ("linear_fc1", "dense_h_to_4h"),
    ("linear_fc2", "dense_4h_to_h"),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a checkpoint is cut. Of a Hugging Face folder only the format counts."""

    format: str = "hf"  # hf, mcore or legacy
    tp: int = 1
    pp: int = 1
    ep: int = 1
    layers_per_stage: tuple[int, ...] = ()  # uneven pipeline; empty: even
    layers_per_virtual_stage: int = 0  # interleaved pipeline; 0: none
    noop: tuple[int, ...] = ()  # layers that do nothing, counted with the others
    padded_vocabulary: int = 0  # 0: the model's own size
    experts: str = "single"  # or grouped: one tensor for all experts of a rank
    engine: bool = False  # names of Transformer Engine's layers

    def as_json(self) -> dict[str, Any]:
        """As the manifest keeps it."""
        return asdict(self)


def layout_from_json(values: dict[str, Any]) -> Layout:
    """What `as_json` wrote."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    try:
        return Layout(**fields)
    except TypeError as error:
        raise CheckpointError(f"convert.json: damaged, or of another version: {error}") from error


def check_layout(layout: Layout, shape: Shape) -> None:
    """Refuse what cannot be cut evenly, naming both numbers."""
    total = shape.layers + len(layout.noop)

    def divides(count: int, size: int, what: str, option: str) -> None:
        if size < 1 or count % size:
            raise UsageError(f"{option} {size} does not divide {what} ({count})")

    if shape.mla and layout.format == "legacy":
        raise UsageError("--to legacy: multi-latent attention (DeepSeek) exists in Megatron core only")
    if layout.format == "legacy" and (layout.engine or layout.experts == "grouped"):
        raise UsageError("--to legacy: --engine and --grouped-experts are of Megatron core")
    if layout.engine and layout.experts == "grouped":
        raise UsageError("--engine numbers its experts itself; leave --grouped-experts out")
    divides(shape.heads, layout.tp, "the attention heads", "--tp")
    if not shape.mla and (layout.tp <= shape.groups or layout.format == "legacy"):
        divides(shape.groups, layout.tp, "the key-value heads", "--tp")
    elif not shape.mla and layout.tp % shape.groups:
        raise UsageError(f"--tp {layout.tp} is no multiple of the key-value heads ({shape.groups})")
    for ffn, what in ((shape.ffn, "the feed-forward size"), (shape.expert_ffn, "the experts' feed-forward size")):
        divides(ffn, layout.tp, what, "--tp")
    divides(shape.shared_ffn, layout.tp, "the shared experts' size", "--tp")
    if shape.predictors:
        divides(shape.hidden, layout.tp, "the hidden size", "--tp")
    if layout.ep > 1 and not shape.experts:
        raise UsageError(f"--ep {layout.ep}: the model has no experts")
    divides(shape.experts, layout.ep, "the experts", "--ep")
    if len(set(layout.noop)) < len(layout.noop) or any(not 0 <= layer < total for layer in layout.noop):
        raise UsageError(f"--noop-layers: {layout.noop} are not different layers among 0 to {total - 1}")
    if layout.layers_per_stage and layout.layers_per_virtual_stage:
        raise UsageError("--num-layer-list and --vpp exclude each other")
    if layout.layers_per_stage:
        if len(layout.layers_per_stage) != layout.pp or sum(layout.layers_per_stage) != total:
            listed = ",".join(map(str, layout.layers_per_stage))
            raise UsageError(f"--num-layer-list {listed}: needs --pp ({layout.pp}) numbers whose sum is {total}")
        if min(layout.layers_per_stage) < 1:
            raise UsageError("--num-layer-list: a stage without layers")
    elif layout.layers_per_virtual_stage:
        if layout.pp < 2:
            raise UsageError("--vpp needs --pp 2 or more")
        divides(total, layout.pp * layout.layers_per_virtual_stage, "the layers", "--vpp times --pp")
    else:
        divides(total, layout.pp, "the layers", "--pp")


def chunks(layout: Layout, layers: int) -> list[list[range]]:
    """For every pipeline rank its chunks of layers (one, unless virtual stages are used), noop layers counted."""
    total = layers + len(layout.noop)
    if layout.layers_per_stage:
        ends = [sum(layout.layers_per_stage[: rank + 1]) for rank in range(layout.pp)]
        return [[range(end - count, end)] for end, count in zip(ends, layout.layers_per_stage, strict=True)]
    size = layout.layers_per_virtual_stage or total // layout.pp
    starts = range(0, total, size)
    return [[range(start, start + size) for start in starts[rank :: layout.pp]] for rank in range(layout.pp)]


def rank_folder(layout: Layout, tp: int, pp: int, ep: int) -> str:
    """Megatron's name for the folder of a rank."""
    name = f"mp_rank_{tp:02d}"
    if layout.pp > 1:
        name += f"_{pp:03d}"
    return name + (f"_{ep:03d}" if layout.ep > 1 else "")


class Shards:
    """The stored tensors of one Megatron layout."""

    def __init__(self, layout: Layout, shape: Shape, parts: dict[str, Part], iteration: str) -> None:
        self.layout, self.shape, self.parts, self.iteration = layout, shape, parts, iteration
        self.real = [n for n in range(shape.layers + len(layout.noop)) if n not in layout.noop]

    def file(self, tp: int, pp: int, ep: int) -> str:
        return f"{self.iteration}/{rank_folder(self.layout, tp, pp, ep)}/model_optim_rng.pt"

    def models(self) -> dict[str, list[str]]:
        """Every file and the models in it; where all layers do nothing they are empty, but there."""
        layout = self.layout
        return {
            self.file(tp, pp, ep): [
                f"model{number}" if layout.layers_per_virtual_stage else "model" for number in range(len(stage))
            ]
            for pp, stage in enumerate(chunks(layout, self.shape.layers))
            for ep in range(layout.ep)
            for tp in range(layout.tp)
        }

    def stored(self) -> list[Stored]:
        """All of them, rank by rank."""
        layout, found = self.layout, []
        for pp, stage in enumerate(chunks(layout, self.shape.layers)):
            for ep in range(layout.ep):
                for tp in range(layout.tp):
                    file = self.file(tp, pp, ep)
                    for number, layers in enumerate(stage):
                        key = f"model{number}" if layout.layers_per_virtual_stage else "model"
                        first = pp == 0 and number == 0
                        last = pp == layout.pp - 1 and number == len(stage) - 1
                        found += [self.named(tensor, key) for tensor in self.chunk(file, tp, ep, layers, first, last)]
        return found

    def named(self, tensor: Stored, key: str) -> Stored:
        """With the name that the format has for it; `/` goes into a nested dict."""
        name = tensor.name
        if self.layout.format == "legacy":
            tied = name == "output_layer.weight" and tensor.pieces[0].part == "embed.weight"
            name = "word_embeddings_for_head/weight" if tied else legacy_name(name)
        return replace(tensor, name=f"{key}/{name}")

    def chunk(self, file: str, tp: int, ep: int, layers: range, first: bool, last: bool) -> Iterator[Stored]:
        if first:
            yield self.vocabulary(file, "embedding.word_embeddings.weight", "embed.weight", tp)
            yield from self.module(file, "embedding.word_embeddings.norm", ["embedding_norm"], "copy", tp)
            if "positions.weight" in self.parts:
                yield from self.module(file, "embedding.position_embeddings", ["positions"], "copy", tp)
        for local, layer in enumerate(layers):
            if layer not in self.layout.noop:
                real = self.real.index(layer)
                for tensor in self.layer(file, f"decoder.layers.{local}.", real, tp, ep):
                    if self.layout.engine:
                        dense = self.shape.is_dense(real)
                        tensor = replace(tensor, name=engine_name(tensor.name, self.shape.mla, dense))
                    yield tensor
        if last:
            yield from self.predictors(file, tp, ep, first)
            yield from self.module(file, "decoder.final_layernorm", ["final_norm"], "copy", tp)
            if self.shape.head == "score":
                yield from self.module(file, "rm_head", ["score"], "copy", tp)
            elif "head.weight" in self.parts:
                yield self.vocabulary(file, "output_layer.weight", "head.weight", tp)
                if "head.bias" in self.parts:
                    yield self.vocabulary(file, "output_layer.bias", "head.bias", tp)
            elif not first:  # tied: the last stage needs its own copy
                yield self.vocabulary(file, "output_layer.weight", "embed.weight", tp)

    def predictors(self, file: str, tp: int, ep: int, first: bool) -> Iterator[Stored]:
        """Layers that predict later tokens are on the last stage, which needs the embeddings for them."""
        if self.shape.predictors and not first:
            yield self.vocabulary(file, "embedding.word_embeddings.weight", "embed.weight", tp)
        for number in range(self.shape.predictors):
            prefix, layer = f"mtp.layers.{number}.", self.shape.layers + number
            for module, part, split in PREDICTOR:
                yield from self.module(file, prefix + module, [f"{layer}.{part}"], split, tp)
            for tensor in self.layer(file, f"{prefix}transformer_layer.", layer, tp, ep):
                name = engine_name(tensor.name, self.shape.mla, False) if self.layout.engine else tensor.name
                yield replace(tensor, name=name)

    def layer(self, file: str, prefix: str, layer: int, tp: int, ep: int) -> Iterator[Stored]:
        count = self.shape.experts // self.layout.ep
        mine = range(ep * count, (ep + 1) * count)
        for module, (spec, split) in CORE.items():
            if "{e}" not in module:
                names = [f"{layer}.{word}" for word in spec.split()]
                yield from self.module(file, prefix + module.strip(), names, split, tp)
            elif self.layout.experts == "single" and not self.shape.is_dense(layer):
                for local, expert in enumerate(mine):
                    names = [f"{layer}.{word}" for word in spec.replace("{e}", str(expert)).split()]
                    yield from self.module(file, prefix + module.replace("{e}", str(local)), names, split, tp)
        if self.layout.experts == "grouped" and not self.shape.is_dense(layer):
            yield from self.grouped(file, prefix, layer, mine, tp)

    def module(self, file: str, module: str, names: list[str], split: str, tp: int) -> Iterator[Stored]:
        """Weight and bias of a module, as far as the model has them."""
        for kind in ("weight", "bias"):
            full = [f"{name}.{kind}" for name in names if f"{name}.{kind}" in self.parts]  # GPT-2 has no gate
            if not full or (split == "groups" and len(full) < 3):  # queries alone: multi-latent attention
                continue
            if module.endswith("linear_q_proj") and full[0].replace(".q.", ".k.") in self.parts:
                continue
            name = module if names[0].endswith(("router_bias", "shared_gate")) else f"{module}.{kind}"
            yield stacked(file, name, self.blocks(full, split, tp), self.parts[full[0]].vector)

    def blocks(self, names: list[str], split: str, tp: int) -> Iterator[tuple[str, Span, Span]]:
        """What tensor rank `tp` has of these parts."""
        if split == "groups":
            groups = self.shape.groups
            height = sum(self.parts[name].rows for name in names)
            yield from cut(by_group(names, self.parts, 0, groups, groups), *share(height, tp, self.layout.tp))
            return
        for name in names:
            part = self.parts[name]
            rows, columns = (0, part.rows), (0, part.columns)
            if split == "rows":
                rows = share(part.rows, tp, self.layout.tp)
            elif split == "columns" and not part.vector:  # a bias behind the sum over ranks is on all of them
                columns = share(part.columns, tp, self.layout.tp)
            yield name, rows, columns

    def vocabulary(self, file: str, name: str, part_name: str, tp: int) -> Stored:
        """A rank's rows of an embedding or of the head; beyond the vocabulary the last row is repeated."""
        part = self.parts[part_name]
        padded = self.layout.padded_vocabulary or part.rows
        start, end = share(padded, tp, self.layout.tp)
        columns, height = (0, part.columns), end - start
        pieces, real = [], max(0, min(end, part.rows) - start)
        if real:
            pieces.append(Piece(part_name, (start, start + real), columns, (0, 0)))
        if real < height:
            last = (part.rows - 1, part.rows)
            pieces.append(Piece(part_name, last, columns, (real, 0), repeat=height - real))
        area = (height, part.columns)
        return Stored(file, name, (height,) if part.vector else area, area, tuple(pieces))

    def grouped(self, file: str, prefix: str, layer: int, mine: range, tp: int) -> Iterator[Stored]:
        """weight1 is [experts, hidden, 2 ffn] and weight2 [experts, ffn, hidden] in memory, both shown as matrices."""
        hidden = self.shape.hidden
        start, end = share(self.shape.expert_ffn, tp, self.layout.tp)
        ffn = end - start
        first, second = [], []
        for local, expert in enumerate(mine):
            gate, up, down = (f"{layer}.expert.{expert}.{name}.weight" for name in ("gate", "up", "down"))
            first.append(Piece(gate, (start, end), (0, hidden), (local * hidden, 0), transposed=True))
            first.append(Piece(up, (start, end), (0, hidden), (local * hidden, ffn), transposed=True))
            second.append(Piece(down, (0, hidden), (start, end), (local * ffn, 0), transposed=True))
        count = len(mine)
        shape, area = (hidden, count * 2 * ffn), (count * hidden, 2 * ffn)
        yield Stored(file, f"{prefix}mlp.experts.weight1", shape, area, tuple(first))
        shape = (count * ffn, hidden)
        yield Stored(file, f"{prefix}mlp.experts.weight2", shape, shape, tuple(second))


def cut(blocks: Iterable[tuple[str, Span, Span]], start: int, end: int) -> Iterator[tuple[str, Span, Span]]:
    """What lies between two rows of blocks that stand one below the other.

    More ranks than groups: a group's queries, key and value are cut anywhere, and Megatron gathers them to compute.
    """
    below = 0
    for part, rows, columns in blocks:
        first, last = max(start - below, 0), min(end - below, rows[1] - rows[0])
        if first < last:
            yield part, (rows[0] + first, rows[0] + last), columns
        below += rows[1] - rows[0]


def share(size: int, rank: int, ranks: int) -> Span:
    """A rank's rows of `size`."""
    if size % ranks:
        raise UsageError(f"{size} rows cannot be shared by {ranks} tensor ranks")
    each = size // ranks
    return rank * each, (rank + 1) * each


def legacy_name(name: str) -> str:
    """Megatron core's name -> the legacy one, in its nested dicts."""
    if name.startswith("embedding."):
        return "language_model/" + name.replace(".", "/", 2)
    if name.startswith("output_layer."):
        return "language_model/" + name.replace(".", "/")
    if name.startswith("rm_head."):
        return name.replace(".", "/")
    name = name.removeprefix("decoder.").replace("final_layernorm", "final_norm")
    for core, legacy in LEGACY:
        name = name.replace(core, legacy)
    return "language_model/encoder/" + name


def engine_name(name: str, mla: bool, dense: bool) -> str:
    """Megatron core's own layers' name -> that of Transformer Engine's layers."""
    prefix, found, rest = name.rpartition(".local_experts.")
    if found:
        number, module, kind = rest.split(".")
        return f"{prefix}.{module}.{kind}{number}"
    if mla:
        name = name.replace("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_")
        name = name.replace("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_")
    else:
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_") if dense else name
