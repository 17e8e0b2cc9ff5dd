"""torch.compile for the layers of a model: one graph serves all layers and all shapes of micro-batches.

The embeddings, the masks, the head and the loss are not compiled. Their shapes depend on the number of learned tokens,
and their code on the method. Passes without gradient and sampling are not compiled either (``forward.evaluating``).
"""

from __future__ import annotations

from torch import nn

from burnish.errors import UserError
from burnish.models.forward import layers_of, unwrap


def compile_layers(model: nn.Module, backend: str | None = None, mode: str | None = None) -> None:
    """Compile each layer of a transformers model in place. Its parameters keep their names.

    Args:
        model: the model, with or without an adapter.
        backend: a backend of torch.compile. None means inductor.
        mode: a mode of torch.compile.

    Raises:
        UserError: if the model does not name its layers.
    """
    layers = layers_of(model)
    if not layers:
        raise UserError(
            f"torch_compile: {type(unwrap(model)).__name__} does not name its layers (_no_split_modules): remove it"
        )
    for layer in layers:
        layer.compile(backend=backend or "inductor", mode=mode, dynamic=True)
