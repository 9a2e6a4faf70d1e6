"""Fine-tune an encoder with FineTuner and ask it for probabilities.

    python examples/library_finetuner.py bert-base-uncased runs/sentiment
    torchrun --nproc_per_node 2 examples/library_finetuner.py bert-base-uncased runs/sentiment

The rows are in memory here; `data_path` also takes files and datasets. All workers call the same methods in the same
order.
"""

import random
import sys

from lm_experiments_tools import FineTuner

GOOD, BAD = ("fine", "lovely", "great", "charming"), ("dull", "awful", "boring", "weak")
THINGS = ("film", "book", "play", "song", "meal", "trip")


def rows(count: int, seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    kinds = [draw.choice([("positive", GOOD), ("negative", BAD)]) for _ in range(count)]
    return [{"sentence": f"a {draw.choice(words)} {draw.choice(THINGS)}", "label": label} for label, words in kinds]


def main(model: str, folder: str) -> None:
    tuner = FineTuner(
        model, model_type="encoder", task="classification", data_path=rows(400, 1), valid_data_path=rows(80, 2),
        test_data_path=rows(80, 3), metrics=["accuracy", "f1_macro"], input_seq_len=16, batch_size=16, lr=1e-3,
    )  # fmt: skip
    # At its end the best checkpoint is loaded and the test data evaluated.
    metrics = tuner.train(epochs=2, model_path=folder, save_best=True, optimize_metric="accuracy", optimize_mode="max")
    answers = tuner.predict(["a lovely meal", "a boring play"], return_probabilities=True)
    tuner.save(f"{folder}/model")
    if tuner.backend.is_main:
        print(f"test accuracy {metrics['test']['accuracy']:.3f}")
        for answer in answers:
            print(", ".join(f"{label} {probability:.3f}" for label, probability in answer.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
