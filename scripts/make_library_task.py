"""A text-to-text task out of the corpus of `lmtools corpus`: which library's documentation is a paragraph from?

    {"source": "The number of bins is only proportional to cube root of a.size. It tends to ...", "target": "numpy"}

Text of your own has no key "source" that names a library. Then the task is the last word of a paragraph:

    {"source": "It tends to overestimate for small data", "target": "sets."}

The libraries are those with the most paragraphs in this Python installation; its standard library is "python".
Paragraphs that name a library are left out, so that the answer never stands in the question. A file of documentation
belongs to train, valid or test by a hash of its name: no two sets share a file, and no paragraph occurs twice (the
corpus holds each once). The same corpus gives the same files.
"""

import argparse
import hashlib
import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

CHARACTERS = (120, 300)  # of a paragraph
SETS = {"test": 0.12, "valid": 0.18, "train": 1.0}  # cumulative shares of files
PARTS = {
    "test": 8,
    "valid": 16,
    "train": 1,
}  # of a library's training paragraphs that a set holds at most: an 8th, ...


def share(text: str) -> float:
    """A hash of the text in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def library_of(source: str) -> str:
    """Name of the library that a file of documentation belongs to."""
    name = source.split("/")[0].removesuffix(".py")
    return "python" if name == "pydoc_data" or name in sys.stdlib_module_names else name


def read_paragraphs(corpus: Path) -> dict[str, list[tuple[str, str]]]:
    """Library -> (file, paragraph) of paragraphs of a fitting length."""
    found = defaultdict(list)
    shortest, longest = CHARACTERS
    for document in documents(corpus):
        if "source" in document:
            library = library_of(document["source"])
            for text in document["text"].split("\n"):
                if library.isidentifier() and shortest <= len(text) <= longest:
                    found[library].append((document["source"], text))
    return found


def documents(corpus: Path) -> list[dict[str, str]]:
    """The lines of train.jsonl, and of valid.jsonl if it is there."""
    files = [corpus / name for name in ("train.jsonl", "valid.jsonl") if (corpus / name).is_file()]
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def last_words(corpus: Path, paragraphs: int) -> dict[str, list[dict[str, str]]]:
    """Set -> its examples, of text of any kind: the last word of a paragraph; of a document, all are in one set."""
    sets = {name: [] for name in SETS}
    for document in sorted(documents(corpus), key=lambda document: share(document["text"])):
        chosen = next(name for name, limit in SETS.items() if share(document["text"]) < limit)
        for text in document["text"].split("\n"):
            source, _, target = text[-CHARACTERS[1] :].rpartition(" ")
            if len(source.split()) > 3 and target and len(sets[chosen]) < paragraphs // PARTS[chosen]:
                sets[chosen].append({"source": source, "target": target})
    return sets


def examples(corpus: Path, libraries: int, paragraphs: int) -> dict[str, list[dict[str, str]]]:
    """Set -> its examples; for training at most `paragraphs` of each of the `libraries` largest libraries."""
    found = read_paragraphs(corpus)
    largest = sorted(found, key=lambda name: (-len(found[name]), name))[:libraries]
    named = re.compile("|".join(map(re.escape, largest)), re.IGNORECASE)
    sets = {name: [] for name in SETS}
    for library in sorted(largest):
        usable = [pair for pair in found[library] if not named.search(pair[1])]
        counts = Counter()
        for source, text in sorted(usable, key=lambda pair: share(pair[1])):
            chosen = next(name for name, limit in SETS.items() if share(source) < limit)
            counts[chosen] += 1
            if counts[chosen] <= paragraphs // PARTS[chosen]:
                sets[chosen].append({"source": text, "target": library})
    return sets


def main() -> None:
    """Write train.jsonl, valid.jsonl and test.jsonl, and say what the simplest answer scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder that `lmtools corpus` wrote")
    parser.add_argument("--output", type=Path, required=True, help="folder for the three files")
    parser.add_argument("--libraries", type=int, default=9, help="so many, the largest")
    parser.add_argument("--paragraphs", type=int, default=500, help="of each library for training, at most")
    args = parser.parse_args()
    if not (args.corpus / "train.jsonl").is_file():
        sys.exit(f"error: {args.corpus} holds no train.jsonl: write a corpus there with lmtools corpus.")
    is_documentation = any("source" in document for document in documents(args.corpus))
    if is_documentation:
        sets = examples(args.corpus, args.libraries, args.paragraphs)
    else:
        sets = last_words(args.corpus, args.libraries * args.paragraphs)
    if any(len({row["target"] for row in rows}) < 2 for rows in sets.values()):
        sys.exit(f"error: {args.corpus} has too few paragraphs for three sets: make it larger.")
    args.output.mkdir(parents=True, exist_ok=True)
    for name in ("valid", "test", "train"):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in sets[name]]
        (args.output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    counts = Counter(row["target"] for row in sets["test"])
    print(f"{', '.join(f'{len(rows):,} {name}' for name, rows in sets.items())} paragraphs in {args.output}")
    print("test: " + ", ".join(f"{library} {count}" for library, count in counts.most_common()))
    print(f"the best constant answer is right in {100 * max(counts.values()) / len(sets['test']):.1f} % of test")


if __name__ == "__main__":
    main()
