"""Losses of modeling_bert: exact with weights of 16 bits, and 0 where there is nothing to learn."""

import pytest
import torch
import torch.nn.functional as F

import modeling_bert

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 37,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3,
}  # fmt: skip
ROWS, LENGTH = 3, 7
WORDS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 50
NUMBERS = torch.linspace(-2, 2, ROWS * 3).view(ROWS, 3)
WHERE = torch.tensor([1, 4, 6])
# class and labels
CASES = {
    "words and pairs": ("PreTraining", {"labels": WORDS, "next_sentence_label": torch.tensor([0, 1, 1])}),
    "words": ("MaskedLM", {"labels": WORDS}),
    "classes": ("SequenceClassification", {"labels": torch.tensor([0, 2, 1])}),
    "several classes": ("SequenceClassification", {"labels": (NUMBERS > 0).float()}),
    "numbers": ("SequenceClassification", {"labels": NUMBERS}),
    "tokens": ("TokenClassification", {"labels": WORDS % 3}),
    "answers": ("QuestionAnswering", {"start_positions": WHERE, "end_positions": WHERE}),
}


def model_of(name, kind="", **settings):
    torch.manual_seed(0)
    if kind == "numbers":
        settings["problem_type"] = "regression"
    if name == "QuestionAnswering":
        settings["num_labels"] = 2
    return getattr(modeling_bert, f"BertFor{name}")(modeling_bert.BertConfig(**{**SIZES, **settings}))


def definition(kind, outputs, labels):
    """In float64, of the logits that were returned."""
    logits = [x.double() for name, x in outputs.items() if name.endswith("logits")]
    labels = list(labels.values())
    if kind == "numbers":
        return F.mse_loss(logits[0], labels[0].double())
    if kind == "several classes":
        return F.binary_cross_entropy_with_logits(logits[0], labels[0].double())
    losses = [F.cross_entropy(x.flatten(0, -2), y.flatten()) for x, y in zip(logits, labels, strict=True)]
    return sum(losses) / 2 if kind == "answers" else sum(losses)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", CASES)
def test_losses_are_exact_whatever_the_weights_are(kind, dtype):
    name, labels = CASES[kind]
    model = model_of(name, kind).to(dtype)
    outputs = model(WORDS + 1, **labels)
    assert outputs.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(outputs.loss.double(), definition(kind, outputs, labels), rtol=1e-6, atol=1e-6)
    outputs.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["words and pairs", "words", "classes", "tokens", "answers"])
def test_without_a_label_there_is_nothing_to_learn(kind):
    name, labels = CASES[kind]
    nothing = {key: torch.full_like(y, LENGTH if kind == "answers" else -100) for key, y in labels.items()}
    model = model_of(name, kind)
    loss = model(WORDS + 1, **nothing).loss
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())
