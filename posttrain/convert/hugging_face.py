"""List the tensors of a Hugging Face folder as blocks of the model's parameters."""

from __future__ import annotations

from posttrain.convert.families import MTP_COPIES, Config, family_of
from posttrain.convert.parameters import ModelShape
from posttrain.convert.stored_tensors import ParameterShape, StoredTensor, full_span, group_regions, stacked


def hf_stored(
    config: Config, shape: ModelShape, parameters: dict[str, ParameterShape], file: str = "model.safetensors"
) -> list[StoredTensor]:
    """Return the stored tensors of a Hugging Face folder."""
    family = family_of(config)
    found = []

    def add(module: str, spec: str, transposed: bool = False) -> None:
        words = spec.split()
        grouped = words[0] == "grouped"
        names = words[1:] if grouped else words
        for kind in ("weight", "bias"):
            full = [f"{name}.{kind}" for name in names]
            if full[0] not in parameters:
                continue
            vector = parameters[full[0]].vector
            blocks = (
                group_regions(full, parameters, 0, shape.groups, shape.groups)
                if grouped
                else ((name, *full_span(parameters[name])) for name in full)
            )
            name = module if full[0].endswith("router_bias.weight") else f"{module}.{kind}"
            found.append(stacked(file, name, blocks, vector, transposed and not vector))

    prefix = family.prefix
    add(prefix + family.embed, "embed")
    add(prefix + family.embedding_norm, "embedding_norm")
    if family.positions:
        add(prefix + family.positions, "positions")
    for layer in range(shape.layers + shape.mtp_layers):
        names = family.layer | (family.dense if shape.is_dense(layer) else family.experts)
        if layer >= shape.layers:
            names = names | family.mtp
            for module, parameter in MTP_COPIES.items():
                add(f"{prefix}{family.layers}{layer}.{module}", parameter)
        for module, spec in names.items():
            for expert in range(shape.experts) if "{e}" in module else (0,):
                words = spec.replace("{e}", str(expert)).split()
                spec_here = " ".join(word if word == "grouped" else f"{layer}.{word}" for word in words)
                add(
                    f"{prefix}{family.layers}{layer}.{module.replace('{e}', str(expert))}", spec_here, family.transposed
                )
    add(prefix + family.norm, "final_norm")
    add(family.head, "head")
    add("score", "score")
    return found
