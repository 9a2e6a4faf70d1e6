"""Run as a script, in a process of its own: what seqio itself gives for tasks, and what `TaskExamples` gives.

python seqio_oracle.py FOLDER    FOLDER holds vocab.model, docs.json, tasks.py; made.npz and said.json are written
"""

import dataclasses
import functools
import json
import sys
import types
from itertools import islice
from pathlib import Path

import numpy as np
import seqio
import tensorflow as tf
from t5.data import preprocessors as t5

from lm_experiments_tools.data.seqio.job import Job
from lm_experiments_tools.data.seqio.tasks import TaskExamples, step_name
from lm_experiments_tools.errors import UserError

ROWS, NUMBER, SEED = 8, 480, 11
LENGTHS = {"span_corruption": (64, 14), "prefix_lm": (48, 47)}  # what t5 needs for these inputs
REGISTERED = (40, 24)


def job(folder, task, **changed):
    inputs, targets = REGISTERED
    settings = Job(
        task=task, vocab_path=str(folder / "vocab.model"), inputs_length=inputs, targets_length=targets, seed=SEED,
        validation=False, valid_samples=None, threads=2,
    )  # fmt: skip
    return dataclasses.replace(settings, **changed)


def ours(examples, start=0, rows=ROWS, number=NUMBER):
    """`number` examples from `start` on, in batches of `rows`."""
    return np.concatenate(list(islice(examples.batches(start, rows), number // rows)))


@tf.autograph.experimental.do_not_convert  # saves 9 s, and the examples are the same
def theirs(task, lengths, **options):
    """The same from `seqio.get_dataset`, with its own way of padding."""
    lengths = dict(zip(("inputs", "targets"), lengths, strict=True))
    options = {"shuffle": True, "num_epochs": None, "seed": SEED, **options}
    converter = seqio.EncDecFeatureConverter(pack=False)
    dataset = seqio.get_dataset(task, lengths, converter, verbose=False, **options).take(NUMBER)
    names = ("encoder_input_tokens", "decoder_target_tokens")
    return np.array([np.concatenate([x[name] for name in names]) for x in dataset.as_numpy_iterator()])


def plain_task(folder, objective):
    """t5's task over the same documents as lines of text files, put together from seqio's parts alone."""
    vocabulary = seqio.SentencePieceVocabulary(str(folder / "vocab.model"), extra_ids=100)
    feature = seqio.Feature(vocabulary, add_eos=True)
    files = sorted(map(str, (folder / "lines").glob("*.txt")))

    def name_text(dataset):
        return dataset.map(lambda line: {"inputs": "", "targets": line})

    return seqio.Task(
        f"plain_{objective}",
        source=seqio.TextLineDataSource({"train": files}),
        preprocessors=[
            # t5 counts this step when it derives its seeds
            name_text, seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder(), getattr(t5, objective),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"inputs": feature, "targets": feature},
    )  # fmt: skip


def refusal(folder, task, **changed):
    """The sentence with which a job is refused."""
    try:
        examples = TaskExamples(job(folder, task, **changed))
        for _ in range(3):
            next(examples.batches(0, 64))
    except UserError as error:
        return str(error)
    return "it was not refused"


def mixing_rates():
    """Sizes of tasks, and seqio's rates of them for each scale, maximum and temperature."""
    sizes, rates = (31, 4000, 250_000, 7), []
    for scale, maximum, temperature in ((1.0, None, 1.0), (1.0, 4096, 1.0), (2.5, 2048, 3.3), (0.1, 500, 0.7)):
        tasks = [
            types.SimpleNamespace(name="sized", cache_dir=None, num_input_examples=lambda _, size=size: size)
            for size in sizes
        ]
        options = {"scale": scale, "maximum": maximum, "temperature": temperature}
        rates.append([options, [seqio.mixing_rate_num_examples(task, **options) for task in tasks]])
    return sizes, rates


def registered_tasks(folder, made, said):
    sys.path.insert(0, str(folder))
    said["raises"], said["leaves"] = refusal(folder, "raises:lines"), refusal(folder, "leaves:lines")
    said["no_module"], said["no_name"] = refusal(folder, "nowhere:lines"), refusal(folder, "tasks:lanes")
    for name in ("nothing", "only_targets", "strangers", "unprepared"):
        said[name] = refusal(folder, f"tasks:{name}")
    said["no_split"] = refusal(folder, "tasks:tfds", validation=True)
    for name in ("lines", "mix", "tfds", "ordered"):
        examples = TaskExamples(job(folder, f"tasks:{name}", validation=name == "lines"))
        made[f"ours_{name}"] = ours(examples)
        made[f"theirs_{name}"] = theirs(name, REGISTERED, shuffle=name != "ordered")
        said[f"fingerprint_{name}"] = examples.fingerprint()
        if name == "lines":
            again = TaskExamples(job(folder, f"tasks:{name}", threads=1))
            made["from_100_rows_of_12"] = ours(again, start=100, rows=12, number=120)
            made["ours_validation"] = np.concatenate(list(examples.validation()))
            made["theirs_validation"] = theirs(name, REGISTERED, dataset_split="validation", num_epochs=1)
    examples = TaskExamples(job(folder, "tasks:lines", validation=True, valid_samples=7))
    made["few_validation"] = np.concatenate(list(examples.validation()))
    made["old"] = ours(TaskExamples(job(folder, "tasks:old")))
    made["old_from_80"] = ours(TaskExamples(job(folder, "tasks:old")), start=80, number=80)


def glue_tasks(folder, said):
    """What t5's preprocessors make of rows of GLUE, whose fields are tfds' (T5's tasks read that)."""
    said["glue"] = {}
    for name, row in json.loads((folder / "glue.json").read_text()).items():
        step = (
            t5.stsb if name == "stsb" else functools.partial(t5.glue, benchmark_name=name, label_names=["no", "yes"])
        )
        row = {key: np.float32(value) if name == "stsb" and key == "label" else value for key, value in row.items()}
        made = next(step(tf.data.Dataset.from_tensors({"idx": 0, **row})).as_numpy_iterator())
        said["glue"][name] = [made["inputs"].decode(), made["targets"].decode()]


def main(folder):
    made, said = {}, {"mixing_rates": mixing_rates()}
    glue_tasks(folder, said)
    for name, lengths in LENGTHS.items():
        made[f"theirs_{name}"] = theirs(plain_task(folder, name), lengths)
    said["bound"] = step_name(functools.partial(functools.partial(refusal, noise=0.5, steps=[1]), "a"))
    registered_tasks(folder, made, said)
    np.savez(folder / "made.npz", **made)
    (folder / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
