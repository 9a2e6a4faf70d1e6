"""A new model has the special tokens of its vocabulary, as AutoTokenizer reads them; loaded weights keep theirs."""

import json

import pytest
import sentencepiece
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, RobertaConfig, RobertaForMaskedLM

import run_bert_pretraining
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.recipes.finetuner import FineTuner
from run_t5_pretraining import main
from tests.helpers.bert_toys import TINY, make_bert_data
from tests.helpers.finetuning_toys import pairs
from tests.helpers.pretrained_toys import toy_tokenizer
from tests.helpers.runs import T5_RUN, words
from tests.helpers.tokenizer_toys import TEXTS, byte_level_tokenizer

T5 = {"model_type": "t5", "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 1}
BART = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
BART |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
ROLES = {"t5": ("pad", "eos"), "bart": ("pad", "eos", "bos"), "gpt2": ("eos", "bos"), "gemma": ("pad", "eos", "bos")}
SIDE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIDE |= {"num_key_value_heads": 1, "head_dim": 8}
CLASSES = {"t5": "T5", "bart": "Bart", "gemma": "T5Gemma"}


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def vocabulary(folder, **ids):
    """A SentencePiece model with these special ids, and sentinels at its end."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(folder / "v"), vocab_size=120, hard_vocab_limit=False,
        pad_piece="<pad>", minloglevel=2, **ids,
    )  # fmt: skip
    return folder / "v.model"


def trained(vocab, config, read="run", **changed):
    (config.pop("folder") / "model.json").write_text(json.dumps({"vocab_size": 640, **config}))
    lengths = {"input_seq_len": 32, "target_seq_len": 32, "iters": 1}
    main(words(**{**T5_RUN, **lengths, "vocab": vocab, "model_path": "run", "model_cfg": "model.json", **changed}))
    return AutoConfig.from_pretrained(f"{read}/last"), GenerationConfig.from_pretrained(f"{read}/last")


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("t5", dict(unk_id=0, pad_id=1, eos_id=2, bos_id=-1)),
        ("bart", dict(bos_id=0, pad_id=1, eos_id=2, unk_id=3)),  # fairseq's order
        ("bart", dict(unk_id=0, bos_id=1, eos_id=2, pad_id=3)),  # SentencePiece's
        ("gemma", dict(pad_id=3, eos_id=0, bos_id=1, unk_id=2)),
    ],
)
def test_a_new_encoder_decoder_has_the_tokens_of_its_vocabulary(work, kind, ids):
    config = {"t5": T5, "bart": BART, "gemma": {"model_type": "t5gemma", "encoder": SIDE, "decoder": SIDE}}[kind]
    if kind == "gemma":
        config = {**config, "encoder": {**SIDE, "vocab_size": 640}, "decoder": {**SIDE, "vocab_size": 640}}
    cls = f"transformers:{CLASSES[kind]}ForConditionalGeneration"
    config, settings = trained(vocabulary(work, **ids), {**config, "folder": work}, model_cls=cls, task="prefix_lm")
    tokenizer = AutoTokenizer.from_pretrained("run/last")
    for role in ROLES[kind]:
        expected = ids[f"{role}_id"] if role == "bos" else getattr(tokenizer, f"{role}_token_id")
        assert getattr(config, f"{role}_token_id") == getattr(settings, f"{role}_token_id") == expected
    start = {"t5": ids["pad_id"], "bart": ids["eos_id"], "gemma": ids["bos_id"]}[kind]
    assert config.decoder_start_token_id == settings.decoder_start_token_id == start
    if kind == "bart":
        assert config.forced_eos_token_id == ids["eos_id"]
    if kind == "gemma":
        assert {part.eos_token_id for part in (config.encoder, config.decoder)} == {0}


def test_weights_keep_their_tokens_whatever_model_cfg_names(work):
    """A second run by the preset of the first one, whose tokens are not the vocabulary's."""
    vocab = vocabulary(work, unk_id=0, pad_id=1, eos_id=2, bos_id=-1)
    first, _ = trained(vocab, {**T5, "folder": work}, task="prefix_lm")
    config, settings = trained(
        vocab,
        {**T5, "folder": work},
        task="prefix_lm",
        init_checkpoint="run/last",
        iters=2,
        model_path="run2",
        read="run2",
    )
    for found in (first, config, settings):
        assert (found.pad_token_id, found.eos_token_id, found.decoder_start_token_id) == (1, 2, 1)


def test_a_new_gpt2_ends_with_the_end_of_its_vocabulary(work):
    vocab = byte_level_tokenizer(work / "own.json", special=("[unused0]", "<|endoftext|>"))
    flags = dict(model_cls="transformers:GPT2LMHeadModel", task="causal_lm", target_seq_len=None)
    config, settings = trained(vocab, {**GPT2, "folder": work}, **flags)
    end = AutoTokenizer.from_pretrained("run/last").convert_tokens_to_ids("<|endoftext|>")
    assert end == 1 and {config.eos_token_id, settings.eos_token_id, config.bos_token_id, settings.bos_token_id} == {1}
    config, _ = trained(vocab, {**GPT2, "folder": work}, **flags, model_path="other", model_options="eos_token_id=9")
    assert AutoConfig.from_pretrained("other/last").eos_token_id == 9  # as the user asks


def test_a_new_bert_has_the_tokens_of_its_vocabulary_and_loaded_weights_keep_theirs(work):
    data = make_bert_data(work)
    pieces = (data / "vocab.txt").read_text().split("\n")
    cls, sep, pad = (pieces.index(name) for name in ("[CLS]", "[SEP]", "[PAD]"))
    flags = {"vocab_file": data / "vocab.txt", "data_path": data / "train", "iters": 1, "lr": 1e-3, "batch_size": 2}
    flags |= {"use_nsp": 0, "backend": "local", "input_seq_len": 32}
    body = {name: TINY[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    body |= {"intermediate_size": 40, "max_position_embeddings": 64}

    def run(kind, **changed):
        (work / "model.json").write_text(json.dumps({"model_type": kind.lower(), **body, "pad_token_id": 3}))
        model = {"model_cfg": "model.json", "model_cls": f"transformers:{kind}ForMaskedLM", "model_path": kind}
        run_bert_pretraining.main(words(**{**flags, **model, **changed}))
        return AutoConfig.from_pretrained(work / changed.get("model_path", kind) / "last")

    modern = run("ModernBert")  # by its defaults 50281 and the like, beyond the embedding
    assert (modern.cls_token_id, modern.sep_token_id, modern.pad_token_id) == (cls, sep, pad)
    assert (modern.bos_token_id, modern.eos_token_id) == (cls, sep)
    roberta = run("Roberta")
    assert (roberta.pad_token_id, roberta.bos_token_id, roberta.eos_token_id) == (pad, cls, sep)
    RobertaForMaskedLM(RobertaConfig(**body, pad_token_id=3)).save_pretrained(work / "other")
    advice = f"is 3, but the tokenizer .* pads with {pad}: add --model_options pad_token_id={pad}"
    with pytest.raises(UserError, match=advice):
        run("Roberta", init_checkpoint="other", model_path="again")


def test_a_new_fine_tuned_model_has_the_tokens_of_its_tokenizer(work):
    toy_tokenizer().save_pretrained("tokenizer")
    (work / "model.json").write_text(json.dumps({"vocab_size": 96, **BART}))
    tuner = FineTuner(
        model_cfg="model.json", tokenizer="tokenizer", model_type="encoder-decoder", task="text_to_text",
        data_path=pairs(8), iters=1, lr=1e-3, input_seq_len=16, target_seq_len=8,
    )  # fmt: skip
    config, end = tuner.model.config, tuner.tokenizer.eos_token_id
    assert (config.pad_token_id, config.eos_token_id) == (tuner.tokenizer.pad_token_id, end)
    assert config.forced_eos_token_id == config.decoder_start_token_id == end
    assert tuner.model.model.shared.padding_idx == config.pad_token_id
    assert tuner.model.generation_config.eos_token_id == end
