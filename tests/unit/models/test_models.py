"""Classes by name, presets against the published sizes, and the output layer that transformers ties by force."""

import json
from types import SimpleNamespace

import pytest
import torch

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import (
    build_model,
    check_vocabulary,
    load_model_config,
    num_parameters,
    pretrained_config,
)
from lm_experiments_tools.models.from_args import model_source
from lm_experiments_tools.models.presets import list_presets
from lm_experiments_tools.modules.user_classes import get_cls_by_name
from modeling_bert import BertConfig
from modeling_t5 import T5Config

transformers = pytest.importorskip("transformers")
T5 = transformers.T5ForConditionalGeneration

# T5: "60 million, 220 million, 770 million, 3 billion, 11 billion" (arXiv 1910.10683, section 3.7; exact: the
# checkpoints t5-* on the Hub). v1.1: released_checkpoints.md of google-research/
# text-to-text-transfer-transformer (77M, 250M, 800M, 3B, 11B; exact: the checkpoints google/t5-v1_1-* on the Hub).
PUBLISHED = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1_1-small": 76_961_152,
    "t5-v1_1-base": 247_577_856,
    "t5-v1_1-large": 783_150_080,
    "t5-v1_1-xl": 2_849_757_184,
    "t5-v1_1-xxl": 11_135_332_352,
}


@pytest.mark.parametrize("preset", sorted(name for name, path in list_presets().items() if "t5_" in path.parent.name))
def test_presets_have_the_dropout_that_their_models_were_trained_with(preset):
    """None in the pre-training of T5 1.1, mT5 and UL2; 0.1 in that of T5 1.0, and on in FLAN's fine-tuning."""
    expected = 0.0 if preset.startswith(("t5-v1_1", "mt5", "ul2")) else 0.1
    assert load_model_config(preset, T5Config).dropout_rate == expected


@pytest.mark.parametrize("preset", sorted({*PUBLISHED, "t5-micro"}))
def test_preset_has_the_published_number_of_parameters(preset):
    config = load_model_config(preset, T5.config_class)
    with torch.device("meta"):
        model = build_model(T5, config, seed=0)
    count = num_parameters(model)
    assert count.total == count.trainable == PUBLISHED.get(preset, count.total)
    untied = preset.startswith("t5-v1_1")
    assert (model.lm_head.weight is not model.shared.weight) == untied
    assert model.config.scale_decoder_outputs is not untied
    assert count.embedding == config.vocab_size * config.d_model * (1 + untied)
    assert model.encoder.embed_tokens.weight is model.shared.weight
    assert model.decoder.embed_tokens.weight is model.shared.weight


def test_block_sparse_preset_is_its_base_with_a_layout():
    with torch.device("meta"):
        model = build_model(T5, load_model_config("t5-small-bigbird", T5.config_class), seed=0)
    assert num_parameters(model).total == PUBLISHED["t5-small"]
    assert model.config._attn_implementation == "block_sparse"
    assert {"num_heads": 8, "block": 64, "num_random_blocks": 3}.items() <= model.config.sparse_attention.items()


@pytest.mark.parametrize("kind", ["t5", "switch_transformers", "bart"])
def test_a_decoder_starts_with_padding_where_the_configuration_does_not_say(kind, tmp_path):
    """As in T5's published configurations; transformers has a default for BART alone."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "pad_token_id": 3}))
    assert load_model_config(tmp_path / "config.json").decoder_start_token_id == (2 if kind == "bart" else 3)


# Facts of t5-experiments' configurations, by file: d_model, layers, rows of the vocabulary, memory tokens.
ANCESTORS = {
    "t5-micro": (512, 4, 32128, 0), "t5-small": (512, 6, 32128, 0), "t5-small-enc-mem_10": (512, 6, 32128, 10),
    "t5-small-enc-mem_20": (512, 6, 32128, 20), "t5-small_voc_50359": (512, 6, 50359, 0),
    "t5-small_voc_50359-mem_20": (512, 6, 50359, 20), "t5-base": (768, 12, 32128, 0),
    "t5-base-cdQ": (768, 12, 32128, 0),
    "t5-base-only-cdQ": (768, 12, 32128, 0), "t5-base_voc_50359": (768, 12, 50359, 0),
    "t5-base_voc_50359-mem_20": (768, 12, 50359, 20), "t5-large": (1024, 24, 32128, 0),
    "t5-large_voc_32102": (1024, 24, 32102, 0), "t5-large_voc_32102-mem_20": (1024, 24, 32102, 20),
    "t5-large_voc_50359": (1024, 24, 50359, 0), "t5-large_voc_50359-mem_20": (1024, 24, 50359, 20),
    "t5-3b": (1024, 24, 32128, 0), "t5-11b": (1024, 24, 32128, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", ANCESTORS)
def test_the_ancestors_command_lines_find_its_configurations(name):
    """By its path, though its folder is not here; under our names too, but for those that are other models."""
    config = load_model_config(f"./t5configs/{name}.json", T5Config)
    facts = config.d_model, config.num_layers, config.vocab_size, config.num_memory_tokens
    assert facts == ANCESTORS[name] and config.num_decoder_layers == config.num_layers and config.dropout_rate == 0.1
    assert (load_model_config(name, T5Config).to_dict() == config.to_dict()) == (name != "t5-micro")


def test_a_base_models_file_may_write_1_for_a_float(tmp_path):
    write(tmp_path / "config.json", model_type="t5", **SMALL, vocab_size=50, initializer_factor=1, n_positions=512)
    for config_cls in (None, transformers.T5Config, T5Config):
        assert pretrained_config(str(tmp_path), config_cls).initializer_factor == 1.0
    write(tmp_path / "config.json", model_type="t5", **{**SMALL, "d_kv": "four"}, vocab_size=50)
    args = SimpleNamespace(
        model_cls="transformers:T5ForConditionalGeneration", model_cfg=None, base_model=str(tmp_path)
    )
    with pytest.raises(UserError, match=r"its configuration cannot be read: .*'d_kv' expected int") as error:
        model_source(args, LocalBackend())
    assert "\n" not in str(error.value)


def test_the_ancestors_rotary_bert_is_not_ours_of_its_name():
    config = load_model_config("bert_configs/bert_base_uncased-4L_preln_sparse_rope.json", BertConfig)
    assert (config.rotary_dim, config.sparse_attention["num_sliding_window_blocks"]) == (16, 1)
    with pytest.raises(UserError, match="neither a model configuration file nor a preset"):
        load_model_config("elsewhere/t5-small.json")


def write(path, **values):
    path.write_text(json.dumps(values))
    return path


SMALL = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}


@pytest.fixture
def tiny_v1_1(tmp_path):
    path = write(tmp_path / "tiny.json", base="t5-v1_1-small", vocab_size=100, **SMALL)
    return build_model(T5, load_model_config(path), seed=3).eval()


def logits(model):
    ids = torch.arange(2, 12).view(2, 5)
    with torch.no_grad():
        return model(input_ids=ids, labels=ids.flip(0)).logits


def test_untied_model_survives_two_rounds_of_save_and_from_pretrained(tiny_v1_1, tmp_path):
    """As a plain Hugging Face user does: twice, because T5Config forgets tie_word_embeddings=False on loading."""
    before = tiny_v1_1
    for folder in (tmp_path / "first", tmp_path / "second"):
        before.save_pretrained(folder)
        after = T5.from_pretrained(folder).eval()
        assert after.lm_head.weight is not after.shared.weight
        assert after.encoder.embed_tokens.weight is after.shared.weight
        assert after.decoder.embed_tokens.weight is after.shared.weight
        assert num_parameters(after) == num_parameters(tiny_v1_1)
        assert torch.equal(logits(after), logits(tiny_v1_1))
        before = after
    saved = json.loads((tmp_path / "first" / "config.json").read_text())
    assert saved["tie_word_embeddings"] is False
    reread = load_model_config(tmp_path / "first" / "config.json")
    assert reread.tie_word_embeddings is False and reread.scale_decoder_outputs is False


def test_untied_output_gets_its_own_gradient_and_is_not_scaled(tiny_v1_1):
    ids = torch.arange(2, 12).view(2, 5)
    tiny_v1_1(input_ids=ids, labels=ids).loss.backward()
    shared, head = tiny_v1_1.shared.weight.grad, tiny_v1_1.lm_head.weight.grad
    assert not torch.equal(shared, head)
    assert (
        shared[50:].abs().max() == 0 and head[50:].abs().max() > 0
    )  # the softmax touches every row, a lookup does not
    seen = []
    tiny_v1_1.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    out = tiny_v1_1(input_ids=ids, labels=ids, output_hidden_states=True)
    assert torch.equal(seen[0], out.decoder_hidden_states[-1])


def test_untied_model_stays_untied_through_resize_and_tie_weights(tiny_v1_1):
    tiny_v1_1.resize_token_embeddings(120)
    tiny_v1_1.tie_weights()
    assert tiny_v1_1.lm_head.weight is not tiny_v1_1.shared.weight
    assert tiny_v1_1.encoder.embed_tokens.weight is tiny_v1_1.shared.weight
    assert tiny_v1_1.lm_head.weight.shape == tiny_v1_1.shared.weight.shape == (120, 16)


def test_untied_encoder_without_an_output_layer_keeps_its_ties(tmp_path):
    config = load_model_config(write(tmp_path / "tiny.json", base="t5-v1_1-small", vocab_size=100, **SMALL))
    model = build_model(transformers.T5EncoderModel, config, seed=0)
    assert model.encoder.embed_tokens.weight is model.shared.weight


def test_weights_depend_on_the_seed_alone_and_leave_the_random_state(tmp_path):
    config = load_model_config(write(tmp_path / "tied.json", base="t5-small", vocab_size=100, **SMALL))
    torch.manual_seed(5)
    first = build_model(T5, config, seed=1)
    drawn = torch.rand(3)
    torch.rand(17)
    again, other = build_model(T5, config, seed=1), build_model(T5, config, seed=2)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.shared.weight, other.shared.weight)


def test_variant_states_only_what_differs_from_its_base(tmp_path):
    write(tmp_path / "a.json", base="t5-base", d_ff=4096)
    config = load_model_config(write(tmp_path / "b.json", base="a.json", num_heads=8))
    assert (config.d_model, config.d_ff, config.num_heads) == (768, 4096, 8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"d_modle": 3}, "did you mean 'd_model'"),
        ({"d_model": "wide"}, "Field 'd_model' expected int, got str"),
        ({"feed_forward_proj": "gated-gelu-relu"}, "feed_forward_proj"),
        ({"base": "t5-smal"}, "neither a file beside it nor a preset"),
        ({"base": "self.json"}, "circle: self.json -> self.json"),
        ({"model_type": "bert"}, "describes a 'bert' model.*--model_cls"),
    ],
)
def test_bad_configuration_is_one_sentence(tmp_path, values, message):
    path = write(tmp_path / "self.json", **{"model_type": "t5", **values})
    with pytest.raises(UserError, match=message):
        load_model_config(path, transformers.T5Config)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "sdpa"),
        ({"attn_implementation": "eager"}, "eager"),
        ({"attn_implementation": "block_sparse"}, "block_sparse"),
        ({"sparse_config_cls": "deepspeed.ops.sparse_attention:BigBirdSparsityConfig"}, "block_sparse"),
        ({"sparse_config_cls": "BigBird", "attn_implementation": "block_sparse"}, "block_sparse"),
    ],
)
def test_attention_that_a_configuration_names_is_what_the_model_gets(tmp_path, values, expected):
    path = write(tmp_path / "tiny.json", base="t5-small", vocab_size=100, **SMALL, **values)
    config = build_model(T5, load_model_config(path, T5.config_class), seed=0).config
    assert config._attn_implementation == expected
    if "sparse_config_cls" in values:
        assert config.sparse_config_cls == "BigBirdSparsityConfig" and config.sparse_attention["num_heads"] == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attn_implementation": "block_spars"}, "T5ForConditionalGeneration refuses this T5Config: .*block_spars"),
        ({"attn_implementation": "flash_attention_2"}, "T5ForConditionalGeneration refuses this T5Config"),
        ({"attn_implementation": "sdpa", "sparse_config_cls": "BigBird"}, 'sdpa" would ignore sparse_config_cls'),
        ({"sparse_config_cls": "BigBird", "sparse_attention": {"num_heads": 3}}, "for 3 heads, but T5.* has 4"),
    ],
)
def test_attention_that_cannot_be_had_is_one_sentence(tmp_path, values, message):
    path = write(tmp_path / "tiny.json", base="t5-small", vocab_size=100, **SMALL, **values)
    with pytest.raises(UserError, match=message) as error:
        build_model(T5, load_model_config(path, T5.config_class), seed=0)
    assert "\n" not in str(error.value)


def test_a_class_that_reads_the_layout_itself_is_left_alone():
    model_cls = get_cls_by_name("modeling_bert:BertForPreTraining")
    config = load_model_config("bert_base_uncased-4L_preln_sparse_rope", model_cls.config_class)
    for _ in range(2):  # transformers writes its choice for other layers into the configuration
        with torch.device("meta"):
            assert build_model(model_cls, config, seed=0).config._attn_implementation != "block_sparse"


def test_unknown_preset_broken_json_and_missing_type_are_named(tmp_path):
    with pytest.raises(UserError, match="did you mean 't5-small'"):
        load_model_config("models_configs/t5_configs/t5-smal.json")
    (tmp_path / "broken.json").write_text('{"d_model": }')
    with pytest.raises(UserError, match=r"broken\.json is not valid JSON"):
        load_model_config(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(UserError, match="not an object"):
        load_model_config(tmp_path / "list.json")
    with pytest.raises(UserError, match="no 'model_type'"):
        load_model_config(write(tmp_path / "bare.json", d_model=8))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a:b:c", "write module:Class"),
        ("no_such_module:T5", "cannot be imported.*no_such_module"),
        ("transformers:T5ForConditionalGenerations", "did you mean 'T5ForConditionalGeneration'"),
        ("transformers:T5Config", "not a subclass of torch.nn"),
        ("math:pi", "module of Python itself"),
    ],
)
def test_class_name_that_leads_nowhere_is_explained(name, message):
    with pytest.raises(UserError, match=message):
        get_cls_by_name(name)


def test_vocabulary_larger_than_the_embedding_is_refused():
    config = load_model_config("t5-small")
    assert check_vocabulary(config, 32_100) == 28
    assert check_vocabulary(config, 32_128) == 0
    with pytest.raises(UserError, match=r"32129 ids.*32128 rows.*32256"):
        check_vocabulary(config, 32_129)


@pytest.mark.parametrize(
    ("base", "key", "value"), [("t5-small", "initializer_factor", 1), ("bert_base_uncased", "initializer_range", 1)]
)
def test_a_whole_number_stands_for_a_float_in_a_configuration(tmp_path, base, key, value):
    """As in configurations of t5-experiments, which transformers 4 took."""
    (tmp_path / "old.json").write_text(json.dumps({"base": base, key: value, "vocab_size": 64}))
    config = load_model_config(tmp_path / "old.json")
    assert getattr(config, key) == value and type(getattr(config, key)) is float and config.vocab_size == 64
