"""Targets with tokens of one's own: a model that generates exactly its labels scores 100, as its text is shown."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lm_experiments_tools import FineTuner
from lm_experiments_tools.evaluation.predictions import TextDecoder
from tests.helpers.pretrained_toys import save_toy

TOKENS = ["<name>", "<place>"]
ROWS = [
    {"source": f"w{n} w9", "target": target}
    for n, target in enumerate(
        ["<name> w5 <place> w6", "<name>w5<place> w7", "<place> <name>", "w5 w6", "<extra_id_0> w8"]
    )
]


def save_base(kind, folder, special):
    """A tokenizer of words that, as T5's, loses the spaces around added tokens; `special` None adds none."""
    save_toy(kind, folder)
    words = {word: n for n, word in enumerate(["<pad>", "</s>", "<unk>", "▁", *(f"▁w{i}" for i in range(40))])}
    model = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    model.normalizer = normalizers.Strip(left=False, right=True)
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=["<extra_id_0>"],
    )  # fmt: skip
    if special is not None:
        tokenizer.add_tokens(TOKENS, special_tokens=special)
    tokenizer.save_pretrained(folder)
    return folder


def make_perfect(tuner, targets):
    """Let the model generate the labels that transformers' tokenizer gives, and padding."""
    plain = tuner.tokenizer
    known = {
        tuple(plain(source)["input_ids"]): plain(text_target=text)["input_ids"] for source, text in targets.items()
    }

    def generate(input_ids, **options):
        rows = [[0, *known[tuple(n for n in row if n)], 1] for row in input_ids.tolist()]
        rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        return torch.cat([input_ids, rows[:, 1:]], 1) if tuner.args.model_type == "decoder" else rows

    tuner.model.generate = generate


@pytest.mark.parametrize("kind", ["encoder-decoder", "decoder"])
@pytest.mark.parametrize("special", [True, False, None])
def test_a_perfect_model_scores_100(kind, special, tmp_path):
    tuner = FineTuner(
        save_base(kind, tmp_path / "base", special), valid_data_path=ROWS, input_seq_len=32, target_seq_len=16,
        metrics=("exact_match", "chrf", "bleu", "rouge"), model_path=str(tmp_path / "run"), speed="off",
    )  # fmt: skip
    if special is None:
        assert tuner.add_tokens(TOKENS) == 2
    make_perfect(tuner, {row["source"]: row["target"] for row in ROWS})
    values = tuner.evaluate()
    perfect = dict.fromkeys(("exact_match", "chrf", "rouge1", "rougeL"), 100.0)
    assert {name: values[name] for name in perfect} == pytest.approx(perfect) and values["bleu"] == pytest.approx(100)
    texts = tuner.predict([row["source"] for row in ROWS])
    assert [text.replace(" ", "") for text in texts] == [row["target"].replace(" ", "") for row in ROWS]


def test_another_answer_is_still_wrong_and_other_references_stay_as_written(tmp_path):
    rows = [{"source": "w1", "target": "<name> w5"}, {"source": "w2", "target": "w5  ~ W6"}]
    tuner = FineTuner(
        save_base("encoder-decoder", tmp_path, True), valid_data_path=rows, input_seq_len=32, target_seq_len=16,
        metrics=("exact_match",), speed="off",
    )  # fmt: skip
    make_perfect(tuner, {"w1": "<place> w5", "w2": "w5  ~ W6"})
    assert tuner.evaluate()["exact_match"] == 0.0
    texts = ["w5  ~ W6", "<name> ~"]  # "~" is unknown to the tokenizer, which could not write it
    assert TextDecoder(tuner.tokenizer).references(texts) == texts
