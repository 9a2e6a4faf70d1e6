"""modeling_t5 against transformers' T5 and umT5, float64, from random weights that both share."""

import pytest
import torch
import transformers
from torch import nn

import modeling_t5
from tests.helpers.t5_pair import SIZES, T5_1_1, assert_same, batch, pair

T5_1_0 = {}
TIED_GATED = {"feed_forward_proj": "gated-silu", "tie_word_embeddings": True}
UNTIED_RELU = {"tie_word_embeddings": False}


@pytest.mark.parametrize("settings", [T5_1_0, T5_1_1, TIED_GATED, UNTIED_RELU], ids=["1.0", "1.1", "gated", "untied"])
def test_forward_loss_and_every_gradient(settings):
    assert_same(*pair("T5ForConditionalGeneration", **settings), batch())


@pytest.mark.parametrize("implementation", ["sdpa", "block_sparse"])
def test_other_attention_is_the_same_function(implementation):
    assert_same(*pair("T5ForConditionalGeneration", implementation, **T5_1_1), batch())


def test_encoder_model():
    inputs = batch()
    del inputs["labels"]
    assert_same(*pair("T5EncoderModel", **T5_1_1), inputs)


LABELS = {
    "single_label_classification": torch.tensor([0, 2, 1]),
    "multi_label_classification": torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0]]).double(),
    "regression": torch.tensor([0.5, -1.0, 2.0]).double(),
}


@pytest.mark.parametrize("kind", LABELS)
def test_sequence_classification(kind):
    num_labels = 1 if kind == "regression" else 3
    theirs, ours = pair("T5ForSequenceClassification", num_labels=num_labels)
    inputs = {**batch(), "labels": LABELS[kind]}
    inputs["input_ids"][:, [3, 16]] = 1  # two </s> a row, of which the last counts
    assert_same(theirs, ours, inputs)
    assert ours.config.problem_type == theirs.config.problem_type == kind


@pytest.mark.parametrize("kind", LABELS)
def test_classification_by_the_encoder_alone(kind):
    """The linear layer commutes with the mean: its logits are the mean of those that transformers gives each token."""
    settings = {**SIZES, **T5_1_1, "num_labels": 1 if kind == "regression" else 3}
    theirs = transformers.T5ForTokenClassification(transformers.T5Config(**settings)).double().eval()
    ours = modeling_t5.T5EncoderForSequenceClassification(modeling_t5.T5Config(**settings)).double().eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    inputs, labels = {**batch()}, LABELS[kind]
    del inputs["labels"]
    tokens, mask = theirs(**inputs).logits, inputs["attention_mask"]
    logits = torch.stack([row[seen.bool()].mean(0) for row, seen in zip(tokens, mask, strict=True)])
    loss = {
        "single_label_classification": lambda: nn.CrossEntropyLoss()(logits, labels),
        "multi_label_classification": lambda: nn.BCEWithLogitsLoss()(logits, labels),
        "regression": lambda: nn.MSELoss()(logits[:, 0], labels),
    }[kind]()
    got = ours(**inputs, labels=labels)
    torch.testing.assert_close(got.logits, logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got.loss, loss, rtol=1e-10, atol=1e-10)
    assert ours.config.problem_type == kind
    got.loss.backward()
    loss.backward()
    parameters = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(parameters[name].grad, parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "T5ForSequenceClassification", "T5EncoderModel"])
@pytest.mark.parametrize("settings", [T5_1_0, TIED_GATED], ids=["1.0", "gated"])
def test_initial_values_spread_as_those_of_transformers(name, settings):
    """In a new model, and where a checkpoint lacks the weights."""
    torch.manual_seed(0)  # the smallest of these weights has 128 elements
    settings = {**SIZES, "relative_attention_num_buckets": 32, "initializer_factor": 3.0, **settings}
    theirs = getattr(transformers, name)(transformers.T5Config(**settings)).state_dict()
    cls, config = getattr(modeling_t5, name), modeling_t5.T5Config(**settings)
    for ours in (cls(config), cls.from_pretrained(None, config=config, state_dict={})):
        for key, value in ours.state_dict().items():
            if value.numel() > 1 and theirs[key].unique().numel() > 1:
                assert value.std() == pytest.approx(theirs[key].std(), rel=0.25), key
            else:
                assert torch.equal(value, theirs[key]), key


@pytest.fixture(scope="module")
def generators():
    return pair("T5ForConditionalGeneration", **T5_1_0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        {"num_beams": 3},
        {"num_beams": 3, "use_cache": False},
        {"do_sample": True, "top_k": 20},
        {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
        {"cache_implementation": "static"},
    ],
    ids=str,
)
def test_generate(generators, options):
    inputs = batch()
    del inputs["labels"]
    written = []
    for model in generators:
        torch.manual_seed(3)
        written.append(model.generate(**inputs, max_new_tokens=9, eos_token_id=None, **options))
    assert written[0].shape[1] == 10 and torch.equal(*written)


def test_cached_steps_give_the_logits_of_the_whole(generators):
    _, model = generators
    inputs = batch()
    labels = inputs.pop("labels").clamp(min=0)
    whole = model(**inputs, decoder_input_ids=labels, use_cache=False).logits
    cache, steps = None, []
    for step in labels.split([1, 3, 20], dim=1):
        out = model(**inputs, decoder_input_ids=step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-10, atol=1e-10)


def test_masks_of_the_decoder_and_of_each_query():
    theirs, ours = pair("T5ForConditionalGeneration")
    inputs = batch()
    padding = torch.ones(3, 24, dtype=torch.long)
    padding[1, 20:] = 0
    assert_same(theirs, ours, {**inputs, "decoder_attention_mask": padding})
    square = torch.rand(3, 1, 24, 24, generator=torch.Generator().manual_seed(0)) < 0.5
    square = (square | torch.eye(24, dtype=torch.bool)).tril()
    added = torch.zeros(3, 1, 24, 24, dtype=torch.float64).masked_fill(~square, torch.finfo(torch.float64).min)
    assert_same(theirs, ours, {**inputs, "decoder_attention_mask": added})  # theirs would add True as 1
    wanted = ours(**inputs, decoder_attention_mask=added).logits
    for same in (square, square.long(), square[:, 0]):
        torch.testing.assert_close(ours(**inputs, decoder_attention_mask=same).logits, wanted)


def test_hidden_states_and_attention_weights_of_all_layers():
    theirs, ours = pair("T5ForConditionalGeneration")
    wanted, got = (model(**batch(), output_hidden_states=True, output_attentions=True) for model in (theirs, ours))
    assert list(wanted) == list(got)
    names = [name for name in wanted if isinstance(wanted[name], tuple)]
    assert len(names) == 5
    for name in names:
        assert len(wanted[name]) == len(got[name])
        for a, b in zip(wanted[name], got[name], strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


def test_a_bias_for_each_layer_is_umt5():
    settings = {"feed_forward_proj": "gated-gelu"}
    theirs = transformers.UMT5ForConditionalGeneration(
        transformers.UMT5Config(**SIZES, **settings, attn_implementation="eager")
    )
    config = modeling_t5.T5Config(**SIZES, **settings, relative_attention_bias_per_layer=True)
    ours = modeling_t5.T5ForConditionalGeneration(config).double().eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert_same(theirs.double().eval(), ours, batch())


def test_checkpoints_go_either_way(tmp_path):
    for settings in (T5_1_0, T5_1_1):
        theirs, ours = pair("T5ForConditionalGeneration", **settings)
        theirs.save_pretrained(tmp_path / "theirs")
        ours.save_pretrained(tmp_path / "ours")
        inputs = batch()
        wanted = theirs(**inputs).logits
        for cls, folder in ((modeling_t5, "theirs"), (modeling_t5, "ours"), (transformers, "ours")):
            loaded, report = cls.T5ForConditionalGeneration.from_pretrained(
                tmp_path / folder, attn_implementation="eager", dtype=torch.float64, output_loading_info=True
            )
            assert not (report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"])
            torch.testing.assert_close(loaded.eval()(**inputs).logits, wanted, rtol=1e-10, atol=1e-10)
            is_tied = settings.get("tie_word_embeddings", True)
            assert (loaded.lm_head.weight is loaded.shared.weight) == is_tied
            assert loaded.encoder.embed_tokens.weight is loaded.shared.weight
