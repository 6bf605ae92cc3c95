"""Describe where a Megatron checkpoint stores each parameter: names, tensor, pipeline and expert ranks, padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from posttrain.convert.parameters import ModelShape
from posttrain.convert.stored_tensors import (
    ParameterBlock,
    ParameterShape,
    Region,
    Span,
    StoredTensor,
    group_regions,
    stacked,
)
from posttrain.core.errors import CheckpointError, UsageError

# Megatron's module, the parameters it holds, and how tensor ranks divide them: `copy` (replicated), `rows`, `columns`,
# or `groups` (rows in the order of key-value groups).
CORE = (
    ("input_layernorm", "input_norm", "copy"),
    ("self_attention.linear_qkv", "q k v", "groups"),
    ("self_attention.q_layernorm", "q_norm", "copy"),
    ("self_attention.k_layernorm", "k_norm", "copy"),
    ("self_attention.linear_q_proj", "q", "rows"),  # from here to linear_kv_up_proj: multi-latent attention
    ("self_attention.linear_q_down_proj", "q_down", "copy"),
    ("self_attention.q_layernorm", "q_rank_norm", "copy"),
    ("self_attention.linear_q_up_proj", "q_up", "rows"),
    ("self_attention.linear_kv_down_proj", "kv_down", "copy"),
    ("self_attention.kv_layernorm", "kv_rank_norm", "copy"),
    ("self_attention.linear_kv_up_proj", "kv_up", "rows"),
    ("self_attention.linear_proj", "o", "columns"),
    ("post_attn_norm", "attention_out_norm", "copy"),
    ("pre_mlp_layernorm", "mlp_norm", "copy"),
    ("mlp.linear_fc1", "gate up", "rows"),
    ("mlp.linear_fc2", "down", "columns"),
    ("mlp.router", "router", "copy"),
    ("mlp.router.expert_bias", "router_bias", "copy"),
    ("mlp.experts.local_experts.{e}.linear_fc1", "expert.{e}.gate expert.{e}.up", "rows"),
    ("mlp.experts.local_experts.{e}.linear_fc2", "expert.{e}.down", "columns"),
    ("mlp.shared_experts.gate_weight", "shared_gate", "copy"),
    ("mlp.shared_experts.linear_fc1", "shared.gate shared.up", "rows"),
    ("mlp.shared_experts.linear_fc2", "shared.down", "columns"),
    ("post_mlp_layernorm", "mlp_out_norm", "copy"),
)
MTP = (  # of a multi-token-prediction layer, besides those of a decoder layer
    ("enorm", "embed_norm", "copy"),
    ("hnorm", "hidden_norm", "copy"),
    ("eh_proj", "join", "rows"),
    ("final_layernorm", "predictor_norm", "copy"),
)
LEGACY = (  # parts of names: in Megatron core, in the legacy format
    ("input_layernorm", "input_norm"),
    ("pre_mlp_layernorm", "post_attention_norm"),
    ("self_attention.linear_qkv", "self_attention.query_key_value"),
    ("self_attention.linear_proj", "self_attention.dense"),
    ("mlp.experts.local_experts.", "mlp.local_experts."),
    ("linear_fc1", "dense_h_to_4h"),
    ("linear_fc2", "dense_4h_to_h"),
)


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """How a checkpoint is divided over ranks. For a Hugging Face folder only the format matters."""

    format: str = "hf"  # hf, mcore or legacy
    tp: int = 1
    pp: int = 1
    ep: int = 1
    layers_per_stage: tuple[int, ...] = ()  # uneven pipeline; empty: even
    layers_per_virtual_stage: int = 0  # interleaved pipeline; 0: none
    noop: tuple[int, ...] = ()  # positions of no-op layers, counted among all layers
    padded_vocabulary: int = 0  # 0: the model's own size
    experts: str = "single"  # or grouped: one tensor for all experts of a rank
    tp_extend_ep: bool = False  # whole experts are distributed over the tensor ranks, too (MindSpeed)
    engine: bool = False  # names of parameters are those of Transformer Engine's layers

    def as_json(self) -> dict[str, Any]:
        """Return the layout as the manifest stores it."""
        return asdict(self)


def layout_from_json(values: dict[str, Any]) -> CheckpointLayout:
    """Read a layout that `as_json` wrote."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    try:
        return CheckpointLayout(**fields)
    except TypeError as error:
        raise CheckpointError(f"convert.json: damaged or written by another version: {error}") from error


def check_checkpoint_layout(layout: CheckpointLayout, shape: ModelShape) -> None:
    """Refuse layouts that do not divide the model evenly; the message names both numbers."""
    total = shape.layers + len(layout.noop)

    def divides(count: int, size: int, what: str, option: str) -> None:
        if size < 1 or count % size:
            raise UsageError(f"{option} {size} does not divide {what} ({count})")

    if shape.mla and layout.format == "legacy":
        raise UsageError("--target_format legacy: multi-latent attention (DeepSeek) exists in Megatron core only")
    if layout.format == "legacy" and (layout.engine or layout.experts == "grouped"):
        raise UsageError("--transformer_engine and --grouped_experts need Megatron core: --target_format mcore")
    if layout.engine and layout.experts == "grouped":
        raise UsageError("--transformer_engine has its own names for experts; leave out --grouped_experts")
    divides(shape.heads, layout.tp, "the attention heads", "--tensor_parallel_size")
    if not shape.mla and (layout.tp <= shape.groups or layout.format == "legacy"):
        divides(shape.groups, layout.tp, "the key-value heads", "--tensor_parallel_size")
    elif not shape.mla and layout.tp % shape.groups:
        raise UsageError(
            f"--tensor_parallel_size {layout.tp} is not a multiple of the number of key-value heads ({shape.groups})"
        )
    divides(shape.ffn, layout.tp, "the feed-forward size", "--tensor_parallel_size")
    if not layout.tp_extend_ep:
        divides(shape.expert_ffn, layout.tp, "the experts' feed-forward size", "--tensor_parallel_size")
    divides(shape.shared_ffn, layout.tp, "the shared experts' feed-forward size", "--tensor_parallel_size")
    if shape.mtp_layers:
        divides(shape.hidden, layout.tp, "the hidden size", "--tensor_parallel_size")
    if layout.ep > 1 and not shape.experts:
        raise UsageError(f"--expert_parallel_size {layout.ep}: the model has no experts")
    if layout.tp_extend_ep and not shape.experts:
        raise UsageError("--tp_extend_ep: the model has no experts")
    if layout.tp_extend_ep:
        product = "--expert_parallel_size times --tensor_parallel_size"
        divides(shape.experts, layout.ep * layout.tp, "the experts", product)
    divides(shape.experts, layout.ep, "the experts", "--expert_parallel_size")
    if len(set(layout.noop)) < len(layout.noop) or any(not 0 <= layer < total for layer in layout.noop):
        raise UsageError(f"--noop_layers: {layout.noop} must be distinct layers from 0 to {total - 1}")
    if layout.layers_per_stage and layout.layers_per_virtual_stage:
        raise UsageError("--layers_per_stage and --layers_per_virtual_stage cannot be combined")
    if layout.layers_per_stage:
        if len(layout.layers_per_stage) != layout.pp or sum(layout.layers_per_stage) != total:
            listed = ",".join(map(str, layout.layers_per_stage))
            raise UsageError(
                f"--layers_per_stage {listed} needs {layout.pp} numbers (--pipeline_parallel_size) whose sum is {total}"
            )
        if min(layout.layers_per_stage) < 1:
            raise UsageError("--layers_per_stage: every stage needs at least one layer")
    elif layout.layers_per_virtual_stage:
        if layout.pp < 2:
            raise UsageError("--layers_per_virtual_stage needs --pipeline_parallel_size 2 or more")
        product = "--layers_per_virtual_stage times --pipeline_parallel_size"
        divides(total, layout.pp * layout.layers_per_virtual_stage, "the layers", product)
    else:
        divides(total, layout.pp, "the layers", "--pipeline_parallel_size")


def stage_layers(layout: CheckpointLayout, layers: int) -> list[list[range]]:
    """Return the layers of every pipeline rank, one range per virtual stage; noop layers are counted."""
    total = layers + len(layout.noop)
    if layout.layers_per_stage:
        ends = [sum(layout.layers_per_stage[: rank + 1]) for rank in range(layout.pp)]
        return [[range(end - count, end)] for end, count in zip(ends, layout.layers_per_stage, strict=True)]
    size = layout.layers_per_virtual_stage or total // layout.pp
    starts = range(0, total, size)
    return [[range(start, start + size) for start in starts[rank :: layout.pp]] for rank in range(layout.pp)]


def rank_folder(layout: CheckpointLayout, tp: int, pp: int, ep: int) -> str:
    """Return Megatron's name for the folder of a rank."""
    name = f"mp_rank_{tp:02d}"
    if layout.pp > 1:
        name += f"_{pp:03d}"
    return name + (f"_{ep:03d}" if layout.ep > 1 else "")


class MegatronShards:
    """Lists the stored tensors of one Megatron layout."""

    def __init__(
        self, layout: CheckpointLayout, shape: ModelShape, parameters: dict[str, ParameterShape], iteration: str
    ) -> None:
        self.layout, self.shape, self.parameters, self.iteration = layout, shape, parameters, iteration
        self.real = [n for n in range(shape.layers + len(layout.noop)) if n not in layout.noop]  # layers with weights

    def file(self, tp: int, pp: int, ep: int) -> str:
        return f"{self.iteration}/{rank_folder(self.layout, tp, pp, ep)}/model_optim_rng.pt"

    def models(self) -> dict[str, list[str]]:
        """Return every file with its model keys, which exist even where all layers are no-ops."""
        layout = self.layout
        return {
            self.file(tp, pp, ep): [
                f"model{number}" if layout.layers_per_virtual_stage else "model" for number in range(len(stage))
            ]
            for pp, stage in enumerate(stage_layers(layout, self.shape.layers))
            for ep in range(layout.ep)
            for tp in range(layout.tp)
        }

    def stored(self) -> list[StoredTensor]:
        """Return all stored tensors, rank by rank."""
        layout, found = self.layout, []
        for pp, stage in enumerate(stage_layers(layout, self.shape.layers)):
            for ep in range(layout.ep):
                for tp in range(layout.tp):
                    file = self.file(tp, pp, ep)
                    for number, layers in enumerate(stage):
                        key = f"model{number}" if layout.layers_per_virtual_stage else "model"
                        first = pp == 0 and number == 0
                        last = pp == layout.pp - 1 and number == len(stage) - 1
                        found += [self.renamed(tensor, key) for tensor in self.chunk(file, tp, ep, layers, first, last)]
        return found

    def renamed(self, tensor: StoredTensor, key: str) -> StoredTensor:
        """Return the tensor under the name of the format; `/` separates nested dicts."""
        name = tensor.name
        if self.layout.format == "legacy":
            tied = name == "output_layer.weight" and tensor.blocks[0].parameter == "embed.weight"
            name = "word_embeddings_for_head/weight" if tied else legacy_name(name)
        return replace(tensor, name=f"{key}/{name}")

    def chunk(self, file: str, tp: int, ep: int, layers: range, first: bool, last: bool) -> Iterator[StoredTensor]:
        """Yield the tensors of one pipeline chunk (a virtual stage) on one rank, under Megatron core's names."""
        if first:
            yield self.vocabulary_tensor(file, "embedding.word_embeddings.weight", "embed.weight", tp)
            yield from self.module(file, "embedding.word_embeddings.norm", ["embedding_norm"], "copy", tp)
            if "positions.weight" in self.parameters:
                yield from self.module(file, "embedding.position_embeddings", ["positions"], "copy", tp)
        for local, layer in enumerate(layers):
            if layer not in self.layout.noop:
                real = self.real.index(layer)
                for tensor in self.layer(file, f"decoder.layers.{local}.", real, tp, ep):
                    if self.layout.engine:
                        dense = self.shape.is_dense(real)
                        tensor = replace(tensor, name=transformer_engine_name(tensor.name, self.shape.mla, dense))
                    yield tensor
        if last:
            yield from self.mtp_tensors(file, tp, ep, first)
            yield from self.module(file, "decoder.final_layernorm", ["final_norm"], "copy", tp)
            if self.shape.head == "score":
                yield from self.module(file, "rm_head", ["score"], "copy", tp)
            elif "head.weight" in self.parameters:
                yield self.vocabulary_tensor(file, "output_layer.weight", "head.weight", tp)
                if "head.bias" in self.parameters:
                    yield self.vocabulary_tensor(file, "output_layer.bias", "head.bias", tp)
            elif not first:  # tied: the last stage needs its own copy
                yield self.vocabulary_tensor(file, "output_layer.weight", "embed.weight", tp)

    def mtp_tensors(self, file: str, tp: int, ep: int, first: bool) -> Iterator[StoredTensor]:
        """Yield the multi-token-prediction layers, which are on the last stage with a copy of the embeddings."""
        if self.shape.mtp_layers and not first:
            yield self.vocabulary_tensor(file, "embedding.word_embeddings.weight", "embed.weight", tp)
        for number in range(self.shape.mtp_layers):
            prefix, layer = f"mtp.layers.{number}.", self.shape.layers + number
            for module, parameter, split in MTP:
                yield from self.module(file, prefix + module, [f"{layer}.{parameter}"], split, tp)
            for tensor in self.layer(file, f"{prefix}transformer_layer.", layer, tp, ep):
                name = (
                    transformer_engine_name(tensor.name, self.shape.mla, False) if self.layout.engine else tensor.name
                )
                yield replace(tensor, name=name)

    def layer(self, file: str, prefix: str, layer: int, tp: int, ep: int) -> Iterator[StoredTensor]:
        """Yield the tensors of a layer; `layer` is its number in the model, `prefix` its name on this rank."""
        parts, part = self.layout.ep, ep
        if self.layout.tp_extend_ep:
            parts, part = self.layout.ep * self.layout.tp, ep * self.layout.tp + tp
        count = self.shape.experts // parts
        mine = range(part * count, (part + 1) * count)
        for module, spec, split in CORE:
            if "{e}" not in module:
                names = [f"{layer}.{word}" for word in spec.split()]
                yield from self.module(file, prefix + module, names, split, tp)
            elif self.layout.experts == "single" and not self.shape.is_dense(layer):
                for local, expert in enumerate(mine):
                    names = [f"{layer}.{word}" for word in spec.replace("{e}", str(expert)).split()]
                    divided = "copy" if self.layout.tp_extend_ep else split
                    yield from self.module(file, prefix + module.replace("{e}", str(local)), names, divided, tp)
        if self.layout.experts == "grouped" and not self.shape.is_dense(layer):
            yield from self.grouped_experts(file, prefix, layer, mine, tp)

    def module(self, file: str, module: str, names: list[str], split: str, tp: int) -> Iterator[StoredTensor]:
        """Yield weight and bias of a module, as far as the model has them."""
        for kind in ("weight", "bias"):
            full = [f"{name}.{kind}" for name in names if f"{name}.{kind}" in self.parameters]  # GPT-2 has no gate
            if not full or (split == "groups" and len(full) < 3):  # queries alone: multi-latent attention
                continue
            if module.endswith("linear_q_proj") and full[0].replace(".q.", ".k.") in self.parameters:
                continue
            name = module if names[0].endswith(("router_bias", "shared_gate")) else f"{module}.{kind}"
            yield stacked(file, name, self.regions(full, split, tp), self.parameters[full[0]].vector)

    def regions(self, names: list[str], split: str, tp: int) -> Iterator[Region]:
        """Yield the regions of these parameters that tensor rank `tp` stores."""
        if split == "groups":
            groups = self.shape.groups
            height = sum(self.parameters[name].rows for name in names)
            yield from slice_rows(
                group_regions(names, self.parameters, 0, groups, groups), *rank_rows(height, tp, self.layout.tp)
            )
            return
        for name in names:
            parameter = self.parameters[name]
            rows, columns = (0, parameter.rows), (0, parameter.columns)
            if split == "rows":
                rows = rank_rows(parameter.rows, tp, self.layout.tp)
            elif split == "columns" and not parameter.vector:  # a bias is added after the sum over ranks: replicated
                columns = rank_rows(parameter.columns, tp, self.layout.tp)
            yield name, rows, columns

    def vocabulary_tensor(self, file: str, name: str, parameter_name: str, tp: int) -> StoredTensor:
        """Return a rank's rows of an embedding or head; rows beyond the vocabulary repeat the last row."""
        parameter = self.parameters[parameter_name]
        padded = self.layout.padded_vocabulary or parameter.rows
        start, end = rank_rows(padded, tp, self.layout.tp)
        columns, height = (0, parameter.columns), end - start
        blocks, real = [], max(0, min(end, parameter.rows) - start)
        if real:
            blocks.append(ParameterBlock(parameter_name, (start, start + real), columns, (0, 0)))
        if real < height:
            last = (parameter.rows - 1, parameter.rows)
            blocks.append(ParameterBlock(parameter_name, last, columns, (real, 0), repeat=height - real))
        matrix_shape = (height, parameter.columns)
        return StoredTensor(file, name, (height,) if parameter.vector else matrix_shape, matrix_shape, tuple(blocks))

    def grouped_experts(self, file: str, prefix: str, layer: int, mine: range, tp: int) -> Iterator[StoredTensor]:
        """Yield grouped experts: weight1 [experts, hidden, 2 ffn] and weight2 [experts, ffn, hidden], as matrices."""
        hidden = self.shape.hidden
        start, end = 0, self.shape.expert_ffn
        if not self.layout.tp_extend_ep:
            start, end = rank_rows(self.shape.expert_ffn, tp, self.layout.tp)
        ffn = end - start
        first, second = [], []
        for local, expert in enumerate(mine):
            gate, up, down = (f"{layer}.expert.{expert}.{name}.weight" for name in ("gate", "up", "down"))
            first.append(ParameterBlock(gate, (start, end), (0, hidden), (local * hidden, 0), transposed=True))
            first.append(ParameterBlock(up, (start, end), (0, hidden), (local * hidden, ffn), transposed=True))
            second.append(ParameterBlock(down, (0, hidden), (start, end), (local * ffn, 0), transposed=True))
        count = len(mine)
        shape, matrix_shape = (hidden, count * 2 * ffn), (count * hidden, 2 * ffn)
        yield StoredTensor(file, f"{prefix}mlp.experts.weight1", shape, matrix_shape, tuple(first))
        shape = (count * ffn, hidden)
        yield StoredTensor(file, f"{prefix}mlp.experts.weight2", shape, shape, tuple(second))


def slice_rows(regions: Iterable[Region], start: int, end: int) -> Iterator[Region]:
    """Yield the parts of vertically stacked regions between rows `start` and `end`.

    With more ranks than key-value groups, a group's queries, key and value are split anywhere; Megatron gathers them.
    """
    below = 0
    for parameter, rows, columns in regions:
        first, last = max(start - below, 0), min(end - below, rows[1] - rows[0])
        if first < last:
            yield parameter, (rows[0] + first, rows[0] + last), columns
        below += rows[1] - rows[0]


def rank_rows(size: int, rank: int, ranks: int) -> Span:
    """Return the rows of `size` that a rank holds."""
    if size % ranks:
        raise UsageError(f"{size} rows cannot be divided by {ranks} tensor ranks")
    each = size // ranks
    return rank * each, (rank + 1) * each


def legacy_name(name: str) -> str:
    """Translate Megatron core's name to the legacy one, with its nested dicts."""
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


def transformer_engine_name(name: str, mla: bool, dense: bool) -> str:
    """Translate a name of Megatron core's local layers to that of Transformer Engine's layers."""
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
