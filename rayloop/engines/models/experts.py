"""The tensors of a mixture of experts: one for all experts of a layer in the model, another layout in its checkpoint."""

from torch import Tensor

FUSED = (".experts.gate_up_proj", ".experts.down_proj")
"""How the names end of the tensors that hold all experts of a layer: [experts, out, in]."""


def as_saved(layout: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensor under the names of the checkpoint, as views of it. ``layout``: of the family (``ModelFamily.experts``)."""
    if not layout or not name.endswith(FUSED):
        return {name: tensor}
    if layout == "transposed":
        return {name: tensor.transpose(1, 2)}
    experts, _, kind = name.rpartition(".")
    parts = kind.replace("gate_up", "gate up").replace("_proj", "").split()
    return {
        f"{experts}.{number}.{part}_proj.weight": view
        for number, expert in enumerate(tensor)
        for part, view in zip(parts, expert.chunk(len(parts)), strict=True)
    }
