"""Distillation: KL as torch computes it, predictions of a decoder row by row, and runs that learn from a teacher."""

import json

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import run_bert_pretraining
import run_t5_pretraining
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.distillation import divergence_from, predictor
from tests.helpers.bert_toys import make_bert_data
from tests.helpers.runs import GPT2, TINY, records, words
from tests.helpers.vocabulary_toys import numbered_words_vocabulary


def toy_decoder(kind: str) -> torch.nn.Module:
    """Two layers, of Gemma one with a window of 4."""
    layers = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]} if kind == "gemma2" else {}
    config = AutoConfig.for_model(
        kind, vocab_size=640, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, pad_token_id=0, eos_token_id=1, bos_token_id=2, initializer_range=0.2,
        **layers,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).double().eval()


def toy_ids(length: int, seed: int = 0) -> torch.Tensor:
    """Ids [2, length] without special tokens."""
    return torch.randint(3, 640, (2, length), generator=torch.Generator().manual_seed(seed))


def test_the_divergence_is_the_mean_of_torchs_over_labels() -> None:
    teacher, student = torch.randn(2, 2, 5, 11, generator=torch.Generator().manual_seed(0)).unbind()
    labels = torch.tensor([[1, 2, -100, 4, -100], [-100, 3, 3, 3, 3]])
    teacher[0, 0] = float("nan")  # nothing is predicted there
    logs = [logits.log_softmax(-1) for logits in (student, teacher)]
    known = (labels != -100) & ~teacher[..., 0].isnan()
    expected = kl_div(*logs, log_target=True, reduction="none")[known].sum() / 7
    torch.testing.assert_close(divergence_from(teacher, student, labels), expected)


@pytest.mark.parametrize("kind", ["gemma2", "llama"])
def test_a_decoder_predicts_each_target_from_the_text_before_it(kind: str) -> None:
    teacher = toy_decoder(kind)
    ids, labels = toy_ids(6), toy_ids(4, seed=1)
    lengths, targets = (6, 3), (2, 4)
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    labels = labels.masked_fill(torch.arange(4) >= torch.tensor(targets)[:, None], -100)
    batch = {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": labels}
    found = predictor(teacher, "decoder", "encoder-decoder")(batch)
    for row, (length, number) in enumerate(zip(lengths, targets, strict=True)):
        text = torch.cat([ids[row, :length], labels[row, :number]])[None]
        expected = teacher(text).logits[0, length - 1 : length - 1 + number]
        torch.testing.assert_close(found[row, :number], expected, rtol=0, atol=1e-6)


def test_a_decoder_predicts_masked_tokens_from_the_words_before_them() -> None:
    teacher, text = toy_decoder("qwen3"), toy_ids(8)
    labels = torch.full_like(text, -100)
    labels[0, 0], labels[0, 5], labels[1, 2] = text[0, 0], text[0, 5], text[1, 2]
    batch = {"input_ids": text.masked_fill(labels != -100, 9), "labels": labels}
    found = predictor(teacher, "decoder", "encoder")(batch)
    torch.testing.assert_close(found[0, 5], teacher(text[:1, :5]).logits[0, -1], rtol=0, atol=1e-6)
    torch.testing.assert_close(found[1, 2], teacher(text[1:, :2]).logits[0, -1], rtol=0, atol=1e-6)
    assert found[:, 0].isnan().all()
    for teacher_kind, student in (("decoder", "encoder"), ("decoder", "encoder-decoder"), ("encoder", "encoder")):
        with pytest.raises(UserError, match="these are packed: leave packing out"):
            predictor(teacher, teacher_kind, student)({**batch, "segment_ids": labels})


def test_kinds_without_common_labels_are_refused() -> None:
    for teacher, student in (("encoder", "encoder-decoder"), ("decoder", "decoder"), ("encoder-decoder", "encoder")):
        with pytest.raises(UserError, match=f"is of kind {teacher}, the model of kind {student}"):
            predictor(torch.nn.Linear(1, 1), teacher, student)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Text, a vocabulary, a student's configuration and teachers of 512 tokens."""
    folder = tmp_path_factory.mktemp("distillation")
    numbered_words_vocabulary(folder)
    lines = [json.dumps({"text": " ".join(f"word{i} token{j}" for j in range(40))}) for i in range(40)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "tiny.json").write_text(json.dumps(TINY))
    for name, size in (("teacher", 512), ("other", 600)):
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config(**{**GPT2, "vocab_size": size, "initializer_range": 0.5})).save_pretrained(
            folder / name
        )
    return folder


def pretrain(work, run: str, **changed) -> list[dict]:
    flags = {
        "data_path": work / "text.jsonl", "vocab": next(work.glob("*.model")), "model_path": run, "log_interval": 1,
        "model_cfg": work / "tiny.json", "task": "prefix_lm", "input_seq_len": 32, "target_seq_len": 16, "lr": 1e-2,
        "batch_size": 4, "iters": 3, "data_n_workers": 1, "backend": "local", "dropout_rate": 0.0, **changed,
    }  # fmt: skip
    run_t5_pretraining.main(words(**flags))
    return records(run)


def test_a_run_learns_from_its_teacher_however_its_batch_is_split(work, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    teacher = {"distill_from": work / "teacher", "distill_weight": 0.75}
    whole = pretrain(work, "whole", **teacher)
    split = pretrain(work, "split", **teacher, batch_size=1, gradient_accumulation_steps=4)
    for one, other in zip(whole, split, strict=True):
        assert one["loss"] == pytest.approx(0.25 * one["loss_lm"] + 0.75 * one["loss_distillation"], rel=1e-9)
        for name in ("loss", "loss_lm", "loss_distillation"):
            assert other[name] == pytest.approx(one[name], rel=1e-4), name
    plain = pretrain(work, "plain")
    assert plain[0]["loss"] == pytest.approx(whole[0]["loss_lm"], rel=1e-6)
    own = pretrain(work, "own", iters=1, init_checkpoint="plain/last", distill_from="plain/last", reset_iteration=True)
    assert own[0]["loss_distillation"] == pytest.approx(0.0, abs=1e-6)  # a teacher equal to the student
    only = pretrain(work, "only", **{**teacher, "distill_weight": 1.0}, iters=30)
    assert only[-1]["loss_distillation"] < 0.9 * only[0]["loss_distillation"]


def test_an_encoder_learns_from_a_decoder_and_from_an_encoder(work, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = make_bert_data(tmp_path)
    config = json.loads((data / "tiny.json").read_text())
    size, losses = config["vocab_size"], {}
    GPT2LMHeadModel(GPT2Config(**{**GPT2, "vocab_size": size})).save_pretrained("decoder")
    BertForMaskedLM(BertConfig(**{**config, "hidden_size": 32})).save_pretrained("encoder")
    for teacher in ("decoder", "encoder"):
        flags = {
            "data_path": data / "train", "vocab_file": data / "vocab.txt", "model_path": f"run_{teacher}", "lr": 1e-3,
            "model_cfg": data / "tiny.json", "input_seq_len": 48, "batch_size": 4, "iters": 2, "log_interval": 1,
            "backend": "local", "distill_from": teacher,
        }  # fmt: skip
        run_bert_pretraining.main(words(**flags))
        (first, _) = records(f"run_{teacher}")
        expected = 0.5 * (first["loss_mlm"] + first["loss_distillation"]) + first["loss_nsp"]
        assert first["loss"] == pytest.approx(expected, rel=1e-9)
        losses[teacher] = first["loss_distillation"]
    assert losses["decoder"] != losses["encoder"] > 0


def test_teachers_that_do_not_fit_are_refused(work, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for changed, message in (
        ({"distill_from": work / "other"}, "predicts 600 tokens, the model 512: they need one vocabulary"),
        ({"distill_from": "nowhere/teacher"}, "--distill_from nowhere/teacher"),
        ({"distill_weight": 0.3}, "--distill_weight needs --distill_from"),
    ):
        with pytest.raises(UserError, match=message):
            pretrain(work, "run", **changed)
