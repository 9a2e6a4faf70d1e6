"""Packed rows of BERT: each document has the answers, the loss and the gradients that it has alone."""

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import BaseModelOutputWithPooling

import modeling_bert
from lm_experiments_tools.attention.segments import positions_of, starts_of
from modeling_bert.configuration_bert import POSITIONS
from tests.helpers.packed_rows import packed_rows

SIZES = dict(
    vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, num_labels=3,
    max_position_embeddings=400, initializer_range=0.2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
IMPLEMENTATIONS = ("eager", "sdpa", "block_sparse")


def made(name, position="absolute", **changes):
    torch.manual_seed(1)
    config = modeling_bert.BertConfig(**{**SIZES, **changes}, position_embedding_type=position)
    return getattr(modeling_bert, name)(config)


def theirs(ours):
    """transformers' model of the same weights."""
    kept = {key: getattr(ours.config, key) for key in ("num_labels", "problem_type")}
    model = getattr(transformers, type(ours).__name__)(transformers.BertConfig(**{**SIZES, **kept}))
    model.load_state_dict(ours.state_dict())
    return model.to(ours.dtype).train(ours.training)


def padded(documents):
    """The documents one to a row, as they stand in a padded batch."""
    ids = torch.nn.utils.rnn.pad_sequence([document[0] for *_, document in documents], batch_first=True)
    mask = torch.zeros_like(ids)
    for place, (*_, document) in enumerate(documents):
        mask[place, : document.numel()] = 1
    return {"input_ids": ids, "attention_mask": mask}


def test_the_worked_example():
    segments = torch.tensor([[1, 1, 1, 2, 2, 0]])
    assert positions_of(segments).tolist() == [[0, 1, 2, 0, 1, 0]]
    assert starts_of(segments, 3).tolist() == [[0, 3, 0]]
    assert positions_of(torch.ones(1, 4)).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(("implementation", "is_fast"), [*((name, False) for name in IMPLEMENTATIONS), ("sdpa", True)])
@pytest.mark.parametrize("position", POSITIONS)
@torch.no_grad()
def test_each_document_is_as_alone(position, implementation, is_fast):
    rows, documents = packed_rows()
    model = made("BertModel", position).eval()
    alone_in = theirs(model).eval() if position == "absolute" else model
    model.set_attn_implementation(implementation)
    model.use_fast_step(is_fast)
    outputs = model(**rows)
    for row, number, document in documents:
        alone = alone_in(document)
        states = outputs.last_hidden_state[row, rows["segment_ids"][row] == number]
        torch.testing.assert_close(states, alone.last_hidden_state[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(outputs.pooler_output[row, number - 1], alone.pooler_output[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", ["relative_attention_bias", "rotary", "alibi", "relative_key"])
def test_at_the_end_of_a_long_row(position):
    """So long that "block_sparse" computes a trained bias piece by piece."""
    rows, documents = packed_rows([[720, 90]], padding=0)
    model = made("BertModel", position, max_position_embeddings=900).eval()
    alone = model(documents[1][2]).last_hidden_state[0]
    for implementation in IMPLEMENTATIONS:
        model.set_attn_implementation(implementation)
        states = model(**rows).last_hidden_state[0, 720:]
        torch.testing.assert_close(states, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("problem", ["single_label_classification", "regression", "multi_label_classification"])
def test_loss_and_gradients_of_documents_are_those_of_transformers_padded_batch(problem, implementation):
    rows, documents = packed_rows()
    num_labels = 1 if problem == "regression" else 3
    generator = torch.Generator().manual_seed(2)
    values = {
        "single_label_classification": torch.randint(3, (len(documents),), generator=generator),
        "regression": torch.randn(len(documents), generator=generator).double(),
        "multi_label_classification": torch.randint(2, (len(documents), 3), generator=generator).double(),
    }[problem]
    labels = torch.full((3, 4, *values.shape[1:]), -100, dtype=values.dtype)
    for (row, number, _), value in zip(documents, values, strict=True):
        labels[row, number - 1] = value
    ours = made("BertForSequenceClassification", num_labels=num_labels, problem_type=problem).double().train()
    other = theirs(ours)
    ours.set_attn_implementation(implementation)
    ours.use_fast_step()
    found = ours(**rows, labels=labels)
    expected = other(**padded(documents), labels=values)
    assert found.logits.shape == (3, 4, num_labels)
    compare(found, expected, ours, other)


@pytest.mark.parametrize("position", ["absolute", "relative_attention_bias", "relative_key_query"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_loss_and_gradients_of_masked_words_are_those_of_the_padded_batch(implementation, position):
    rows, documents = packed_rows()
    ours = made("BertForMaskedLM", position).double().train()
    other = theirs(ours) if position == "absolute" else made("BertForMaskedLM", position).double().train()
    ours.set_attn_implementation(implementation)
    ours.use_fast_step()
    labels = rows["input_ids"].masked_fill((rows["input_ids"] % 3 > 0) | (rows["segment_ids"] == 0), -100)
    alone = padded(documents)
    alone_labels = alone["input_ids"].masked_fill((alone["input_ids"] % 3 > 0) | (alone["attention_mask"] == 0), -100)
    compare(ours(**rows, labels=labels), other(**alone, labels=alone_labels), ours, other)


def compare(found, expected, ours, other):
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-10, atol=1e-12)
    found.loss.backward()
    expected.loss.backward()
    own = dict(ours.named_parameters())
    for name, parameter in other.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_both_tasks_of_pre_training():
    rows, documents = packed_rows()
    ours = made("BertForPreTraining").double().eval()
    other = theirs(ours)
    pairs = torch.full((3, 4), -100)
    for row, number, _ in documents:
        pairs[row, number - 1] = number % 2
    found = ours(**rows, next_sentence_label=pairs)
    expected = other(**padded(documents)).seq_relationship_logits
    wanted = cross_entropy(expected, torch.tensor([number % 2 for _, number, _ in documents]))
    torch.testing.assert_close(found.loss_nsp, wanted, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_masked_tokens_of_a_document_are_seen_by_none():
    rows, documents = packed_rows()
    rows["attention_mask"][0, 8] = 0  # the second token of the second document
    mask = torch.tensor([[1, 0, 1, 1]])
    for position in ("absolute", "rotary"):
        model = made("BertModel", position).eval()
        found = model(**rows).last_hidden_state[0, 7:11]
        alone = model(documents[1][2], mask).last_hidden_state[0]
        torch.testing.assert_close(found[mask[0] > 0], alone[mask[0] > 0], rtol=0, atol=1e-5)


def test_what_looks_at_the_whole_row_refuses():
    rows, _ = packed_rows()
    with pytest.raises(ValueError, match="sparse_config_cls='BigBird' lays its blocks over the row"):
        made("BertModel", sparse_config_cls="BigBird", sparse_attention={"block": 16})(**rows)
    with pytest.raises(ValueError, match="give one of the two"):
        made("BertModel")(**{**rows, "attention_mask": torch.ones(3, 25, 25).bool()})
    with pytest.raises(ValueError, match="an answer is looked for in the whole row"):
        made("BertForQuestionAnswering", num_labels=2)(**rows)
    with pytest.raises(ValueError, match=r"labels are \[3\]: those of packed rows are \[batch, documents"):
        made("BertForSequenceClassification")(**rows, labels=torch.zeros(3, dtype=torch.long))


def test_weights_and_hidden_states_can_be_looked_at():
    rows, _ = packed_rows()
    for implementation in IMPLEMENTATIONS:
        model = made("BertModel").eval()
        model.set_attn_implementation(implementation)
        outputs = model(**rows, output_attentions=True, output_hidden_states=True)
        assert isinstance(outputs, BaseModelOutputWithPooling) and len(outputs.hidden_states) == 3
        apart = rows["segment_ids"][:, None, :, None] != rows["segment_ids"][:, None, None, :]
        assert all((weights.masked_select(apart) == 0).all() for weights in outputs.attentions)
