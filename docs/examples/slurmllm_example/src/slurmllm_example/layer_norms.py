"""A hook that logs the norm of each decoder layer's weights, and of all others together."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

from pydantic import Field
from torch.distributed.tensor import DTensor

from slurmllm.train.hooks import Hook, HookContext, StepEnd


class LayerNorms(Hook):
    """The hook `layer_norms`: `layer_norm/<number>` and `layer_norm/rest`, every so many steps.

    Args:
        context: What slurmllm gives to a hook.
        every: Steps between two measurements.
    """

    backends = ("native",)  # others give no access to the weights

    def __init__(self, context: HookContext, *, every: Annotated[int, Field(gt=0)] = 10) -> None:
        self._context, self._every = context, every

    def reads_model(self, step: int) -> bool:
        return step % self._every == 0

    def after_step(self, end: StepEnd) -> None:
        """Measure the norms if it is time (collective)."""
        step = end.row.step
        if not self.reads_model(step):
            return
        squares: dict[str, float] = defaultdict(float)
        model, mesh = self._context.config.recipe.model, self._context.mesh
        # The first and the last stage of a pipeline both have a tied embedding.
        shared = "embed.weight" if model.tied_embeddings and mesh.pipeline > 1 else None
        for name, parameter in self._context.model().named_parameters():
            section, _, rest = name.partition(".")
            layer = rest.partition(".")[0] if section == "layers" else "rest"
            tensor = parameter.detach()
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            # Divided by the number of workers that have a copy, so that each element counts once.
            copies = _copies(tensor, self._context) * (2 if name == shared else 1)
            squares[layer] += local.double().square().sum().item() / copies
        labels = [*map(str, range(model.num_layers)), "rest"]
        sums = self._context.control.all_reduce([squares[label] for label in labels], "sum")
        norms = {f"layer_norm/{n}": s**0.5 for n, s in zip(labels, sums, strict=True)}
        self._context.write({"step": step, **norms})
        self._context.add_scalars(step, norms)


def _copies(tensor: object, context: HookContext) -> int:
    """Return how many workers of a pipeline stage have the same elements of a tensor."""
    workers = context.mesh.data * context.mesh.tensor
    if not isinstance(tensor, DTensor):
        return workers
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            workers //= tensor.device_mesh.size(axis)
    return workers
