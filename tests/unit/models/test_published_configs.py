"""--model_cfg takes config.json files as they are published, and --base_model's way of reading them agrees."""

import json

import pytest
import torch
import transformers
from transformers import AutoConfig, T5Gemma2ForConditionalGeneration, T5GemmaConfig, T5GemmaModuleConfig

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import build_model, load_model_config
from modeling_t5 import T5Config
from tests.helpers.pretrained_toys import ROWS, made, save_toy, toy_args
from tests.unit.checkpoint.test_checkpoint_families import SIZES, t5gemma2

# Keys of the files of these models that transformers' classes do not declare, beside one that they do.
PUBLISHED = {
    "answerdotai/ModernBERT-base": {
        "model_type": "modernbert", "hidden_size": 768, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0, "repad_logits_with_grad": False, "position_embedding_type": "absolute",
    },
    "microsoft/deberta-v3-base": {
        "model_type": "deberta-v2", "hidden_size": 768, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
        "share_att_key": True, "pos_att_type": "p2c|c2p",
    },
    "meta-llama/Llama-3.2-1B": {
        "model_type": "llama", "hidden_size": 2048, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
    },
    "facebook/bart-base": {
        "model_type": "bart", "d_model": 768, "add_bias_logits": False, "classif_dropout": 0.1, "num_beams": 4,
        "normalize_embedding": True, "decoder_start_token_id": 2,
    },
    "google/byt5-small": {"model_type": "t5", "d_model": 1472, "tokenizer_class": "ByT5Tokenizer"},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_as_autoconfig_reads_it(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    expected = AutoConfig.from_pretrained(tmp_path)
    found = load_model_config(tmp_path / "config.json")
    left_out = {"_name_or_path", "decoder_start_token_id", "position_embedding_type"}  # the last: of no effect
    assert type(found) is type(expected)
    assert {k: v for k, v in found.to_dict().items() if k not in left_out} == {
        k: v for k, v in expected.to_dict().items() if k not in left_out
    }


def test_a_copy_under_another_name_is_known_by_what_transformers_writes(tmp_path):
    values = {**PUBLISHED["google/byt5-small"], "architectures": ["T5ForConditionalGeneration"]}
    (tmp_path / "mine.json").write_text(json.dumps(values))
    assert load_model_config(tmp_path / "mine.json", T5Config).d_model == 1472


@pytest.mark.parametrize("values", [{"base": "t5-small", "d_modl": 8}, {"model_type": "t5", "d_modl": 8}])
@pytest.mark.parametrize("config_cls", [None, T5Config])
def test_a_mistyped_key_of_a_variant_is_refused_with_the_right_one(values, config_cls, tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="no 'd_modl'; did you mean 'd_model'"):
        load_model_config(tmp_path / "mine.json", config_cls)
    if "base" in values:  # which transformers writes into no file
        (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": ["T5Model"]}))
        with pytest.raises(UserError, match="no 'd_modl'; did you mean 'd_model'"):
            load_model_config(tmp_path / "config.json", config_cls)


def test_a_model_generates_from_the_token_that_its_shift_trains_with(tmp_path):
    """T5Gemma's is the decoder's BOS (2), not padding (0) as T5's, whatever decoder_start_token_id says."""
    module = T5GemmaModuleConfig(**{**SIZES, "vocab_size": ROWS})
    (tmp_path / "gemma.json").write_text(T5GemmaConfig(encoder=module, decoder=module).to_json_string())
    ids = torch.randint(3, 30, (2, 4))
    new = build_model(T5Gemma2ForConditionalGeneration, t5gemma2(), seed=0)
    cls = transformers.T5GemmaForConditionalGeneration
    from_json = build_model(cls, load_model_config(tmp_path / "gemma.json"), seed=0)
    saved = made(toy_args(save_toy("encoder-decoder", tmp_path / "saved", from_json)))
    for model in (new, from_json, saved):
        trained = model.prepare_decoder_input_ids_from_labels(ids)[:, 0]
        assert torch.equal(model.generate(input_ids=ids, max_new_tokens=1)[:, 0], trained)
        assert trained.tolist() == [2, 2] and model.config.decoder_start_token_id == 2
