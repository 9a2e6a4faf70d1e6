"""What an optimizer keeps for the weights that are trained, by its name: bytes; no torch."""

from __future__ import annotations

from typing import NamedTuple

from lm_experiments_tools.planning.shapes import Model

# Values of float32 for each trained one.
_MOMENTS = {
    **dict.fromkeys(("AdamW", "Adam", "AdamWScale", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop"), 2),
    **dict.fromkeys(("FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb"), 2),
    **dict.fromkeys(("Adagrad", "FusedAdagrad", "RMSprop", "FusedNovoGrad", "Lion"), 1),
}
_EIGHT_BITS = {"AdamW8bit": 2, "Adam8bit": 2, "PagedAdamW8bit": 2, "Lion8bit": 1, "RMSprop8bit": 1, "Adagrad8bit": 1}
_FUSED = ("AdamW", "Adam", "SGD", "Adagrad", "AdamWScale", "FusedAdam", "FusedSGD")


class State(NamedTuple):
    """Bytes, and the reason."""

    size: float
    update: float  # beside, while weights are updated
    why: str


def state_of(name: str, model: Model, trained: int, *, momentum: bool = False, beta1: bool = False) -> State:
    """State of the optimizer for `trained` of the model's parameters, float32.

    Args:
        name: as `--optimizer` takes it; of module:Class the class decides.
        momentum: SGD has one.
        beta1: Adafactor has a first moment.
    """
    name = name.replace(".", ":").rsplit(":", 1)[-1]
    share = trained / model.parameters()
    matrices = [(number, rows, columns) for number, rows, columns in model.matrices() if number * rows * columns]
    largest = max(rows * columns for _, rows, columns in matrices) * 4 * (share == 1)
    if name in ("SGD", "FusedSGD"):
        return State(4 * trained * momentum, 0, "a momentum, 4 N" if momentum else "none without momentum")
    if name == "Adafactor":
        sums = 4 * share * sum(number * (rows + columns) for number, rows, columns in matrices)
        first = 4 * trained if beta1 else 0
        # of vectors their second moment; our class keeps room for the largest matrix on a CPU
        return State(sums + first + largest, 0, "sums of rows and columns of each matrix, and room for the largest")
    if name == "Muon":
        hidden = min(trained, share * (model.parameters() - (1 if model.tied else 2) * model.table))
        return State(4 * hidden + 8 * (trained - hidden), 4 * hidden, "4 N of hidden matrices, 8 N of the others")
    if name in _EIGHT_BITS:
        moments = _EIGHT_BITS[name]
        return State(moments * trained * (1 + 4 / 256), 0, f"{moments} bytes for each parameter, a scale for 256")
    moments = _MOMENTS.get(name)
    update = 0 if name in _FUSED else 2 * largest
    if moments is None:
        return State(8 * trained, update, f"unknown {name}: two moments assumed, 8 N")
    return State(4 * moments * trained, update, f"{moments} moment{'s' * (moments > 1)} in float32: {4 * moments} N")
