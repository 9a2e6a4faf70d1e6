"""transformers' Trainer on the classes of both packages: two steps, with and without accumulation."""

import pytest
import torch
import transformers
from torch.utils.data import Dataset

import modeling_bert
import modeling_t5

BERT = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "num_labels": 2,
}  # fmt: skip
CLASSES = {
    "BertForPreTraining": (modeling_bert, "words", "pairs"),
    "BertForMaskedLM": (modeling_bert, "words"),
    "BertForSequenceClassification": (modeling_bert, "classes"),
    "T5ForConditionalGeneration": (modeling_t5, "ragged words"),
    "T5ForSequenceClassification": (modeling_t5, "classes"),
    "T5EncoderForSequenceClassification": (modeling_t5, "classes"),
}


class Rows(Dataset):
    """16 rows of 12 tokens; "words" has the same number of labels in each, "ragged words" has not."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(2, 50, (16, 12), generator=generator)
        ids[:, -1] = 1
        labels = torch.randint(2, 50, (16, 12), generator=generator)
        labels[:, 8:] = -100
        if "ragged words" in kinds:
            for row in range(16):
                labels[row, 1 + row % 7 :] = -100
        if "classes" in kinds:
            labels = torch.arange(16) % 2
        self.columns = {"input_ids": ids, "labels": labels}
        if "pairs" in kinds:
            self.columns["next_sentence_label"] = torch.arange(16) % 2

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {name: column[row] for name, column in self.columns.items()}


def train(folder, package, name: str, kinds: tuple[str, ...], rows: int, accumulation: int):
    """Logged losses, their last gradient norm, and weights after two steps."""
    torch.manual_seed(0)
    config = package.BertConfig(**BERT) if package is modeling_bert else package.T5Config(**T5)
    model = getattr(package, name)(config)
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=rows, logging_steps=1, optim="sgd",
        gradient_accumulation_steps=accumulation, learning_rate=0.1, lr_scheduler_type="constant", use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, args, train_dataset=Rows(kinds))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return [log["loss"] for log in logs], [log["grad_norm"] for log in logs], model.state_dict()


DAILY = ("BertForMaskedLM", "T5ForConditionalGeneration")


@pytest.mark.parametrize("name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.slow) for n in CLASSES])
def test_micro_batches_are_one_batch(tmp_path, name):
    package, *kinds = CLASSES[name]
    losses, norms, weights = train(tmp_path, package, name, kinds, rows=8, accumulation=1)
    in_parts = train(tmp_path, package, name, kinds, rows=4, accumulation=2)
    assert len(losses) == 2
    assert in_parts[0] == pytest.approx(losses, rel=1e-4) and in_parts[1] == pytest.approx(norms, rel=1e-4)
    torch.testing.assert_close(in_parts[2], weights, rtol=1e-4, atol=1e-6)
