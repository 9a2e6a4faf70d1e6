"""--from_pretrained in all its forms, against what transformers itself loads; what does not fit is a sentence."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, T5ForConditionalGeneration

from lm_experiments_tools.checkpoint.manifest import build_manifest, describe_files, list_files
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import build_model
from lm_experiments_tools.models.pretrained import pretrained_model
from lm_experiments_tools.models.tokenizers import load_tokenizer
from tests.helpers.pretrained_toys import made, save_toy, t5_config, toy_args, toy_batch, toy_model, toy_tokenizer


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {kind: save_toy(kind, folder / kind) for kind in ("encoder", "encoder-decoder", "decoder")}


def loss(model, kind):
    return model.eval()(**toy_batch(kind)).loss


def test_a_folder_computes_what_transformers_loads_from_it(bases):
    oracle = AutoModelForSeq2SeqLM.from_pretrained(bases["encoder-decoder"])
    assert torch.equal(
        loss(made(toy_args(bases["encoder-decoder"])), "encoder-decoder"), loss(oracle, "encoder-decoder")
    )


@pytest.mark.parametrize("link", ["best", "last"])
def test_a_run_directory_gives_its_best_checkpoint_else_its_last(link, bases, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    save_toy("encoder-decoder", tmp_path / "checkpoints" / "step_000002")
    other = T5ForConditionalGeneration(t5_config(num_layers=1))
    save_toy("", tmp_path / "checkpoints" / "step_000004", other)
    for step in (2, 4):
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        (folder / "manifest.json").write_text(
            build_manifest(describe_files(folder, list_files(folder).values()), step, False, {})
        )
    (tmp_path / "last").symlink_to("checkpoints/step_000004")
    if link == "best":
        (tmp_path / "best").symlink_to("checkpoints/step_000002")
    expected = toy_model("encoder-decoder") if link == "best" else other
    assert torch.equal(loss(made(toy_args(tmp_path)), "encoder-decoder"), loss(expected, "encoder-decoder"))


def test_files_of_t5_experiments_and_nanot5_need_the_configuration(bases, tmp_path):
    weights = toy_model("encoder-decoder").state_dict()
    torch.save({"model_state_dict": weights, "iteration": 3}, tmp_path / "model_3.pth")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    shared = dict(tokenizer=str(bases["encoder-decoder"]))
    for name in ("model_3.pth", "pytorch_model.bin"):
        args = toy_args(tmp_path / name, model_cfg=str(bases["encoder-decoder"] / "config.json"), **shared)
        assert torch.equal(loss(made(args), "encoder-decoder"), loss(toy_model("encoder-decoder"), "encoder-decoder"))
        with pytest.raises(UserError, match="holds weights alone: describe the model with --model_cfg"):
            made(toy_args(tmp_path / name, **shared))


def test_an_output_layer_of_its_own_survives_loading_and_saving(tmp_path):
    """transformers 5 would note tie_word_embeddings true, and scale the decoder's output when that is read again."""
    config = t5_config(num_layers=1)
    config.tie_word_embeddings, config.scale_decoder_outputs = False, False
    first = build_model(T5ForConditionalGeneration, config, seed=3)
    save_toy("", tmp_path / "a", first)
    second = made(toy_args(tmp_path / "a"))
    save_toy("", tmp_path / "b", second)
    third = made(toy_args(tmp_path / "b"))
    for model in (second, third):
        assert torch.equal(loss(model, "encoder-decoder"), loss(first, "encoder-decoder"))
        assert model.lm_head.weight is not model.shared.weight
        assert model.encoder.embed_tokens.weight is model.shared.weight
        assert model.config.tie_word_embeddings is False


def test_a_classifier_on_a_pretraining_checkpoint_announces_its_head_and_what_is_dropped(bases, caplog):
    args = toy_args(bases["encoder"], "encoder")
    with caplog.at_level(logging.INFO):
        model = made(args, ("a", "b", "c"))
    assert "the head is new, with random weights: classifier.bias, classifier.weight" in caplog.text
    assert "weights of its former head (cls.predictions" in caplog.text
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"} and model.classifier.out_features == 3
    source = load_file(bases["encoder"] / "model.safetensors")
    assert all(torch.equal(value, source[name]) for name, value in model.state_dict().items() if name in source)
    assert torch.equal(made(args, ("a", "b", "c")).classifier.weight, model.classifier.weight)  # by --seed
    number = made(toy_args(bases["encoder"], "encoder", task="regression"), ())
    batch = toy_batch("encoder") | {"labels": torch.tensor([0.0, 0.5, 1.0, 2.0])}
    outputs = number.eval()(**batch)
    torch.testing.assert_close(outputs.loss, ((outputs.logits[:, 0] - batch["labels"]) ** 2).mean())


def test_weights_of_the_body_that_do_not_fit_are_counted(bases, tmp_path, caplog):
    folder = save_toy("encoder", tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    removed = [name for name in weights if "layer.1.attention" in name]
    kept = {name: value for name, value in weights.items() if name not in removed} | {"bert.extra": torch.ones(2)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=rf"{len(removed)} are missing .*1 are unexpected \(bert.extra\); .*--allow_part"
    ):
        made(toy_args(folder, "encoder"))
    with caplog.at_level(logging.WARNING):
        made(toy_args(folder, "encoder", allow_partial_checkpoint=True))
    assert "fits only in part" in caplog.text


def test_tokenizers(bases, tmp_path, caplog):
    toy_tokenizer(pad=None).save_pretrained(tmp_path / "gpt")
    with caplog.at_level(logging.INFO):
        tokenizer = load_tokenizer(toy_args(bases["decoder"], "decoder", tokenizer=str(tmp_path / "gpt")))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id and "no padding token: </s>" in caplog.text
    model = pretrained_model(toy_args(bases["decoder"], "decoder"), tokenizer)
    assert model.generation_config.pad_token_id == tokenizer.eos_token_id
    (tmp_path / "wordpiece").mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "##ness"]
    (tmp_path / "wordpiece" / "vocab.txt").write_text("\n".join(words))
    ids = load_tokenizer(toy_args(None, "encoder", model_cfg="x", tokenizer=str(tmp_path / "wordpiece")))("goodness")
    assert ids["input_ids"] == [2, 5, 6, 3]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (dict(folder="runs/nowhere/else"), "--from_pretrained runs/nowhere/else: there is no such file or folder"),
        (dict(folder="."), "has neither config.json nor adapter_config.json, and is no run directory"),
        (dict(folder="encoder"), "--model_type encoder-decoder does not fit weights of kind encoder"),
        (
            dict(folder="encoder-decoder", peft="lora", lora_targets=("nope",)),
            "--lora_targets does not fit T5ForConditionalGeneration",
        ),
        (
            dict(folder="encoder-decoder", peft="prefix_tuning", gradient_checkpointing=True),
            "--peft prefix_tuning and --gradient_checkpointing",
        ),
        (dict(folder="encoder-decoder", device_map="nope"), "weights cannot be read: .*device_map"),
    ],
)
def test_what_cannot_be_is_a_sentence(settings, sentence, bases):
    settings = dict(settings)
    folder, labels = settings.pop("folder"), settings.pop("labels", ("no", "yes"))
    settings.setdefault("tokenizer", str(bases["encoder"]))
    with pytest.raises(UserError, match=sentence):
        made(toy_args(bases.get(folder, folder), **settings), labels)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    save_toy("", tmp_path, T5ForConditionalGeneration(t5_config(num_layers=1, vocab_size=80)))
    with pytest.raises(UserError, match="has 90 tokens, the embedding 80 rows"):
        made(toy_args(tmp_path))


def test_device_map_on_a_cpu_says_where_layers_are(bases, caplog):
    with caplog.at_level(logging.INFO):
        model = made(toy_args(bases["encoder-decoder"], device_map="auto"))
    assert "on cpu: all layers" in caplog.text
    assert torch.equal(loss(model, "encoder-decoder"), loss(toy_model("encoder-decoder"), "encoder-decoder"))


def test_embeddings_stay_where_they_are_when_the_model_moves(bases):
    from lm_experiments_tools.models.pretrained import host_embeddings

    config = t5_config(num_layers=1)
    config.tie_word_embeddings = False
    model = build_model(T5ForConditionalGeneration, config, seed=3)
    host_embeddings(model)
    model.to("meta")
    assert model.shared.weight.device.type == "cpu" and model.lm_head.weight.is_meta
    assert model.shared(torch.tensor([[1]])).shape == (1, 1, 64)
    with pytest.raises(UserError, match="is tied to its embeddings"):
        host_embeddings(toy_model("encoder-decoder"))
