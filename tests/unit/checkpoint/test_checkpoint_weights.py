"""Checkpoints: model weights in Hugging Face's layout without loss, and only weights that fit are loaded."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm_experiments_tools.checkpoint.weights import load_weights, save_model
from lm_experiments_tools.errors import UserError
from tests.helpers.checkpoint_toys import gathered_state, logits, random_t5


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("gathered", [False, True])
def test_saved_model_loads_with_from_pretrained_without_difference(tmp_path, tied, gathered):
    transformers = pytest.importorskip("transformers")
    model = random_t5(tied=tied)
    save_model(tmp_path, model, state_dict=gathered_state(model) if gathered else None)
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert (loaded.lm_head.weight is loaded.shared.weight) == tied
    assert (logits(loaded) - logits(model)).abs().max() == 0
    stored = load_file(tmp_path / "model.safetensors")
    assert sum("embed_tokens" in name or "lm_head" in name for name in stored) == (0 if tied else 1)
    assert (tmp_path / "generation_config.json").exists()
    other = random_t5(tied=tied, seed=1)
    report = load_weights(other, tmp_path)
    assert not report.missing and not report.unexpected and (logits(other) - logits(model)).abs().max() == 0


def test_tokenizer_is_stored(tmp_path):
    source, target = tmp_path / "tokenizer", tmp_path / "model"
    source.mkdir(), target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "spiece.model", "config.json", "model.safetensors"):
        (source / name).write_text(name)
    save_model(target, random_t5(), tokenizer_dir=source)
    assert (target / "spiece.model").read_text() == "spiece.model"
    assert json.loads((target / "config.json").read_text())["model_type"] == "t5"
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="no tokenizer files"):
        save_model(target, random_t5(), tokenizer_dir=tmp_path / "none")


class Plain(torch.nn.Module):
    """No save_pretrained; a tied weight and a strided view."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4, bias=False)
        self.b = torch.nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("view", torch.arange(12.0).reshape(3, 4).t())


def test_plain_model_round_trip(tmp_path):
    model, other = Plain(), Plain()
    save_model(tmp_path, model)
    assert set(load_file(tmp_path / "model.safetensors")) == {"a.weight", "view"}
    assert load_weights(other, tmp_path).missing == []
    assert torch.equal(other.b.weight, model.a.weight) and other.b.weight is other.a.weight


def test_sharded_hugging_face_directory_loads(tmp_path):
    model, other = random_t5(), random_t5(seed=1)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    load_weights(other, tmp_path)
    assert torch.equal(logits(model), logits(other))
    index = tmp_path / "model.safetensors.index.json"
    content = index.read_text()
    for name in (1, None, True):
        index.write_text(json.dumps({"weight_map": {"shared.weight": name}}))
        with pytest.raises(UserError, match="outside its directory"):
            load_weights(other, tmp_path)
    index.write_text(content.replace("model-00001", "../model-00001"))
    with pytest.raises(UserError, match="outside its directory"):
        load_weights(other, tmp_path)
    index.write_text(content)
    next(tmp_path.glob("model-00001*")).unlink()
    with pytest.raises(UserError, match="is missing"):
        load_weights(other, tmp_path)


def test_strict_loading_lists_what_does_not_fit(tmp_path):
    model = random_t5()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if "embed" not in name}
    del weights["lm_head.weight"], weights["encoder.final_layer_norm.weight"]
    weights["bogus"] = torch.zeros(1)
    weights["decoder.final_layer_norm.weight"] = torch.zeros(5)
    save_file(weights, tmp_path / "w.safetensors")
    target = random_t5(seed=1)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(UserError) as error:
        load_weights(target, tmp_path / "w.safetensors")
    text = str(error.value)
    for part in (
        "1 missing (encoder.final_layer_norm.weight)",
        "1 unexpected (bogus)",
        "decoder.final_layer_norm.weight: 5 in the file, 16 in the model",
        "--allow_partial_checkpoint",
    ):
        assert part in text, text
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items()), "not all or nothing"
    report = load_weights(target, tmp_path / "w.safetensors", allow_partial=True)
    assert report.missing == ["encoder.final_layer_norm.weight"] and report.unexpected == ["bogus"]
    assert report.mismatched == [("decoder.final_layer_norm.weight", (5,), (16,))]
    assert torch.equal(target.shared.weight, model.shared.weight)
    assert torch.equal(target.encoder.final_layer_norm.weight, before["encoder.final_layer_norm.weight"])


def test_nothing_in_common_is_refused_even_when_partial_is_allowed(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"no weight in .* fits the model"):
        load_weights(random_t5(), tmp_path / "w.safetensors", allow_partial=True)


def test_untied_weights_do_not_slip_into_a_tied_model(tmp_path):
    save_model(tmp_path, random_t5(tied=False))
    target = random_t5(tied=True, feed_forward_proj="gated-gelu")
    with pytest.raises(UserError, match=r"different values for .*tie_word_embeddings"):
        load_weights(target, tmp_path, allow_partial=True)


def test_tied_weights_do_not_silently_fill_an_untied_model(tmp_path):
    save_model(tmp_path, random_t5(tied=True, feed_forward_proj="gated-gelu"))
    target = random_t5(tied=False)
    with pytest.raises(UserError, match=r"1 missing \(lm_head\.weight\), 0 unexpected"):
        load_weights(target, tmp_path)
