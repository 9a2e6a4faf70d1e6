"""Encoders and encoder-decoders of today through the pre-training scripts unchanged, transformers' and ours."""

import json

import pytest
import torch
from safetensors.torch import load_file

import run_bert_pretraining
import run_t5_pretraining
from tests.helpers.bert_toys import TINY, make_bert_data
from tests.helpers.runs import losses, words, write_text
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

SIZES = {key: TINY[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
SIZES |= {"intermediate_size": 40, "max_position_embeddings": 64, "pad_token_id": 0}
IDS = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
OURS = {
    "base": "modernbert-base", **SIZES, "local_attention": 8, "bos_token_id": 2, "eos_token_id": 3,
    "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
ENCODERS = {
    "transformers:ModernBertForMaskedLM": {"model_type": "modernbert", **SIZES, **IDS, "local_attention": 8},
    "transformers:DebertaV2ForMaskedLM": {"model_type": "deberta-v2", **SIZES, "relative_attention": True},
    "modeling_bert:BertForMaskedLM": OURS,
}
T5 = {"vocab_size": 512, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
GEMMA = {
    "vocab_size": 512, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
WRITERS = {
    "transformers:UMT5ForConditionalGeneration": {"model_type": "umt5", **T5},
    "transformers:T5ForConditionalGeneration": {"model_type": "t5", **T5, "feed_forward_proj": "gated-gelu"},
    "transformers:T5GemmaForConditionalGeneration": {
        "model_type": "t5gemma", "vocab_size": 512, "encoder": GEMMA, "decoder": GEMMA,
    },
    "modeling_t5:T5ForConditionalGeneration": {  # as T5Gemma
        "model_type": "t5", **T5, "num_layers": 2, "position_embedding_type": "rotary", "qk_norm": True,
        "num_key_value_heads": 1, "local_attention": 4, "post_norms": True, "dropout_rate": 0.1,
    },
    "transformers:GPTNeoXForCausalLM": {  # a decoder, whose output layer is `embed_out` in files, `lm_head` in memory
        "model_type": "gpt_neox", "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 1, "use_cache": False,
        "num_attention_heads": 2, "intermediate_size": 16, "hidden_dropout": 0.1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = make_bert_data(tmp_path_factory.mktemp("data"))
    write_text(folder)
    (folder / "words").mkdir()
    numbered_words_vocabulary(folder / "words")
    return folder


@pytest.fixture
def start(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = {"batch_size": 4, "lr": 1e-3, "iters": 2, "log_interval": 1, "backend": "local", "input_seq_len": 32}

    def start_bert(model_cls, config, **flags):
        (tmp_path / "model.json").write_text(json.dumps(config))
        flags = {"data_path": data / "train", "vocab_file": data / "vocab.txt", "use_nsp": 0, **common, **flags}
        run_bert_pretraining.main(words(model_cls=model_cls, model_cfg="model.json", **flags))

    def start_t5(model_cls, config, **flags):
        (tmp_path / "model.json").write_text(json.dumps(config))
        flags = {"data_path": data / "text.jsonl", "data_n_workers": 1, **common, **flags}
        run_t5_pretraining.main(words(model_cls=model_cls, model_cfg="model.json", **flags))

    return {"bert": start_bert, "t5": start_t5}


def weights(run):
    return load_file(f"{run}/last/model.safetensors")


def assert_learned(run, steps=2):
    found = losses(run)
    assert [step for step, _ in found] == list(range(1, steps + 1))
    assert all(0 < loss < 20 for _, loss in found)  # log(640) is 6.5; NaN compares false


@pytest.mark.parametrize("model_cls", ENCODERS)
def test_an_encoder_trains_on_megatrons_data_and_resumes_exactly(start, model_cls):
    start["bert"](model_cls, ENCODERS[model_cls], model_path="whole", iters=4)
    assert_learned("whole", 4)
    start["bert"](model_cls, ENCODERS[model_cls], model_path="parts", iters=2)
    before = weights("parts")
    start["bert"](model_cls, ENCODERS[model_cls], model_path="parts", iters=4)
    assert losses("parts") == losses("whole")
    whole, parts = weights("whole"), weights("parts")
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    assert any(not torch.equal(before[name], parts[name]) for name in parts)


@pytest.mark.parametrize("model_cls", WRITERS)
def test_a_model_that_writes_trains_and_resumes_exactly_and_is_started_from(start, data, model_cls):
    is_byt5 = model_cls == "transformers:T5ForConditionalGeneration"  # T5 v1.1 on bytes
    vocab = "bytes" if is_byt5 else next((data / "words").glob("*.model"))
    is_decoder = model_cls == "transformers:GPTNeoXForCausalLM"
    flags = {"vocab": vocab, **({"task": "causal_lm"} if is_decoder else {"target_seq_len": 16})}
    config = WRITERS[model_cls]
    start["t5"](model_cls, config, model_path="whole", iters=4, **flags)
    assert_learned("whole", 4)
    start["t5"](model_cls, config, model_path="parts", iters=2, **flags)
    start["t5"](model_cls, config, model_path="parts", iters=4, **flags)
    whole, parts = weights("whole"), weights("parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    start["t5"](model_cls, config, model_path="next", init_checkpoint="parts/last", reset_iteration=True, **flags)
    assert_learned("next")


def test_the_loss_of_a_causal_encoder_is_that_of_transformers():
    """BertLMHeadModel, with the same weights; a packed row has the sum of its documents' losses."""
    import transformers

    import modeling_bert

    sizes = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2}
    torch.manual_seed(0)
    theirs = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, is_decoder=True)).double()
    ours = modeling_bert.BertForMaskedLM(modeling_bert.BertConfig(**sizes, is_decoder=True)).double()
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(4, 640, (2, 20), generator=torch.Generator().manual_seed(1))
    expected, found = theirs(input_ids=ids, labels=ids), ours(input_ids=ids, labels=ids)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0, check_dtype=False)  # theirs: float32
    row = {"input_ids": ids[:1, :20], "labels": ids[:1, :20]}
    segments = torch.tensor([[1] * 8 + [2] * 12])
    parts = [ours(input_ids=part, labels=part).loss * (part.shape[1] - 1) for part in ids[:1].split([8, 12], dim=1)]
    torch.testing.assert_close(ours(**row, segment_ids=segments).loss * 18, sum(parts), rtol=1e-10, atol=1e-10)
