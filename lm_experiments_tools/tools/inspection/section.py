"""The record that every kind of data gives, and its printer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Section:
    """Facts about one file or split, and samples from it.

    Attributes:
        title: the file or the split.
        facts: (name, text); an empty name continues the fact above.
        samples: (title, lines) of each sample.
    """

    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    samples: list[tuple[str, list[str]]] = field(default_factory=list)

    def add(self, name: str, text: str) -> None:
        """Append a fact."""
        self.facts.append((name, text))

    def print(self) -> None:
        """Print the section to stdout."""
        print(f"\n{self.title}")
        for name, text in self.facts:
            print(f"  {name:<10} {text}")
        for title, lines in self.samples:
            print("\n" + "\n  ".join([title, *lines]))
