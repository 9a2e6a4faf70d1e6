"""Documents of packed rows have the logits that they have alone, in our models and in transformers' encoders."""

import numpy as np
import pytest
import torch
import transformers

from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.objectives.document_rows import DocumentRows
from lm_experiments_tools.data.objectives.mlm import MaskedLM
from lm_experiments_tools.data.objectives.objective import TokenIds
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.packed_rows import prepare
from tests.helpers.token_toys import token_data

WIDTH, VOCABULARY = 48, 90
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 48, "pad_token_id": 0,
}  # fmt: skip
MODERN = {**SIZES, "local_attention": 8, "global_attn_every_n_layers": 3, "bos_token_id": 1, "eos_token_id": 2}
MODERN |= {"cls_token_id": 1, "sep_token_id": 2}
ROPE = {**SIZES, "num_key_value_heads": 2, "mask_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}
ABSOLUTE = {**SIZES, "max_position_embeddings": 64}


def model_of(cls, config_cls, settings, dtype=torch.float64):
    torch.manual_seed(0)
    model = cls(config_cls(**settings)).to(dtype).eval()
    for parameter in model.parameters():  # larger than at the start, so that attention is far from uniform
        parameter.data.mul_(3.0) if parameter.dim() > 1 else None
    return model


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    rng = np.random.default_rng(0)
    documents = [[rng.integers(4, VOCABULARY, length)] for length in rng.integers(1, 60, 40)]
    tokens = token_data(tmp_path_factory.mktemp("rows") / "tokens", documents)
    objective = MaskedLM.create(TokenIds(VOCABULARY, mask_id=3), WIDTH, model_kind="encoder", mlm_probability=0.0)
    data = Dataset(DocumentRows(tokens, objective, cls_id=1, sep_id=2))
    batch = data.batch(np.arange(len(data)))
    return {name: torch.from_numpy(values) for name, values in batch.items() if name != "labels"}


def logits(model, **inputs):
    with torch.no_grad():
        outputs = model(**inputs)
    return outputs["prediction_logits" if "prediction_logits" in outputs else "logits"]


def check_documents_alone(model, alone, rows):
    """`alone` is a copy of the model that has not been prepared."""
    transform = prepare(model) or dict
    found, compared = logits(model, **transform(rows)), 0
    for row, segments in enumerate(rows["segment_ids"]):
        for number in range(1, int(segments.max()) + 1):
            where = segments == number
            expected = logits(alone, input_ids=rows["input_ids"][row, where][None])[0]
            assert (found[row, where] - expected).abs().max() <= 1e-10 * max(1.0, expected.abs().max())
            compared += 1
    assert compared > 1.2 * len(found)
    padded = {name: rows[name][:1] for name in ("input_ids", "attention_mask")}
    assert torch.equal(logits(model, **padded), logits(alone, **padded)), "rows of one document are as before"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("ModernBert", MODERN),
        ("Bert", ABSOLUTE),
        ("Roberta", {**ABSOLUTE, "pad_token_id": 5}),
        ("EuroBert", ROPE),
        ("DistilBert", {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}),
    ],
)
def test_encoders_of_transformers_isolate_documents(kind, settings, rows):
    build = getattr(transformers, f"{kind}ForMaskedLM"), getattr(transformers, f"{kind}Config"), settings
    if kind == "Roberta":  # whose own positions depend on the padding token, which documents do not have
        rows = {**rows, "input_ids": rows["input_ids"].masked_fill(rows["input_ids"] == 5, 6)}
        rows["input_ids"] = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, 5)
    check_documents_alone(model_of(*build), model_of(*build), rows)


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (transformers.DebertaV2ForMaskedLM, transformers.DebertaV2Config(**ABSOLUTE)),
        (transformers.T5ForConditionalGeneration, transformers.T5Config(vocab_size=9, num_layers=1)),
    ],
)
def test_a_model_that_does_not_declare_to_isolate_documents_is_refused_in_one_sentence(cls, config):
    with pytest.raises(UserError, match=f"--packing documents: {cls.__name__} .*--packing none") as error:
        prepare(cls(config))
    assert "\n" not in str(error.value)
