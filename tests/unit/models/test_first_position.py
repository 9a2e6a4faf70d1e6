"""How many tokens a model has positions for, as its own forward pass finds it out."""

import pytest
import torch
import transformers as tr

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import check_positions, first_position
from lm_experiments_tools.models.pretrained import pretrained_model
from lm_experiments_tools.models.tokenizers import load_tokenizer
from tests.helpers.pretrained_toys import ROWS, toy_args, toy_tokenizer

POSITIONS = 20
SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
FAMILIES = "bert distilbert roberta data2vec-text longformer mpnet ibert esm nystromformer"


def built(family, **changes):
    extras = {"attention_window": [4]} if family == "longformer" else {}
    sizes = {**SIZES, "max_position_embeddings": POSITIONS, "vocab_size": ROWS, **extras, **changes}
    config = tr.CONFIG_MAPPING[family](**sizes)
    config.pad_token_id = 1 if config.pad_token_id is None else config.pad_token_id
    return tr.AutoModelForSequenceClassification.from_config(config).eval()


@torch.no_grad()
def takes(model, length):
    ids = torch.full((1, length), 5)
    try:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("family", FAMILIES.split())
def test_as_many_tokens_are_allowed_as_the_model_takes(family):
    model = built(family)
    most = max(length for length in range(POSITIONS - 4, POSITIONS + 1) if takes(model, length))
    first = first_position(model)
    check_positions(model.config, most, "--input_seq_len", first)
    with pytest.raises(UserError, match=rf"--input_seq_len is more than the {most} positions"):
        check_positions(model.config, most + 1, "--input_seq_len", first)


@pytest.mark.parametrize(
    ("length", "flags"), [(32, {}), (28, {"peft": "prompt_tuning", "num_virtual_tokens": 4})], ids=["alone", "prompt"]
)
def test_roberta_is_read_to_its_last_position_and_not_beyond(length, flags, tmp_path):
    built("roberta", max_position_embeddings=34, pad_token_id=1).save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)

    def made(length):
        args = toy_args(tmp_path, "encoder", input_seq_len=length, **flags)
        return pretrained_model(args, load_tokenizer(args), ("no", "yes"))

    assert takes(made(length).eval(), length)
    with pytest.raises(UserError, match=r"positions of the model \(max_position_embeddings"):
        made(length + 1)
