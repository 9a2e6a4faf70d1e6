"""Super-Natural-Instructions (Wang et al. 2022, "Benchmarking Generalization via In-Context Instructions on 1,600+
Language Tasks"): a folder with `tasks/*.json` and `splits/<split>/{train,test}_tasks.txt`, as in its repository.

Prompts equal those of Tk-Instruct. With a definition and one positive example with its explanation:

    Definition: Add the numbers.

     Positive Example 1 -
    Input: 1 2.
     Output: 3.
     Explanation: 1 + 2 is 3.

    Now complete the following example -
    Input: 4 5.
    Output: _                                 (a blank ends it)

A full stop is added after texts without punctuation. Examples are added while the prompt (without the name of the
task) is within the limit. A prompt that is too long without examples is truncated and counted.
"""

from __future__ import annotations

import json
import logging
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_experiments_tools.data.examples.examples import Example, text_in, texts_in
from lm_experiments_tools.data.text.records import BadRecord, Record, RejectedRecords, converted
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

Fits = Callable[[Sequence[str]], bool]


@dataclass(frozen=True)
class PromptParts:
    """Which parts a Super-Natural-Instructions prompt has: task name, definition, and numbers of examples.

    The names of the fields are those of the options of nanoT5 and Tk-Instruct.
    """

    add_task_name: bool = False
    add_task_definition: bool = True
    num_pos_examples: int = 0
    num_neg_examples: int = 0
    add_explanation: bool = False


# Those that --tk_instruct draws from: Tk-Instruct's encodings, in its order.
TK_INSTRUCT = (
    PromptParts(),
    PromptParts(add_task_definition=False, num_pos_examples=2),
    PromptParts(num_pos_examples=2),
    PromptParts(num_pos_examples=2, num_neg_examples=2),
    PromptParts(num_pos_examples=2, add_explanation=True),
)


def prompt_text(task: dict[str, Any], task_input: str, parts: PromptParts, fits: Fits) -> str:
    """Build the prompt of one instance (a single input of a task), as Tk-Instruct does.

    Args:
        task: content of the task's JSON file, with its name under "Task" and one text under "Definition".
        fits: function that returns True if the given texts, concatenated, are within the length limit.
    """
    question = _question(task_input)
    definition = _definition(task, parts)
    positive = _examples_text(task, "Positive", parts, parts.num_pos_examples)
    negative = _examples_text(task, "Negative", parts, parts.num_neg_examples)
    # Blanks in these texts, which the prompt does not have, are Tk-Instruct's own.
    positive = _fitting(positive, lambda texts: fits([definition, *_apart(texts[:-1]), texts[-1], question]))
    before = [definition, *_apart(positive)]
    negative = _fitting(negative, lambda texts: fits([*before, *_apart(texts[:-1]), texts[-1], question]))
    name = f"{task['Task']}. " if parts.add_task_name else ""
    return name + definition + "".join(positive) + "".join(negative) + question


def _question(task_input: str) -> str:
    return "Now complete the following example -\n" + _ended(f"Input: {task_input.strip()}") + "\nOutput: "


def _definition(task: dict[str, Any], parts: PromptParts) -> str:
    return _ended(f"Definition: {task['Definition'].strip()}") + "\n\n" if parts.add_task_definition else ""


def _ended(text: str) -> str:
    return text if text[-1] in string.punctuation else text + "."


def _examples_text(task: dict[str, Any], kind: str, parts: PromptParts, limit: int) -> list[str]:
    texts = []
    for number, example in enumerate(task.get(f"{kind} Examples", [])[:limit], 1):
        lines = [f" {kind} Example {number} -\n", _ended(f"Input: {example['input'].strip()}") + "\n"]
        lines.append(_ended(f" Output: {example['output'].strip()}") + "\n")
        if parts.add_explanation and example.get("explanation") is not None:
            lines.append(_ended(f" Explanation: {example['explanation'].strip()}") + "\n")
        texts.append("".join(lines) + "\n")
    return texts


def _apart(texts: Sequence[str]) -> list[str]:
    """Texts with a blank between each two."""
    return [piece for text in texts for piece in (" ", text)][1:]


def _fitting(texts: list[str], fit: Callable[[list[str]], bool]) -> list[str]:
    """The first texts, as many as fit one after the other. All of them are tried first: mostly they do."""
    if not texts or fit(texts):
        return texts
    for number in range(len(texts)):
        if not fit(texts[: number + 1]):
            return texts[:number]
    return texts


def instruction_examples(
    listing: Path,
    max_instances: int | None,
    parts: Sequence[PromptParts],
    rejected: RejectedRecords,
    num_tokens: Callable[[str], int],
    limit: int,
) -> Iterator[Example]:
    """Yield the instances (single inputs with targets) of Super-Natural-Instructions tasks, task by task.

    Args:
        listing: file of task names, `splits/<split>/{train,test}_tasks.txt`.
        max_instances: number of instances to read from each task; None for all.
        parts: parts of the prompt. If there are several choices, training draws one of them.
        limit: maximum number of tokens of a prompt, as `num_tokens` counts them.

    Raises:
        UserError: files are missing, tasks are damaged, too many instances are bad, or a prompt exceeds the limit.
    """

    def fits(texts: Sequence[str]) -> bool:
        return num_tokens("".join(texts)) <= limit

    for path in _task_files(listing):
        task = _read_task(path)
        for some in parts:
            length = num_tokens(prompt_text(task, "", some, lambda _: False))
            if length >= limit:
                raise UserError(
                    f"the prompt of {path.stem} has {length} tokens without an input: raise --input_seq_len."
                )
        instances = task["Instances"][:max_instances]
        rows = (Record(item, f"{path}, instance {n + 1}", 0, b"", n) for n, item in enumerate(instances))
        # Bound now: the generator is used up before the next task is read.
        yield from converted(rows, lambda row, task=task: _example(row, task, parts, fits), rejected)


def _task_files(listing: Path) -> list[Path]:
    folder = listing.parents[2]
    tasks = folder / "tasks"
    if not listing.is_file() or not tasks.is_dir():
        raise UserError(
            f"{folder} is no folder of Super-Natural-Instructions: it needs tasks/ and {listing.relative_to(folder)} "
            "(--sni_split)."
        )
    names = listing.read_text(encoding="utf-8-sig").split()
    paths = [tasks / f"{name}.json" for name in names]
    absent = [path.stem for path in paths if not path.is_file()]
    if len(absent) == len(names):
        raise UserError(f"none of the {len(names)} tasks that {listing} names is in {tasks}.")
    if absent:
        logger.warning(
            "%d of the %d tasks that %s names are not in %s and are left out (the first: %s)",
            len(absent), len(names), listing, tasks, absent[0],
        )  # fmt: skip
    return [path for path in paths if path.is_file()]


def _read_task(path: Path) -> dict[str, Any]:
    try:
        task = json.loads(path.read_text(encoding="utf-8-sig"))
        definition = task["Definition"]
        task |= {"Task": path.stem, "Definition": definition if isinstance(definition, str) else definition[0]}
        task["Instances"][0]
        for example in [*task.get("Positive Examples", []), *task.get("Negative Examples", [])]:
            keys = ("input", "output", "explanation")[: 2 if example.get("explanation") is None else 3]
            example |= {key: text_in(example, key, may_be_empty=True) for key in keys}  # numbers become text
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, BadRecord) as error:
        raise UserError(f"{path} is no task of Super-Natural-Instructions ({error}): copy it again.") from None
    return task


def _example(row: Record, task: dict[str, Any], parts: Sequence[PromptParts], fits: Fits) -> Example:
    instance: Any = row.value
    if not isinstance(instance, dict):
        raise BadRecord(f"of type {type(instance).__name__}, not an object")
    task_input = text_in(instance, "input", may_be_empty=True)
    outputs = texts_in(instance, "output")
    prompts = [prompt_text(task, task_input, some, fits) for some in parts]
    name = str(row.number if instance.get("id") is None else instance["id"])
    variants = tuple(prompts) if len(prompts) > 1 else ()
    return Example(prompts[0], outputs, name=name, group=task["Task"], variants=variants)
