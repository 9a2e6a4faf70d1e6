"""BERT against transformers': weights go either way, and forward, loss and every gradient agree in float64."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

import modeling_bert
from modeling_bert import BertConfig

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 37,
    "max_position_embeddings": 40, "initializer_range": 0.2,
}  # fmt: skip
PLACES = {"start_positions": torch.tensor([3, 0, 60]), "end_positions": torch.tensor([4, 2, 60])}
WORDS = torch.tensor([[5, -100, 7, -100, -100, -100, -100], [-100, 98, -100, -100, 3, -100, -100], [-100] * 7])
PAIRS = torch.tensor([0, 1, 1])
NUMBERS = torch.linspace(-1, 1, 3, dtype=torch.float64)
CASES = {
    "BertModel": ({}, {}),
    "BertForPreTraining": ({}, {"labels": WORDS, "next_sentence_label": PAIRS}),
    "BertForMaskedLM": ({}, {"labels": WORDS}),
    "BertForMaskedLM untied": ({"tie_word_embeddings": False}, {"labels": WORDS}),
    "BertForSequenceClassification regression": ({"num_labels": 1}, {"labels": NUMBERS}),
    "BertForSequenceClassification numbers": (
        {"num_labels": 2, "problem_type": "regression"}, {"labels": torch.stack([NUMBERS, -NUMBERS], dim=1)}
    ),
    "BertForSequenceClassification single": ({"num_labels": 5}, {"labels": torch.tensor([4, 0, 2])}),
    "BertForSequenceClassification multi": (
        {"num_labels": 4}, {"labels": torch.tensor([[1.0, 0, 0, 1]] * 3, dtype=torch.float64)}
    ),
    "BertForTokenClassification": ({"num_labels": 6}, {"labels": WORDS.clamp(max=5)}),
    "BertForQuestionAnswering": ({}, PLACES),
    "BertForQuestionAnswering in a bigger batch": ({}, {name: places[:, None] for name, places in PLACES.items()}),
    "BertForMaskedLM gelu_new": (
        {"hidden_act": "gelu_new", "chunk_size_feed_forward": 2}, {"labels": WORDS[:, :6].contiguous()}
    ),
}  # fmt: skip


def pair(case, attention, **more):
    """(ours, theirs, labels) with the same weights, in float64."""
    settings, labels = CASES[case]
    settings = {**SIZES, **settings, **more}
    name = case.partition(" ")[0]
    torch.manual_seed(len(case))
    theirs = getattr(transformers, name)(transformers.BertConfig(**settings, attn_implementation=attention))
    ours = getattr(modeling_bert, name)(BertConfig(**settings, attn_implementation=attention))
    ours.load_state_dict(theirs.state_dict())  # strict: no key more, no key less
    theirs.load_state_dict(ours.state_dict())
    return ours.double().eval(), theirs.double().eval(), labels


def batch(length=7, padding=True):
    """Rows of 7, 5 and 1 tokens with a second sentence in the first two."""
    ids = torch.randint(1, 99, (3, length), generator=torch.Generator().manual_seed(1))
    types = (torch.arange(length) > 2).long().expand(3, -1)
    if not padding:
        return {"input_ids": ids}
    mask = (torch.arange(length) < torch.tensor([[length], [5], [1]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": types * mask}


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_forward_loss_and_every_gradient_are_those_of_transformers(case, attention):
    ours, theirs, labels = pair(case, attention)
    inputs = batch(6 if "chunk_size_feed_forward" in CASES[case][0] else 7)
    found, expected = ours(**inputs, **labels), theirs(**inputs, **labels)
    for name, value in expected.items():
        close(found[name], value)
    for outputs in (found, expected):
        (outputs.loss if "loss" in outputs else outputs.pooler_output.sum()).backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert gradients.keys() == {name for name, _ in theirs.named_parameters()}
    for name, parameter in theirs.named_parameters():
        close(gradients[name], parameter.grad)


@pytest.mark.parametrize("padding", [True, False])
def test_hidden_states_and_attentions_are_those_of_transformers(padding):
    ours, theirs, _ = pair("BertForPreTraining", "eager")
    found, expected = (
        model(**batch(padding=padding), output_hidden_states=True, output_attentions=True) for model in (ours, theirs)
    )
    assert found.keys() == expected.keys()
    assert len(found.hidden_states) == 4 and len(found.attentions) == 3
    for name in ("hidden_states", "attentions"):
        close(found[name], expected[name])


def test_weights_of_attention_are_also_had_where_they_are_not_kept():
    ours, theirs, _ = pair("BertModel", "sdpa")
    theirs.set_attn_implementation("eager")
    found = ours(**batch(), output_attentions=True)
    close(found.attentions, theirs(**batch(), output_attentions=True).attentions)
    close(found.last_hidden_state, ours(**batch()).last_hidden_state)


def test_positions_and_embeddings_may_be_given():
    ours, theirs, _ = pair("BertModel", "sdpa")
    places = torch.arange(7).flip(0)[None] + 30
    embedded = torch.randn(3, 7, 32, dtype=torch.float64)
    for inputs in ({**batch(), "position_ids": places}, {"inputs_embeds": embedded}):
        close(ours(**inputs).last_hidden_state, theirs(**inputs).last_hidden_state)


def test_each_loads_what_the_other_saved(tmp_path):
    ours, theirs, labels = pair("BertForPreTraining", "sdpa")
    expected = theirs(**batch(), **labels).loss
    for model, loader, folder in ((ours, type(theirs), "ours"), (theirs, type(ours), "theirs")):
        model.save_pretrained(tmp_path / folder)
        loaded, report = loader.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report.values()), report
        assert type(loaded.config) is loader.config_class
        close(loaded.eval()(**batch(), **labels).loss, expected)
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == (
        load_file(tmp_path / "theirs" / "model.safetensors").keys()
    )


def test_dropout_falls_where_transformers_has_it():
    ours, theirs, labels = pair(
        "BertForPreTraining", "eager", attention_probs_dropout_prob=0.3, classifier_dropout=0.2
    )
    losses = []
    for model in (ours, theirs):
        torch.manual_seed(3)
        losses.append(model.train()(**batch(), **labels).loss)
    close(*losses)
    assert abs(losses[0] - ours.eval()(**batch(), **labels).loss) > 1e-3


@pytest.mark.parametrize("left_out", ["labels", "next_sentence_label"])
def test_parts_of_the_loss_are_apart_and_one_may_be_left_out(left_out):
    ours, _, labels = pair("BertForPreTraining", "sdpa")
    both = ours(**batch(), **labels)
    close(both.loss, both.loss_mlm + both.loss_nsp)
    one = ours(**batch(), **{name: value for name, value in labels.items() if name != left_out})
    kept = "loss_nsp" if left_out == "labels" else "loss_mlm"
    assert torch.equal(one.loss, both[kept]) and torch.equal(one[kept], both[kept])
    assert ours(**batch()).loss is None
