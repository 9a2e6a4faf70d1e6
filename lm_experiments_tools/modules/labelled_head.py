"""Output heads that compute logits at labelled positions only, to save time and memory.

BERT predicts 15 % of its tokens, and the output layer is a quarter to a half of a step. The hidden states of labelled
tokens are selected between model and head. `pick_labelled` checks that a head works on each token by itself.

    model(input_ids, labels [B, L])                                           logits [B, L, V]
    model(input_ids, labels [1, n], label_positions [n])                      logits [1, n, V]

Shapes: B sequences, L tokens, V words, and n labelled tokens of the batch. The position of token l in sequence b is b
* L + l. n is the same in each step; surplus positions have the label -100.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.modules.inspection import evaluated, forward_names

LABEL_POSITIONS = "label_positions"
_ROWS = 2  # that a head is tried on
_TOLERANCE = 1e-5  # of the largest value: sums in another order
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)  # of a user's forward


def _pick_positions(model: nn.Module, head: nn.Module) -> list[RemovableHandle]:
    """Add hooks that pass `label_positions` from the model's call to its head."""
    positions: list[Tensor] = []

    def take(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        positions[:] = [kwargs[LABEL_POSITIONS]] if kwargs.get(LABEL_POSITIONS) is not None else []
        return args, {name: value for name, value in kwargs.items() if name != LABEL_POSITIONS}

    def pick(head: nn.Module, args: tuple) -> tuple:
        if not positions:
            return args
        hidden, *others = args
        return (hidden.flatten(0, 1)[positions[0]][None], *others)

    return [
        model.register_forward_pre_hook(take, with_kwargs=True),
        head.register_forward_pre_hook(pick),
        model.register_forward_hook(lambda *_: positions.clear()),
    ]


def pick_labelled(model: nn.Module, length: int, *, tried: bool = True) -> str | None:
    """Make a model compute logits at labelled positions only: it accepts the argument `label_positions` afterwards.

    Returns None, or the reason if the model cannot do so. Then the model is unchanged.

    Args:
        length: tokens of the test inputs; some models choose their attention by the first input.
        tried: test that loss and logits equal those of an ordinary call; False for weights without values (meta
            device).
    """
    if getattr(getattr(model, "config", None), "sparse_prediction", False):
        return "it selects them itself (sparse_prediction in its configuration)"
    try:
        with evaluated(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return _pick_if_equal(model, length, tried)
    except _FAILURES as error:
        return f"its forward fails with labels of a few tokens ({type(error).__name__})"


def _pick_if_equal(model: nn.Module, length: int, tried: bool) -> str | None:
    device, vocab_size = next(model.parameters()).device, model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size // 2, vocab_size, (_ROWS, length), generator=generator).to(device)
    chosen = torch.tensor([2 * length - 2, 1, 2, length + 1], device=device)  # not in order
    labels = torch.full_like(ids, IGNORED_LABEL)
    labels.view(-1)[chosen] = ids.view(-1)[chosen]
    inputs = {"input_ids": ids}
    if "next_sentence_label" in forward_names(model):
        inputs["next_sentence_label"] = torch.arange(_ROWS, device=device)
    head, expected = _call_head(model, {**inputs, "labels": labels})
    if head is None:
        return "no module of its head takes the last hidden states of its base model"
    if any(isinstance(module, _NormBase) for module in head.modules()):
        return "its head has a norm over tokens"
    handles, is_equal = _pick_positions(model, head), False
    try:
        positions = torch.cat([chosen, chosen.new_zeros(1)])  # the last has no label, as in most batches
        found = model(**inputs, labels=labels.view(-1)[positions][None], **{LABEL_POSITIONS: positions})
        is_equal = not tried or _is_same(found, expected, positions)
    finally:
        for handle in handles if not is_equal else ():
            handle.remove()
    return None if is_equal else "its head's scores of a token depend on other tokens"


def _call_head(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[nn.Module | None, Mapping[str, Any]]:
    """The outermost module outside of the base model that is called with its hidden states; the model's outputs."""
    base, hidden, heads = getattr(model, "base_model", model), [], []
    beyond = set(model.modules()) - set(base.modules()) - {model}

    def note_hidden(module: nn.Module, args: Any, output: Any) -> None:
        hidden.append(output[0])

    def note_head(module: nn.Module, args: tuple) -> None:
        if hidden and args and args[0] is hidden[-1]:
            heads.append(module)

    handles = [base.register_forward_hook(note_hidden)] if base is not model else []
    handles += [module.register_forward_pre_hook(note_head) for module in beyond]
    try:
        outputs = model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    is_of_tokens = bool(heads) and hidden[-1].shape[:2] == inputs["input_ids"].shape
    return (heads[0] if is_of_tokens else None), outputs


def _is_same(found: Mapping[str, Any], outputs: Mapping[str, Any], positions: Tensor) -> bool:
    """True if scores were selected, and everything else is as without selection."""
    picked = 0
    for name, expected in outputs.items():
        if not isinstance(expected, Tensor):
            continue
        if found[name].shape != expected.shape:
            if found[name].shape[:2] != (1, len(positions)):
                return False
            expected = expected.flatten(0, 1)[positions][None]
            picked += int(not torch.equal(expected[0, 0], expected[0, 1]))
        if not (found[name] - expected).abs().max() <= _TOLERANCE * expected.abs().max():
            return False
    return picked > 0


def spread_labels(tokens: int, probability: float) -> int:
    """Bound the number of masked tokens in a batch: six standard deviations above the mean.

    Args:
        tokens: number of tokens in the batch.
        probability: probability that a token is masked.
    """
    mean = tokens * probability
    return math.ceil(mean + 6 * math.sqrt(mean * (1 - probability)))
